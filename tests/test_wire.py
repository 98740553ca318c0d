"""Our own collectives on gloo: the same results on either kind of link, and one decision for all ranks."""

from __future__ import annotations

import time

import models
import parity
import pytest
import torch
import torch.distributed as dist
from fsdp_compile.runtime import wire
from fsdp_compile.runtime.communicator import BACKEND, communicator
from fsdp_compile.runtime.mesh import resolve_mesh
from torch import Tensor

from fsdp_compile import fully_shard

OPS = torch.ops.fsdp_compile


def wait(t: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(t)


def moves(slow: bool) -> None:
    mesh, group = resolve_mesh(None, "cpu")
    assert communicator(mesh, 10.0) is group, "a group of ours is its own communicator"
    laid = wire._wires[group]
    assert laid.second is not None and dist.get_backend(laid.second) == dist.get_backend(group) == BACKEND
    lanes = [wire._lane(group, laid) for _ in range(4)]
    assert lanes[0] is not lanes[1] and lanes[:2] == lanes[2:]
    decided = [laid.slow] * dist.get_world_size()
    dist.all_gather_object(decided, laid.slow)
    assert len(set(decided)) == 1, "ranks that disagree would wait for each other for ever"
    laid.slow = slow
    rank, world, name = dist.get_rank(), dist.get_world_size(), group.group_name
    for turn in range(20):
        sizes, dtypes = (3, 1000, 20000), (torch.float32, torch.bfloat16, torch.float64)
        mine = [torch.full((n,), rank * 100 + turn, dtype=d) for n, d in zip(sizes, dtypes)]
        table = (torch.arange(4 * world) + 1000 * rank).float()
        alike = [torch.full((n,), float(rank * 100 + turn)) for n in sizes]
        flying = OPS.all_gather_coalesced(alike, world, name)
        single = [OPS.all_gather(x, world, name) for x in mine]
        swapped = OPS.all_to_all(table, world, name)
        for got, x in zip([*map(wait, flying), *map(wait, single)], [*alike, *mine]):
            want = torch.cat([torch.full_like(x, r * 100 + turn) for r in range(world)])
            assert got.dtype == x.dtype and torch.equal(got, want)
        want = torch.cat([(torch.arange(4 * world) + 1000 * r).float().chunk(world)[rank] for r in range(world)])
        assert torch.equal(wait(swapped), want)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("slow", [False, True])
def test_values(pool, world, slow):
    pool.run(world, moves, slow)


def trains(slow: bool, lowering: str) -> None:
    model = fully_shard(models.mlp())
    for laid in wire._wires.values():
        laid.slow = slow
    fast = torch.compile(model, backend="fsdp", options={"lowering": lowering})
    parity.train_alike(models.mlp(), fast, [models.vector_batch(i) for i in range(3)], models.square_loss)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("lowering", ["fx", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_training(pool, slow, lowering):
    pool.run(2, trains, slow, lowering)


class Throttled:
    """A group of two ranks whose all-to-alls take the given seconds."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def size(self) -> int:
        return 2

    def alltoall_base(self, *_: object) -> Throttled:
        return self

    def wait(self) -> None:
        time.sleep(self.seconds.pop(0))


def test_a_link_is_judged_by_neither_its_burst_nor_its_slowest_message() -> None:
    """On a link of 4 Gbit/s one probe sometimes said less than 2: sends and receives then cost 40 ms of each step of 1,280."""
    group = Throttled(0.0, 0.0, 0.2, 0.02, 0.02)
    found = wire._bytes_per_second(group)  # type: ignore[arg-type]
    assert not group.seconds
    assert found == pytest.approx((4 << 20) / 0.02, rel=0.2) and found > wire.SLOW
