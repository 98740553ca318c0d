"""Collectives built on send and receive, for gloo: its own use about 60% of a link for long messages, these more than 90%, at half the CPU.

    all_gather(Tensor x, int world, str group) -> Tensor                   [n] → [world * n], in flight
    all_gather_coalesced(Tensor[] xs, int world, str group) -> Tensor[]
    all_to_all(Tensor x, int world, str group) -> Tensor                   [world * n] → [world * n], in flight

A result must be waited for with ``_c10d_functional.wait_tensor``, as those of torch's functional collectives. Receives are posted before
sends, so that both directions of the link are busy. Peers are computed here, so that graphs hold nothing of one rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile import compat

_LIB = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIB.define("all_gather(Tensor x, int world, str group) -> Tensor")
_LIB.define("all_gather_coalesced(Tensor[] xs, int world, str group) -> Tensor[]")
_LIB.define("all_to_all(Tensor x, int world, str group) -> Tensor")

# Each message of a group has a tag of its own. All ranks launch in the same order (`order`), so that they count alike.
_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_MOST_TAGS = 1 << 30


def _exchange(sent: list[list[Tensor]], received: list[list[Tensor]], outs: list[Tensor], name: str) -> None:
    """Start sending ``sent[i][r]`` to every other rank ``r`` and receiving from it into ``received[i][r]``, a part of ``outs[i]``."""
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    rank, world = group.rank(), group.size()
    count = _tags.get(group)
    if count is None:
        count = _tags[group] = itertools.count()
    tags = [next(count) % _MOST_TAGS for _ in outs]
    for peer in (p % world for p in range(rank - 1, rank - world, -1)):
        for into, out, tag in zip(received, outs, tags):
            compat.register_work(out, group.recv([into[peer]], peer, tag))
    for peer in (p % world for p in range(rank + 1, rank + world)):
        for parts, out, tag in zip(sent, outs, tags):
            compat.register_work(out, group.send([parts[peer]], peer, tag))
    for into, parts in zip(received, sent):
        into[rank].copy_(parts[rank])


def _all_gather_coalesced(xs: list[Tensor], world: int, group: str) -> list[Tensor]:
    outs = [x.new_empty(world * x.numel()) for x in xs]
    _exchange([[x] * world for x in xs], [list(o.chunk(world)) for o in outs], outs, group)
    return outs


def _all_gather(x: Tensor, world: int, group: str) -> Tensor:
    return _all_gather_coalesced([x], world, group)[0]


def _all_to_all(x: Tensor, world: int, group: str) -> Tensor:
    out = torch.empty_like(x)
    _exchange([list(x.chunk(world))], [list(out.chunk(world))], [out], group)
    return out


for _name, _fn, _fake in (
    ("all_gather", _all_gather, lambda x, world, group: x.new_empty(world * x.numel())),
    ("all_gather_coalesced", _all_gather_coalesced, lambda xs, world, group: [x.new_empty(world * x.numel()) for x in xs]),
    ("all_to_all", _all_to_all, lambda x, world, group: torch.empty_like(x)),
):
    _LIB.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_compile::{_name}", _fake, lib=_LIB)
