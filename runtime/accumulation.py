"""Gradient accumulation without communication: FSDP2's ``set_requires_gradient_sync``, on which `no_sync` stands (`hold`).

::

    no sync    w = collect(unshard(leaf).detach(), into)             into.grad: whole, unreduced, in the reduce dtype, on every rank
    held       w = collect(held(whole), into)                        the same of a weight that `no_sync` has gathered once
    sync       w = with_pending(unshard(leaf), into.grad, ticket)    one reduction of the sum

A parameter that several graphs read has several such reads in one backward, and several backwards may have been built before the first
of them runs: the ticket (parameter, how many times it has collected) says which of them adds what was collected.

A backward that runs when its parameters no longer collect, because only its forward was in the context, reduces at once what it brings.
It trades memory for communication: between the micro-steps every rank holds whole gradients.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile import compat
from fsdp_compile.spec import decode

# How a module reads a parameter while gradients are collected: the leaf that collects, or what was collected and its ticket; the whole
# weight, if it is held.
Reading = tuple[Tensor | None, Tensor | None, Tensor | None]


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether later backwards reduce gradients over the ranks (True, the usual) or collect them on each rank (False).

    A parameter that the first synchronised backward does not reach keeps what it has collected until one does. Raises ValueError for
    a model that is not sharded yet."""
    read_as(sharded_modules(model, recurse), requires_gradient_sync, {})


def sharded_modules(model: nn.Module, recurse: bool = True) -> list[nn.Module]:
    """The sharded modules of a model. Raises ValueError if there is none."""
    model = getattr(model, "_orig_mod", model)
    modules = [m for m in (model.modules() if recurse else [model]) if "_fsdp_state" in m.__dict__]
    if not modules:
        raise ValueError(f"{type(model).__name__} is not sharded yet: call fsdp_compile.fully_shard(model) first, or run one step")
    return modules


def read_as(modules: list[nn.Module], sync: bool, whole: Mapping[nn.Parameter, Tensor]) -> None:
    """Let the modules' parameters be read so that gradients are reduced (``sync``) or collected; ``whole``: weights that are held."""
    for m in modules:
        found: dict[str, Reading] = {}
        for name, p in m._parameters.items():
            if p is None or not hasattr(p, "_fsdp_spec"):
                continue
            if not p.requires_grad:
                if p in whole:
                    found[name] = None, None, whole[p]
            elif not sync:
                found[name] = _collector(p), None, whole.get(p)
            elif (grad := _take(p)) is not None:
                found[name] = grad, p.__dict__["_fsdp_ticket"], None
        m.__dict__["_fsdp_accumulate"] = found or None


def collects(module: nn.Module) -> bool:
    """Whether a sharded module's gradients are collected."""
    return any(into is not None and ticket is None for into, ticket, _ in (module._fsdp_accumulate or {}).values())  # type: ignore[union-attr,operator]


def wholes(modules: list[nn.Module]) -> dict[nn.Parameter, Tensor]:
    """The weights that these modules hold."""
    found = {}
    for m in modules:
        for name, (_, _, whole) in (m._fsdp_accumulate or {}).items():  # type: ignore[union-attr,operator]
            if whole is not None:
                found[m._parameters[name]] = whole
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class _Claim:
    """What a parameter collected the ``done``-th time is in its reduced gradient; the ``taken``-th, in that of backward ``backward``."""

    done: int
    taken: int = 0
    backward: int = -1


_owners = itertools.count()
_claims: dict[int, _Claim] = {}  # by the ticket's first number: one for each parameter that has ever collected


def claim(owner: int, count: int) -> bool:
    """Whether the caller, a backward, is to add what parameter ``owner`` collected the ``count``-th time: the first of its backward to
    ask, unless an earlier backward has brought it to the end. (One that failed on the way does not count.)"""
    now, found = compat.backward_id(), _claims.get(owner, _Claim(0))
    if count <= found.done or (found.taken, found.backward) == (count, now):
        return False
    _claims[owner] = _Claim(found.done, count, now)
    return True


def _collector(p: Any) -> Tensor:
    """The leaf on which ``p``'s whole gradient accumulates: a scalar's storage, expanded; its ``.grad`` is the real thing."""
    into = p.__dict__.get("_fsdp_collector")
    if into is None:
        spec = decode(p._fsdp_spec)
        dtype = spec.dtype if spec.dtype.is_complex else spec.reduce_dtype
        into = nn.Parameter(torch.zeros((), dtype=dtype, device=p.device).expand(spec.shape))
        into._fsdp_is_shard = True  # type: ignore[attr-defined]  # ours, not a parameter of the model's
        p._fsdp_collector = into
        _watch(into, weakref.ref(p))
    if (pending := p.__dict__.pop("_fsdp_pending", None)) is not None:
        into.grad = pending
    return into


def _watch(into: Tensor, ref: weakref.ref[Any]) -> None:
    """Let a collecting leaf look, when a gradient arrives, whether its parameter still wants it so."""

    def drop_if_frozen(grad: Tensor) -> Tensor | None:
        p = ref()
        if p is None or p.requires_grad:
            return None
        for m in p._fsdp_owners:  # frozen since the graph was traced: the next trace reads it as frozen
            read_as([m], not collects(m), wholes([m]))
        return torch.zeros_like(grad)

    def reduce_if_late(leaf: Tensor) -> None:
        p = ref()
        if p is not None and p.requires_grad and leaf.grad is not None and not _collected_on(p, leaf):
            _reduce_now(p, leaf)

    into.register_hook(drop_if_frozen)
    into.register_post_accumulate_grad_hook(reduce_if_late)


def _collected_on(p: Any, into: Tensor) -> bool:
    return any(r[0] is into and r[1] is None for m in p._fsdp_owners for r in (m._fsdp_accumulate or {}).values())


@torch.no_grad()
def _reduce_now(p: Any, into: Tensor) -> None:
    """Reduce what ``into`` and ``p`` have collected, and add it to ``p.grad``."""
    from .grads import reduce_into  # which needs `reduced`

    grad, into.grad = into.grad, None
    assert grad is not None
    if (pending := p.__dict__.get("_fsdp_pending")) is not None:
        grad = grad + pending
        reduced(p)
    reduce_into(p, grad)


def forget(p: Any) -> None:
    """Of a copy: what its original collects is not its own."""
    for name in ("_fsdp_collector", "_fsdp_pending", "_fsdp_ticket"):
        p.__dict__.pop(name, None)


def _take(p: Any) -> Tensor | None:
    """What ``p`` has collected, as a plain tensor."""
    into = p.__dict__.get("_fsdp_collector")
    if into is not None and into.grad is not None:
        p._fsdp_pending, into.grad = into.grad, None
        owner, count = p._fsdp_ticket.tolist() if "_fsdp_ticket" in p.__dict__ else (next(_owners), 0)
        p._fsdp_ticket = torch.tensor([owner, count + 1])
    return p.__dict__.get("_fsdp_pending")


def reduced(p: Any) -> None:
    """What ``p`` had collected is now in its reduced gradient."""
    if p.__dict__.pop("_fsdp_pending", None) is None:
        return
    owner, count = p._fsdp_ticket.tolist()
    _claims[owner] = _Claim(done=count)
    for m in p._fsdp_owners:
        held = m._fsdp_accumulate
        if held is not None:
            held = {n: t for n, t in held.items() if m._parameters[n] is not p}
            m.__dict__["_fsdp_accumulate"] = held or None
