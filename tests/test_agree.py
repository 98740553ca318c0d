"""Ranks compare what they hold through the store: in bounded time, and with one outcome for all."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from fsdp_compile.runtime.agree import RankMismatch, agree
from fsdp_compile.runtime.communicator import communicator
from torch.distributed.device_mesh import init_device_mesh


def outcome(topic: str, lines: list[str], timeout_s: float = 20.0) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        agree(group, topic, lines, timeout_s)
    except RankMismatch as e:
        return str(e)
    return "agreed"


def compared() -> list[str]:
    rank = dist.get_rank()
    return [outcome("here", ["same"]), outcome("here", ["first", f"second of {rank}"]), outcome("here", ["same again"])]


def test_the_first_difference_is_shown_on_every_rank(pool):
    zero, one, two = pool.run(3, compared)
    assert zero == one == two
    assert zero[0] == zero[2] == "agreed"
    assert zero[1] == "here 2: rank 1 differs from rank 0. First difference, line 2:\n  rank 0: second of 0\n  rank 1: second of 1"


def late(late_rank: int) -> str:
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(4 if rank == late_rank else 0)
    return outcome("here", ["same"], 20.0 if rank == late_rank else 2.0)


@pytest.mark.parametrize("late_rank", [0, 2])
def test_who_comes_after_another_has_given_up_is_told_so(pool, late_rank):
    """Going on alone, it would wait in the next collective for as long as that may take."""
    said = pool.run(3, late, late_rank)
    for rank, text in enumerate(said):
        assert f"here 1: rank {late_rank} of group '0' did not come to this point within" in text, (rank, text)
    assert "has given up waiting for it" in said[late_rank]


def late_communicator() -> str:
    mesh = init_device_mesh("cpu", (2,))
    dist.barrier()
    time.sleep(4 * (1 - dist.get_rank()))
    try:
        communicator(mesh, 2.0)
    except RankMismatch as e:
        return str(e)
    return "made"


def test_no_group_is_made_with_a_rank_that_has_given_up(pool):
    zero, one = pool.run(2, late_communicator)
    assert "has given up waiting" in zero and "rank 0 of group" in one
