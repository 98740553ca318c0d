"""schedule: gathers run further ahead than ``prefetch`` where weights kept for backward leave them room, and only there."""

from __future__ import annotations

import pytest
from fsdp_compile.passes.cost import Free, Kernel, Launch, Wait, Work, work_of
from fsdp_compile.passes.machine import Link, Machine, Rates
from fsdp_compile.passes.roles import Kept
from fsdp_compile.passes.simulate import simulate
from graphs import capture, chain, plan_of, scheduled

LAYERS, KEPT = 12, 6
BYTES = 288  # gathered bytes of each 6 x 6 float64 matrix
MACHINE = Machine("toy", Rates({"float64": 1e9}, 1e9), {"any": Link(0.0, 2e8)})  # a gather takes about as long as a layer's compute


def work(direction: str, prefetch: int = 1, keep: int = KEPT, limit: int | None = None, told: bool = True) -> Work:
    """One graph of a chain of layers, of which the last ``keep`` are kept. ``told``: whether backward knows."""
    got = capture(chain(LAYERS, width=6), keep_bytes=keep * BYTES)
    gm = got.forward() if direction == "forward" else got.backward()
    for n in gm.graph.nodes:
        if not told and n.op == "placeholder":
            n.meta.pop(Kept.KEY, None)
    scheduled(gm, direction, plan_of(0, prefetch=prefetch, limit=limit))
    return work_of(gm.graph, direction)


def leads(found: Work) -> list[int]:
    """For each gather, how many gathers launched before it had not been waited for."""
    flying, out = 0, []
    for e in found.events:
        if isinstance(e, Launch) and e.kind == "all_gather":
            out.append(flying)
            flying += 1
        elif isinstance(e, Wait) and e.bucket.startswith("ag"):
            flying -= 1
    return out


def most_alive(found: Work, kept: int) -> int:
    """Bytes of gathered weights, kept ones and shards of gradients (a half of each, on two ranks), at most."""
    alive = most = kept
    for e in found.events:
        if isinstance(e, Launch):
            alive += e.nbytes if e.kind == "all_gather" else e.nbytes // e.world
        elif isinstance(e, Free):
            alive -= e.nbytes
        if not isinstance(e, Kernel):
            most = max(most, alive)
    return most


@pytest.mark.parametrize(("prefetch", "ahead"), [(1, [0, 1, 1]), (2, [0, 1, 2])])
def test_in_forward(prefetch: int, ahead: list[int]) -> None:
    """At the entry no more than ``prefetch`` says, then as many weights are alive as will be kept in the end."""
    found = work("forward", prefetch)
    assert leads(found) == [*ahead, 2, 3, 4, *[KEPT - 1] * 6]
    assert most_alive(found, 0) == KEPT * BYTES


def test_in_backward() -> None:
    """At its begin the kept weights take all the room. As they leave it, gathers run ahead, until shards of gradients have taken it."""
    found, plain = work("backward"), work("backward", told=False)
    assert leads(plain) == [0, 1, 1, 1, 1]
    assert leads(found) == [0, 1, 2, 1, 1]
    assert most_alive(found, KEPT * BYTES) == (KEPT + 1.5) * BYTES  # one gathered, and a shard of the first gradient, before any is freed


def test_it_hides_what_waited() -> None:
    slow, fast = (simulate([work("backward", told=told)], MACHINE) for told in (False, True))
    assert fast.step < slow.step


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_not_without_prefetch_nor_beyond_a_limit(direction: str) -> None:
    assert max(leads(work(direction, prefetch=0))) == 0
    found = work(direction, limit=2 * BYTES if direction == "backward" else (KEPT + 1) * BYTES)
    alive = most = 0
    for e in found.events:
        if isinstance(e, Launch) and e.kind == "all_gather":
            alive += e.nbytes
        elif isinstance(e, Free) and e.bucket.startswith("ag"):
            alive -= e.nbytes
        most = max(most, alive)
    assert most <= (2 * BYTES if direction == "backward" else (KEPT + 1) * BYTES)
