"""no_sync: micro-steps that reduce nothing, and gather nothing either as far as memory allows.

::

    with no_sync(model, keep_bytes=n)    start ─► all-gather of n bytes of weights, in flight
      micro-step 1                                each is waited for in the graph, before its first use
      micro-step 2, 3, …                          no communication for these weights
    end                                           compared with the shards, let go

FSDP2 does so with ``set_reshard_after_backward(False)``.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.spec import ParamSpec, decode

from .accumulation import collects, read_as, sharded_modules, wholes
from .communicator import control_group, is_gloo
from .early import launch
from .ops import TIMEOUT_S, check_world, shard_to_wire, wire_to_param
from .order import same_on_all_ranks
from .sharding import FSDPState, state_behind

_BUCKET = 25 << 20  # most gathered bytes in one collective, as where DDP's and our own automatic buckets end


@contextlib.contextmanager
def no_sync(model: nn.Module, *, keep_bytes: int | None = 0) -> Iterator[None]:
    """Within it, backwards collect gradients without communication; the first backward after it reduces their sum.

    ``keep_bytes``: most bytes of gathered weights that stay on every rank from its beginning to its end: its micro-steps then do not
    gather them. Parameters are taken in the model's order, frozen ones too, as long as they fit. They hold what the weights were at the
    beginning: RuntimeError, at the end, names a parameter that was written meanwhile. None: what option ``memory_budget`` leaves beside
    the gathered weights of its plan, once a graph has been planned (without that option, nothing). All ranks must enter together.

    Raises ValueError for a model that is not sharded yet or a negative ``keep_bytes``, TypeError for one that is no whole number."""
    if keep_bytes is not None and (isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int)):
        raise TypeError(f"no_sync: keep_bytes must be a whole number of bytes or None, got {keep_bytes!r}")
    if keep_bytes is not None and keep_bytes < 0:
        raise ValueError(f"no_sync: keep_bytes must not be negative, got {keep_bytes}")
    modules = sharded_modules(model)
    outer, before = [m for m in modules if collects(m)], wholes(modules)
    kept = _gather(_chosen(modules, keep_bytes, before))
    read_as(modules, False, {**before, **{k.param: k.whole for k in kept}})
    _count(kept, 1)
    try:
        yield
    except BaseException:
        for k in kept:
            with contextlib.suppress(RuntimeError):  # a peer has died: what failed says so
                k.arrived()
        raise
    else:
        _compare(kept)
    finally:
        _count(kept, -1)
        read_as(outer, False, before)  # this may be a context within another
        read_as([m for m in modules if m not in outer], True, before)


_held: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # bytes, now
_room: weakref.WeakKeyDictionary[FSDPState, tuple[int, int]] = weakref.WeakKeyDictionary()  # budget, and what plans for it leave


def held_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of weights that are held now."""
    return _held.get(group, 0)


def leave(args: Sequence[Any], budget: int, nbytes: int) -> None:
    """A graph with these inputs, planned for a memory budget, leaves ``nbytes`` of it: for the model whose parameter is the first."""
    state = state_behind(args)
    if state is not None:
        known, left = _room.get(state, (budget, nbytes))
        _room[state] = budget, min(nbytes, left) if known == budget else nbytes


@dataclass(frozen=True, eq=False)
class _Kept:
    """A weight gathered for several micro-steps. ``buffer``: what arrives; ``whole``: the parameter, a view of it."""

    param: nn.Parameter
    spec: ParamSpec
    buffer: Tensor
    whole: Tensor

    def arrived(self) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(self.buffer)  # type: ignore[no-any-return]

    def stale(self) -> bool:
        """Whether the parameter was written since: what this rank sent is in ``buffer``."""
        mine = self.arrived().view(self.spec.world, -1)[_group(self.spec.group).rank()]
        now = _sent(self.param, self.spec)
        return now.shape != mine.shape or not torch.equal(mine.view(torch.uint8), now.view(torch.uint8))


def _chosen(modules: list[nn.Module], nbytes: int | None, held: Mapping[nn.Parameter, Tensor]) -> list[tuple[nn.Parameter, ParamSpec]]:
    """The parameters to keep beside those ``held`` already, in the model's order: by their sizes alone, so that all ranks choose alike."""
    params = dict.fromkeys(p for m in modules for p in m._parameters.values() if p is not None and hasattr(p, "_fsdp_spec"))
    specs = {p: s for p in params if p not in held and (s := decode(p._fsdp_spec)).world > 1 and s.numel}  # type: ignore[attr-defined]
    if nbytes is None:
        nbytes = min(_room.get(m._fsdp_state, (0, 0))[1] for m in modules)  # type: ignore[call-overload]
    found = []
    for p, spec in specs.items():
        if spec.gathered_bytes <= nbytes:
            found.append((p, spec))
            nbytes -= spec.gathered_bytes
    return found


def _count(kept: list[_Kept], sign: int) -> None:
    for k in kept:
        group = _group(k.spec.group)
        _held[group] = held_bytes(group) + sign * k.spec.gathered_bytes


def _gather(chosen: list[tuple[nn.Parameter, ParamSpec]]) -> list[_Kept]:
    """Start gathering, several in one collective where they share a group and a dtype."""
    buckets: list[list[tuple[nn.Parameter, ParamSpec]]] = []
    for p, spec in chosen:
        last = buckets[-1] if buckets else []
        alike = last and (last[0][1].group, last[0][1].real_dtype) == (spec.group, spec.real_dtype)
        if not alike or sum(s.gathered_bytes for _, s in last) + spec.gathered_bytes > _BUCKET:
            buckets.append([])
        buckets[-1].append((p, spec))
    lines: dict[str, list[str]] = {}
    for bucket in buckets:
        lines.setdefault(bucket[0][1].group, []).append(", ".join(s.encode() for _, s in bucket))
    for name, texts in lines.items():
        check_world(next(s for _, s in chosen if s.group == name))
        same_on_all_ranks(_group(name), "no_sync", tuple(f"gather of {t}" for t in texts), TIMEOUT_S)
    kept = []
    with torch.no_grad():
        for bucket in buckets:
            spec = bucket[0][1]
            shards = [_sent(p, s).clone() for p, s in bucket]  # so that what all ranks get is what is written now
            buffers = launch(shards, spec.world, spec.group, is_gloo(_group(spec.group)))
            kept += [_Kept(p, s, b, wire_to_param(b, s)) for (p, s), b in zip(bucket, buffers)]
    return kept


def _sent(p: nn.Parameter, spec: ParamSpec) -> Tensor:
    """This rank's shard as it travels."""
    return shard_to_wire(p._fsdp_shard.detach(), spec).contiguous()  # type: ignore[attr-defined]


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _compare(kept: list[_Kept]) -> None:
    """Raise RuntimeError, on all ranks, if a weight was written on any of them while it was held."""
    for name in dict.fromkeys(k.spec.group for k in kept):
        mine = [k for k in kept if k.spec.group == name]
        first = torch.tensor(next((i for i, k in enumerate(mine) if k.stale()), len(mine)))
        if (control := control_group(_group(name))) is not None:
            work = dist.all_reduce(first, dist.ReduceOp.MIN, group=control, async_op=True)
            work.wait(datetime.timedelta(seconds=TIMEOUT_S))
        if first < len(mine):
            raise RuntimeError(
                f"parameter {mine[int(first)].spec.fqn!r} was written inside no_sync(keep_bytes=...), whose micro-steps read the weights "
                "as they were at its beginning: write after it, or leave keep_bytes out"
            )
