"""Gathers that start before the graph that waits for them: at the end of the graph before it, or when the optimizer has stepped.

::

    forward graph ─ end: start ─┐ loss            optimizer.step ─ end: start ─┐ data loading
    backward graph ─────────────┴ takes over      next forward ────────────────┴ takes over

    entry_gather(Tensor[] shards, int world, str group, str dtype, bool own) -> Tensor[]     what `passes/lift.py` puts at an entry

What comes next is what came next the last time after the same two events, so it is a function of the program, and equal on all ranks. Each
graph's comparison of ranks (`order`) carries two more numbers: what a rank would start at the graph's end, and what it can take over
now. Only what all ranks say alike is done.

Never stale: what is sent is a copy of the shards, and it is taken over only if the shards still hold the same bits. (Version counters
do not tell: `torch._foreach_mul_` on DTensors, a foreach optimizer's step and ``p.data.mul_`` leave all of them as they are on torch 2.13.)
Comparing needs the values on the host, so this is for CPU ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.spec import Entry, decode

from .order import fingerprint, same_on_all_ranks

_LIB = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIB.define("entry_gather(Tensor[] shards, int world, str group, str dtype, bool own) -> Tensor[]")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def launch(sent: list[Tensor], world: int, group: str, own: bool) -> list[Tensor]:
    """Start an all-gather of each: `[n]` → `[world * n]`, to be waited for. ``own``: by `wire`, on a gloo group of ours."""
    c10d, ours = torch.ops._c10d_functional, torch.ops.fsdp_compile
    if own:
        return ours.all_gather_coalesced(sent, world, group)
    if len(sent) == 1:
        return [c10d.all_gather_into_tensor(sent[0], world, group)]
    return c10d.all_gather_into_tensor_coalesced(sent, world, group)


def _entry_gather(shards: list[Tensor], world: int, group: str, dtype: str, own: bool) -> list[Tensor]:
    flight = _ready.pop((group, *(s.data_ptr() for s in shards)), None)
    if flight is not None:
        return flight.outs
    to = getattr(torch, dtype)
    return launch([s.to(to) for s in shards], world, group, own)


def _entry_gather_fake(shards: list[Tensor], world: int, group: str, dtype: str, own: bool) -> list[Tensor]:
    return [s.new_empty(world * s.numel(), dtype=getattr(torch, dtype)) for s in shards]


_LIB.impl("entry_gather", _entry_gather, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_compile::entry_gather", _entry_gather_fake, lib=_LIB)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A gather that has been started: of which shards, what they held, and where it arrives."""

    group: str
    shards: tuple[weakref.ref[Tensor], ...]
    sent: tuple[Tensor, ...]  # copies, in the shards' dtype
    outs: list[Tensor]

    def fits(self, shards: Sequence[Tensor]) -> bool:
        """Whether these are the shards, with the same bits."""
        return len(shards) == len(self.shards) and all(
            ref() is s and torch.equal(_bits(s), _bits(x)) for ref, s, x in zip(self.shards, shards, self.sent)
        )

    def drop(self) -> None:
        """Wait, so that nothing writes into memory that is given back."""
        for out in self.outs:
            torch.ops._c10d_functional.wait_tensor(out)


def _bits(t: Tensor) -> Tensor:
    return t.detach().view(_BITS[t.element_size()])


_ready: dict[tuple[Any, ...], _Flight] = {}  # for the graph that runs now: by group and its shards' addresses


@dataclass(frozen=True)
class _Next:
    """What the graph that followed an event gathers at its entry, of which shards."""

    gathers: tuple[Entry, ...]
    shards: tuple[tuple[weakref.ref[Tensor], ...], ...]
    key: int

    @property
    def alive(self) -> bool:
        return all(ref() is not None for refs in self.shards for ref in refs)


@dataclass
class Early:
    """A group's early gathers. An event is a graph's end or an optimizer's step. ``last``: the last one; ``after``: it with the one
    before it, until the next graph begins: a forward after a step and one after another forward are followed by different graphs.
    ``backward``: it was a backward graph's."""

    last: Hashable | None = None
    after: tuple[Hashable, Hashable] | None = None
    backward: bool = False
    next: dict[tuple[Hashable, Hashable], _Next | None] = field(default_factory=dict)
    flights: list[_Flight] = field(default_factory=list)
    key: int = 0
    timeout_s: float = 600.0

    def offer(self, event: Hashable) -> int:
        """A number for what this rank would start when ``event`` comes next; 0: nothing."""
        plan = self.next.get((self.last, event))
        return plan.key if plan is not None and plan.alive else 0

    def entering(self, gathers: tuple[Entry, ...], args: Sequence[Any], backward: bool) -> int:
        """A graph that gathers this at its entry is about to run. Returns a number for what it can take over; 0: nothing."""
        shards = [[args[i] for i in g.inputs] for g in gathers]
        key = fingerprint(tuple(g.text for g in gathers)) if gathers else 0
        if self.after is not None:  # weights are written between a backward and a forward: what is gathered there would be dropped
            follows = key and (backward or not self.backward)
            refs = tuple(tuple(weakref.ref(s) for s in row) for row in shards)
            self.next[self.after] = _Next(gathers, refs, key) if follows else None
        self.after = None
        if not self.flights or key != self.key or len(self.flights) != len(shards):
            return 0
        return key if all(f.fits(row) for f, row in zip(self.flights, shards)) else 0

    def settle(self, take: bool) -> None:
        """Whether all ranks can take over what has been started; if not, it is dropped."""
        flights, self.flights = self.flights, []
        for f in flights:
            if take:
                _ready[(f.group, *(s.data_ptr() for ref in f.shards if (s := ref()) is not None))] = f
            else:
                f.drop()

    def passed(self, event: Hashable, start: bool, backward: bool = False) -> None:
        """``event`` has happened; ``start``: all ranks offer the same."""
        self.after, self.last, self.backward = (self.last, event), event, backward
        plan = self.next.get(self.after)
        if start and plan is not None:
            self.settle(False)
            self.key = plan.key
            self.flights = [_start(g, refs) for g, refs in zip(plan.gathers, plan.shards)]

    def failed(self) -> None:
        """A graph failed: nothing follows from it, and what it was to take over is dropped."""
        self.last = self.after = None
        while _ready:
            with contextlib.suppress(RuntimeError):  # a peer has died: the graph's own error says so
                _ready.popitem()[1].drop()


def _start(gather: Entry, refs: tuple[weakref.ref[Tensor], ...]) -> _Flight:
    with torch.no_grad():
        copies = tuple(ref().detach().clone() for ref in refs)  # type: ignore[union-attr]
        sent = [x.to(getattr(torch, gather.dtype)) for x in copies]
        return _Flight(gather.group, refs, copies, launch(sent, gather.world, gather.group, gather.own))


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Early] = weakref.WeakKeyDictionary()
_steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def early_of(group: dist.ProcessGroup, timeout_s: float) -> Early:
    """The group's early gathers; all ranks must ask for them from the same graph on. ``timeout_s``: for the other ranks after a step."""
    return _groups.setdefault(group, Early(timeout_s=timeout_s))


def after_step(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer has stepped: start what the next forward gathers first, if all ranks have come here. Raises as `same_on_all_ranks`."""
    for group, early in list(_groups.items()):
        if not any(_group_of(p) == group.group_name for g in optimizer.param_groups for p in g["params"]):
            continue
        if optimizer not in _steppers:
            _steppers[optimizer] = next(_count)
        event = ("step", _steppers[optimizer])
        start = False
        if early.next.get((early.last, event)) is not None:
            title = "optimizer step"
            start, _ = same_on_all_ranks(group, title, (title,), early.timeout_s, (early.offer(event), 0))
        early.passed(event, start)


def _group_of(p: Any) -> str | None:
    text = p.__dict__.get("_fsdp_spec")
    return None if text is None else decode(text).group


def drop_all() -> None:
    """Let go of whatever has been started and nobody has taken over."""
    for early in _groups.values():
        early.settle(False)


atexit.register(drop_all)
