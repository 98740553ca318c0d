"""simulate: steps small enough to compute by hand. One second a byte on the wire, one FLOP a second."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fsdp_compile.passes.cost import Free, Kernel, Launch, Wait, Work, work_of
from fsdp_compile.passes.lower import lower
from fsdp_compile.passes.machine import Link, Machine, Rates
from fsdp_compile.passes.simulate import Timeline, simulate
from graphs import capture, chain, plan_of, scheduled

from fsdp_compile.timeline_view import draw

MACHINE = Machine("toy", Rates({"float32": 1.0}, 1.0), {"any": Link(0.0, 1.0)})


def k(seconds: int, name: str = "k", ours: bool = False) -> Kernel:
    return Kernel(name, seconds, 0, "float32", ours=ours)


def ag(bucket: str, seconds: int, group: str = "g") -> Launch:
    return Launch(bucket, "all_gather", "packed", "float32", group, 2, 2 * seconds)  # half of it travels


def rs(bucket: str, seconds: int) -> Launch:
    return Launch(bucket, "reduce_scatter", "packed", "float32", "g", 2, 2 * seconds)


def run(*events: object, direction: str = "forward", machine: Machine = MACHINE, **kwargs: int) -> Timeline:
    return simulate([Work(direction, events)], machine, **kwargs)  # type: ignore[arg-type]


def exposed(t: Timeline) -> list[tuple[str, float, str]]:
    return [(e.bucket, e.seconds, e.why) for e in t.exposed]


def test_compute_bound_only_the_head_is_exposed() -> None:
    t = run(ag("a", 2), ag("b", 2), Wait("a"), k(5), ag("c", 2), Wait("b"), k(5), Wait("c"), k(5))
    assert exposed(t) == [("a", 2, "head")]
    assert (t.step, t.forward, t.compute_busy, t.comm_busy) == (17, 17, 15, 6)
    assert [(s.name, s.start, s.end) for s in t.spans if s.lane == "comm g"] == [("a", 0, 2), ("b", 2, 4), ("c", 7, 9)]


def test_communication_bound_the_lane_never_rests() -> None:
    t = run(ag("a", 4), ag("b", 4), Wait("a"), k(1), ag("c", 4), Wait("b"), k(1), Wait("c"), k(1))
    assert exposed(t) == [("a", 4, "head"), ("b", 3, "head"), ("c", 3, "lane")]
    assert t.step == 13
    assert t.comm_busy == 12


def test_a_gather_launched_just_before_its_use_lacks_lead() -> None:
    t = run(k(3), ag("a", 2), Wait("a"), k(3))
    assert exposed(t) == [("a", 2, "lead")]
    t = run(k(3), ag("a", 2), k(1), Wait("a"), k(3))
    assert exposed(t) == [("a", 1, "lead")]


def test_our_own_copies_do_not_make_a_head_a_body() -> None:
    t = run(k(1, ours=True), ag("a", 2), Wait("a"), k(3))
    assert exposed(t) == [("a", 2, "head")]


def test_a_limit_is_named() -> None:
    events = (ag("a", 2), Wait("a"), k(5), Free("a", 4), ag("b", 2), Wait("b"), k(5), Free("b", 4))
    assert exposed(run(*events, limit_gathers=4)) == [("a", 2, "head"), ("b", 2, "limit")]
    assert exposed(run(*events, limit_gathers=8)) == [("a", 2, "head"), ("b", 2, "lead")]


def test_reductions_limit_lane_tail() -> None:
    events = (k(1), rs("r1", 3), k(1), Wait("r1"), rs("r2", 3), k(1), rs("r3", 2), Wait("r2"), Wait("r3"))
    t = run(*events, direction="backward")
    assert exposed(t) == [("r1", 2, "limit"), ("r2", 2, "lead"), ("r3", 2, "tail")]
    assert (t.backward, t.forward) == (9, 0)
    t = run(k(1), rs("r1", 6), rs("r2", 1), k(1), Wait("r1"), k(6), Wait("r2"), direction="backward")
    assert exposed(t) == [("r1", 5, "lead")]


def test_two_groups_have_a_lane_each() -> None:
    t = run(ag("a", 3), ag("b", 3, group="h"), Wait("a"), Wait("b"), k(1))
    assert t.step == 4
    assert {s.lane for s in t.spans} == {"comm g", "comm h", "compute"}


def test_gathered_bytes_and_when() -> None:
    t = run(ag("a", 2), Wait("a"), k(5), ag("b", 3), Free("a", 4), Wait("b"), k(1), Free("b", 6))
    assert t.gathered == ((0, 4), (7, 10), (7, 6), (11, 0))
    assert (t.peak_gathered_bytes, t.peak_at) == (10, 7)


def test_kept_weights_stay_alive_into_backward() -> None:
    forward = Work("forward", (ag("ag1", 1), Wait("ag1"), k(1)))
    backward = Work("backward", (ag("ag1", 2), Wait("ag1"), k(1), Free("ag1", 4)))
    t = simulate([forward, backward], MACHINE, optimizer_bytes=3)
    assert t.peak_gathered_bytes == 2 + 4
    assert (t.forward, t.backward, t.optimizer, t.step) == (2, 3, 3, 8)


def test_latency_and_floor_count_once_each() -> None:
    m = replace(MACHINE, rates=Rates({"float32": 1.0}, 1.0, launch=0.5), links={"any": Link(0.25, 1.0)})
    assert run(ag("a", 1), Wait("a"), k(2), k(2), machine=m).step == 1.25 + 5


def test_interference_slows_compute_while_something_is_sent() -> None:
    m = replace(MACHINE, interference=0.5)
    t = run(k(1), ag("a", 4), k(3), Wait("a"), machine=m)
    assert t.step == 1 + 4 + 1  # four seconds at half speed do two thirds of the second kernel
    t = run(ag("a", 4), k(1), Wait("a"), machine=m)
    assert t.step == 4
    assert exposed(t) == [("a", 2, "head")]


def test_interference_of_two_lanes_and_of_everything() -> None:
    half, whole = replace(MACHINE, interference=0.5), replace(MACHINE, interference=1.0)
    t = run(ag("a", 3), ag("b", 3), ag("c", 2, group="h"), k(4), Wait("a"), Wait("b"), Wait("c"), machine=half)
    assert t.forward == 7  # six seconds with something on the wire, whichever lane, then one alone
    t = run(ag("a", 3), k(0), k(1), Wait("a"), machine=whole)
    assert t.forward == 4


def test_starting_a_collective_takes_compute() -> None:
    m = replace(MACHINE, posting=0.5)
    t = run(k(1), ag("a", 2), ag("b", 2), k(3), Wait("a"), Wait("b"), k(1), machine=m)
    assert t.step == 1.5 + 2 + 2 + 1  # sent without a gap from 1.5 on
    assert (t.compute_busy, t.exposed_seconds) == (1 + 0.5 + 0.5 + 3 + 1, 0.5)


def test_nothing_to_do() -> None:
    t = simulate([], MACHINE)
    assert (t.step, t.peak_gathered_bytes, t.peak_at, t.exposed) == (0, 0, 0, ())
    assert "nothing is exposed" in draw(t)


@pytest.mark.parametrize("lowered", [False, True])
def test_a_scheduled_graph(lowered: bool) -> None:
    """Three layers; a gather takes 3 s, a product 4, a tanh 1: with one bucket ahead only the first is exposed."""
    gm = capture(chain(3, width=6)).forward()
    scheduled(gm, "forward", plan_of(bucket_bytes=0, prefetch=1))
    if lowered:
        lower(gm.graph)
    m = Machine("toy", Rates({"float64": 36.0}, 192.0), {"any": Link(0.0, 48.0)})  # 144 FLOPs, 192 bytes of tanh, 144 on the wire
    t = simulate([work_of(gm.graph, "forward")], m)
    assert exposed(t) == [("ag1", 3, "head")]
    assert t.step == 3 + 3 * (4 + 1)
    assert t.peak_gathered_bytes == 2 * 288


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer_bytes"):
        simulate([], MACHINE, optimizer_bytes=-1)
    with pytest.raises(ValueError, match="no link for reduce_scatter"):
        run(rs("r", 1), Wait("r"), machine=replace(MACHINE, links={"all_gather": Link(0.0, 1.0)}))


def test_the_drawing() -> None:
    t = run(ag("a", 2), ag("b", 2), Wait("a"), k(5), Free("a", 4), ag("c", 2), Wait("b"), k(5), Wait("c"), k(3), optimizer_bytes=1)
    text = draw(t, width=16)
    assert text.splitlines()[0] == "step 16,000.00 ms on toy: forward 15,000.00 ms, backward 0.00 ms, optimizer 1,000.00 ms"
    lanes = {line.split("|")[0].strip(): line.split("|")[1] for line in text.splitlines() if "|" in line}
    assert lanes["compute"] == "  =============o"
    assert lanes["comm g"] == ">>>>   >>       "
    assert lanes["gathered"] == "9999999999999999"
    assert all(len(lane) == 16 for lane in lanes.values())
    assert "head: 2,000.00 ms" in text
