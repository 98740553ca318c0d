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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.spec import ParamSpec, decode

from .accumulation import read_as, set_requires_gradient_sync, sharded_modules
from .communicator import is_gloo
from .early import launch
from .ops import TIMEOUT_S, check_world, shard_to_wire, wire_to_param
from .order import same_on_all_ranks

_BUCKET = 25 << 20  # most gathered bytes in one collective, as where DDP's and our own automatic buckets end


@contextlib.contextmanager
def no_sync(model: nn.Module, *, keep_bytes: int = 0) -> Iterator[None]:
    """Within it, backwards collect gradients without communication; the first backward after it reduces their sum.

    ``keep_bytes``: most bytes of gathered weights that stay on every rank from its beginning to its end: its micro-steps then do not
    gather them. Parameters are taken in the model's order, frozen ones too, as long as they fit. They hold what the weights were at the
    beginning: RuntimeError, at the end, names a parameter that was written meanwhile. All ranks must enter together.

    Raises ValueError for a model that is not sharded yet or a negative ``keep_bytes``, TypeError for one that is no whole number."""
    if isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int):
        raise TypeError(f"no_sync: keep_bytes must be a whole number of bytes, got {keep_bytes!r}")
    if keep_bytes < 0:
        raise ValueError(f"no_sync: keep_bytes must not be negative, got {keep_bytes}")
    modules = sharded_modules(model)
    kept = _gather(_chosen(modules, keep_bytes))
    read_as(modules, False, {k.param: k.whole for k in kept})
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
        set_requires_gradient_sync(model, True)


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
        group = dist.distributed_c10d._resolve_process_group(self.spec.group)  # type: ignore[arg-type]
        mine = self.arrived().view(self.spec.world, -1)[group.rank()]
        now = _sent(self.param, self.spec)
        return now.shape != mine.shape or not torch.equal(mine.view(torch.uint8), now.view(torch.uint8))


def _chosen(modules: list[nn.Module], nbytes: int) -> list[tuple[nn.Parameter, ParamSpec]]:
    """The parameters to keep, in the model's order: by their sizes alone, so that all ranks choose alike."""
    found, left = [], nbytes
    for p in dict.fromkeys(p for m in modules for p in m._parameters.values() if p is not None and hasattr(p, "_fsdp_spec")):
        spec = decode(p._fsdp_spec)  # type: ignore[attr-defined]
        if spec.world > 1 and 0 < spec.gathered_bytes <= left:
            found.append((p, spec))
            left -= spec.gathered_bytes
    return found


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
            shards = [_sent(p, s) for p, s in bucket]
            buffers = launch(shards, spec.world, spec.group, is_gloo(_group(spec.group)))
            kept += [_Kept(p, s, b, wire_to_param(b, s)) for (p, s), b in zip(bucket, buffers)]
    return kept


def _sent(p: nn.Parameter, spec: ParamSpec) -> Tensor:
    """This rank's shard as it travels."""
    return shard_to_wire(p._fsdp_shard.detach(), spec).contiguous()  # type: ignore[attr-defined]


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _compare(kept: list[_Kept]) -> None:
    """Raise RuntimeError if a weight was written while it was held."""
    stale = [k.spec.fqn for k in kept if k.stale()]
    if stale:
        raise RuntimeError(
            f"parameter {stale[0]!r}{f' and {len(stale) - 1} others' if stale[1:] else ''} was written inside no_sync(keep_bytes=...), "
            "whose micro-steps read the weights as they were at its beginning: write after it, or leave keep_bytes out"
        )
