"""Our own collectives, for gloo: what its own leave of a link unused depends on the link, so that the link is measured.

    all_gather(Tensor x, int world, str group) -> Tensor                   [n] → [world * n], in flight
    all_gather_coalesced(Tensor[] xs, int world, str group) -> Tensor[]
    all_to_all(Tensor x, int world, str group) -> Tensor                   [world * n] → [world * n], in flight

A result must be waited for with ``_c10d_functional.wait_tensor``, as those of torch's functional collectives.

fast link    gloo's collectives, in turn on two groups of one thread each, so that one moves data while the other hands over
slow link    send and receive, all posted at once: they fill 90% of a link of 1 Gbit/s where a collective of gloo's fills 60%
"""

from __future__ import annotations

import itertools
import statistics
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile import compat

_LIB = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIB.define("all_gather(Tensor x, int world, str group) -> Tensor")
_LIB.define("all_gather_coalesced(Tensor[] xs, int world, str group) -> Tensor[]")
_LIB.define("all_to_all(Tensor x, int world, str group) -> Tensor")

SLOW = 165e6  # bytes/s of gloo's all-to-all below which send and receive win: it reaches 62e6 at 1 Gbit/s, 120e6 at 2, 225e6 at 4
_PROBE = 1 << 20  # elements of a probe's message: 4 MB, 68 ms at 1 Gbit/s
_PROBES = 3
_MOST_TAGS = 1 << 30


@dataclass
class Wire:
    """How a group's own collectives travel: on it, in turn with ``second``. Every rank counts launches alike, because all launch in one
    order (`order`). Without a reference to the group itself, which lives as long as this entry would keep it."""

    second: dist.ProcessGroup | None = None
    slow: bool = False
    turns: Iterator[int] = field(default_factory=itertools.count)


_wires: weakref.WeakKeyDictionary[dist.ProcessGroup, Wire] = weakref.WeakKeyDictionary()


def lay(group: dist.ProcessGroup, second: dist.ProcessGroup) -> Wire:
    """Let ``group``'s collectives travel on both groups, or by send and receive if the link between its ranks is slow: measured here,
    decided by rank 0. All ranks must call this."""
    slow = torch.tensor([float(_bytes_per_second(group) < SLOW)])
    dist.broadcast(slow, dist.get_global_rank(group, 0), group=group)
    wire = _wires[group] = Wire(second, bool(slow.item()))
    return wire


def _bytes_per_second(group: dist.ProcessGroup) -> float:
    """What one rank sends in a second in an all-to-all of 4 MB to each peer: the median of three, after a small one, which connects, and
    one that takes what a throttle lets through after a pause."""
    world, took = group.size(), []
    for n in (1 << 10, *[_PROBE] * (_PROBES + 1)):
        x = torch.zeros(world * n)
        out = torch.empty_like(x)
        start = time.perf_counter()
        group.alltoall_base(out, x, [], []).wait()
        took.append(time.perf_counter() - start)
    return 4 * _PROBE * (world - 1) / statistics.median(took[2:])


def _wire(name: str) -> tuple[dist.ProcessGroup, Wire]:
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group, _wires.get(group) or _wires.setdefault(group, Wire())


def _lane(group: dist.ProcessGroup, wire: Wire) -> dist.ProcessGroup:
    """The group for the next collective."""
    return group if wire.second is None or next(wire.turns) % 2 == 0 else wire.second


def _send_recv(group: dist.ProcessGroup, wire: Wire, sent: list[list[Tensor]], received: list[list[Tensor]], outs: list[Tensor]) -> None:
    """Start sending ``sent[i][r]`` to every other rank ``r`` and receiving from it into ``received[i][r]``, a part of ``outs[i]``.

    Receives are posted first, so that both directions of the link are busy. Each message has a tag of its own."""
    rank, world = group.rank(), group.size()
    tags = [next(wire.turns) % _MOST_TAGS for _ in outs]
    for peer in (p % world for p in range(rank - 1, rank - world, -1)):
        for into, out, tag in zip(received, outs, tags):
            compat.register_work(out, group.recv([into[peer]], peer, tag))
    for peer in (p % world for p in range(rank + 1, rank + world)):
        for parts, out, tag in zip(sent, outs, tags):
            compat.register_work(out, group.send([parts[peer]], peer, tag))
    for into, parts in zip(received, sent):
        into[rank].copy_(parts[rank])


def _all_gather_coalesced(xs: list[Tensor], world: int, group: str) -> list[Tensor]:
    outs, (pg, wire) = [x.new_empty(world * x.numel()) for x in xs], _wire(group)
    if wire.slow:
        _send_recv(pg, wire, [[x] * world for x in xs], [list(o.chunk(world)) for o in outs], outs)
    else:
        work = _lane(pg, wire).allgather_into_tensor_coalesced(outs, xs)
        for out in outs:
            compat.register_work(out, work)
    return outs


def _all_gather(x: Tensor, world: int, group: str) -> Tensor:
    return _all_gather_coalesced([x], world, group)[0]


def _all_to_all(x: Tensor, world: int, group: str) -> Tensor:
    out, (pg, wire) = torch.empty_like(x), _wire(group)
    if wire.slow:
        _send_recv(pg, wire, [list(x.chunk(world))], [list(out.chunk(world))], [out])
    else:
        compat.register_work(out, _lane(pg, wire).alltoall_base(out, x, [], []))
    return out


for _name, _fn, _fake in (
    ("all_gather", _all_gather, lambda x, world, group: x.new_empty(world * x.numel())),
    ("all_gather_coalesced", _all_gather_coalesced, lambda xs, world, group: [x.new_empty(world * x.numel()) for x in xs]),
    ("all_to_all", _all_to_all, lambda x, world, group: torch.empty_like(x)),
):
    _LIB.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_compile::{_name}", _fake, lib=_LIB)
