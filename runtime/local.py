"""What a rank does to a bucket of gradients around its all-to-all, on CPU: operators that Inductor calls and does not compile.
Compiled, each bucket would be a C++ kernel of its own size, seconds of compilation for what is but copying and adding.

    pack(Tensor[] tables, float scale) -> Tensor      [world, n_i] each → [world, sum of n_i], scaled
    total(Tensor table, float scale) -> Tensor        [world, n] → [n]: the sum over ranks, in their order, scaled
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIB = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIB.define("pack(Tensor[] tables, float scale) -> Tensor")
_LIB.define("total(Tensor table, float scale) -> Tensor")

_BLOCK = 1 << 16  # elements: what is added to and scaled again is still in the cache


def _pack(tables: list[Tensor], scale: float) -> Tensor:
    out = _pack_fake(tables, scale)
    for t, part in zip(tables, out.split([t.shape[1] for t in tables], 1)):  # half the time of torch.cat's
        if scale == 1.0:
            part.copy_(t)
        else:
            torch.mul(t, scale, out=part)
    return out


def _pack_fake(tables: list[Tensor], scale: float) -> Tensor:
    return tables[0].new_empty(tables[0].shape[0], sum(t.shape[1] for t in tables))


def _total(table: Tensor, scale: float) -> Tensor:
    out = _total_fake(table, scale)
    for o, block in zip(out.split(_BLOCK), table.split(_BLOCK, 1)):
        torch.add(block[0], block[1], out=o)
        for row in block[2:]:
            o.add_(row)
        if scale != 1.0:
            o.mul_(scale)
    return out


def _total_fake(table: Tensor, scale: float) -> Tensor:
    return table.new_empty(table.shape[1])


for _name, _fn, _fake in (("pack", _pack, _pack_fake), ("total", _total, _total_fake)):
    _LIB.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_compile::{_name}", _fake, lib=_LIB)
