"""The rows of a sharded embedding that a batch names, exchanged instead of the whole table. (`passes/rows.py` puts these into graphs.)

    embed_rows(Tensor shard, Tensor indices, str spec, int padding) -> Tensor        [shard_numel], [*] → [*, d1], in spec.compute_dtype
    embed_rows_grad(Tensor grad, Tensor indices, str spec, int padding) -> Tensor    [*, d1], [*] → [shard_numel], in spec.dtype

::

    rank 0 owns rows 0-3, rank 1 rows 4-7; rank 0's batch names rows 5 1 6 5, rank 1's 2 2

    counts      rank 0 → 1: 2         rank 1 → 0: 1
    indices     rank 0 → 1: 5 6       rank 1 → 0: 2          each row once, however often it is named
    rows        rank 1 → 0: w5 w6     rank 0 → 1: w2         of gradients, sums by row: the other way

Three all-to-alls, waited for: an embedding is what a model reads first, so that there is no compute to hide them behind. Ranks may name
different numbers of rows; none sends more of them than an all-gather of the table would. ``padding``: a row whose gradient is zero (-1:
none).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.spec import ParamSpec, decode

_LIB = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIB.define("embed_rows(Tensor shard, Tensor indices, str spec, int padding) -> Tensor")
_LIB.define("embed_rows_grad(Tensor grad, Tensor indices, str spec, int padding) -> Tensor")


@dataclass(frozen=True)
class _Asked:
    """What ranks have asked each other for. ``inverse``: place in ``rows`` of each index; ``ask[r]``: how many of ``rows`` (sorted, so by
    their owner, too) rank ``r`` owns; ``give[r]``: how many of ours it asks for; ``wanted``: which, counted from our first, by rank."""

    group: dist.ProcessGroup
    rows: Tensor
    inverse: Tensor
    ask: list[int]
    give: list[int]
    wanted: Tensor


def _ask(indices: Tensor, spec: ParamSpec) -> _Asked:
    """Raises IndexError, as ``torch.embedding`` does, if an index is none of the table's rows."""
    group = dist.distributed_c10d._resolve_process_group(spec.group)  # type: ignore[arg-type]
    rows, inverse = torch.unique(indices.reshape(-1).long(), return_inverse=True)
    firsts = torch.arange(spec.world + 1, device=rows.device) * spec.chunk_rows
    cuts = torch.searchsorted(rows, firsts.clamp(max=spec.shape[0]))
    counts = torch.stack((cuts.diff(), cuts.diff()))  # ours, and room for theirs
    _all_to_all(group, counts[1], counts[0])
    ask, give = counts.tolist()
    if sum(ask) != len(rows):
        wrong = int(rows[0] if rows[0] < 0 else rows[-1])
        raise IndexError(f"embedding {spec.fqn!r}: index {wrong} is out of range: it has {spec.shape[0]} rows")
    wanted = rows.new_zeros(sum(give))
    _all_to_all(group, wanted, rows, give, ask)
    return _Asked(group, rows, inverse, ask, give, wanted - group.rank() * spec.chunk_rows)


def _all_to_all(group: dist.ProcessGroup, out: Tensor, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> None:
    group.alltoall_base(out, x, received or [], sent or []).wait()


def _embed_rows(shard: Tensor, indices: Tensor, text: str, padding: int) -> Tensor:
    spec = decode(text)
    asked = _ask(indices, spec)
    mine = shard.view(spec.chunk_rows, -1).index_select(0, asked.wanted).to(spec.compute_dtype)
    got = mine.new_empty(len(asked.rows), spec.row_numel)
    _all_to_all(asked.group, got, mine, asked.ask, asked.give)
    out = got.new_empty(*indices.shape, spec.row_numel)  # itself, not a view of it: a caller may write on the result
    torch.index_select(got, 0, asked.inverse, out=out.view(-1, spec.row_numel))
    return out


def _embed_rows_grad(grad: Tensor, indices: Tensor, text: str, padding: int) -> Tensor:
    spec = decode(text)
    flat, at = grad.reshape(-1, spec.row_numel).to(spec.reduce_dtype), indices.reshape(-1)
    if padding >= 0:
        flat, at = flat[at != padding], at[at != padding]
    asked = _ask(at, spec)
    sums = flat.new_zeros(len(asked.rows), spec.row_numel).index_add_(0, asked.inverse, flat)
    if spec.reduce_op == "avg":
        sums /= spec.world
    got = sums.new_empty(sum(asked.give), spec.row_numel)
    _all_to_all(asked.group, got, sums, asked.give, asked.ask)
    out = sums.new_zeros(spec.shard_numel)
    for where, part in zip(asked.wanted.split(asked.give), got.split(asked.give)):  # by rank: one order of summation everywhere
        out.view(spec.chunk_rows, -1).index_add_(0, where, part)
    return out.to(spec.dtype)


def _embed_rows_fake(shard: Tensor, indices: Tensor, text: str, padding: int) -> Tensor:
    spec = decode(text)
    return shard.new_empty((*indices.shape, spec.row_numel), dtype=spec.compute_dtype)


def _embed_rows_grad_fake(grad: Tensor, indices: Tensor, text: str, padding: int) -> Tensor:
    spec = decode(text)
    return grad.new_empty((spec.shard_numel,), dtype=spec.dtype)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, str, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rest = inputs[2:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.fsdp_compile.embed_rows_grad(grad, *ctx.saved_tensors, *ctx.rest), None, None, None


def _no_double_backward(ctx: Any, grad: Tensor) -> None:
    raise RuntimeError(
        f"the gradient of sharded embedding {decode(ctx.rest[0]).fqn!r} was differentiated again (create_graph=True): double backward "
        "through sharded parameters is not supported"
    )


for _name, _fn, _fake, _rule in (
    ("embed_rows", _embed_rows, _embed_rows_fake, _backward),
    ("embed_rows_grad", _embed_rows_grad, _embed_rows_grad_fake, _no_double_backward),
):
    _LIB.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_compile::{_name}", _fake, lib=_LIB)
    torch.library.register_autograd(f"fsdp_compile::{_name}", _rule, setup_context=_setup, lib=_LIB)
