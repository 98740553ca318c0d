"""Good graphs for the verifier's tests to break, and what a refusal must say."""

from __future__ import annotations

import functools

import pytest
from fsdp_compile.passes.pipeline import Plan
from fsdp_compile.passes.roles import nodes_of
from fsdp_compile.passes.verify import Expectation, ScheduleError, verify
from graphs import Captured, capture, chain, plan_of, scheduled
from torch import fx

# Three layers of 6 x 6 float64: 288 gathered bytes each.
SINGLE, PAIRS = plan_of(0, prefetch=1), plan_of(2 * 288, prefetch=1)
PACKED = plan_of(2 * 288, "packed", prefetch=1)
PLANS = {
    "single": SINGLE,
    "coalesced": PAIRS,
    "packed": PACKED,
    "exchange": plan_of(2 * 288, transport="all_to_all"),
    "sent": plan_of(2 * 288, transport="own"),
}


@functools.cache
def captured() -> Captured:
    return capture(chain(4, width=6))


def good(direction: str, plan: Plan) -> tuple[fx.Graph, Expectation]:
    gm = getattr(captured(), direction)()
    done = scheduled(gm, direction, plan)
    return gm.graph, Expectation(done.gathered, done.reduced)


def of(graph: fx.Graph, kind: str, i: int = 0) -> fx.Node:
    return nodes_of(graph, kind)[i][0]


def refused(graph: fx.Graph, expect: Expectation, number: int, match: str) -> None:
    with pytest.raises(ScheduleError, match=rf"^invariant {number} broken: node \w+, .*{match}"):
        verify(graph, expect)
