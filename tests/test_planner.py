"""planner and replan: replanned events against the passes themselves; what is chosen, under which budget, and how fast."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_compile.passes.bucket import BucketPlan
from fsdp_compile.passes.cost import Launch, Work, work_of
from fsdp_compile.passes.machine import Link, Machine, Rates
from fsdp_compile.passes.pipeline import Plan
from fsdp_compile.passes.planner import NOTHING, SURE, Choice, choose, first_of, keeps, order_of_keeping, replanner, spend
from fsdp_compile.passes.replan import BASE, base_of, replan
from fsdp_compile.passes.schedule import SchedulePlan
from fsdp_compile.passes.simulate import simulate
from graphs import Captured, capture, chain, scheduled, synthetic
from torch import fx, nn

from fsdp_compile import Report, explain
from fsdp_compile.bench_model import example_file, load_file
from fsdp_compile.devices import device

BYTES = 288
FAST = Machine("fast net", Rates({"float64": 144.0}, 1e9), {"any": Link(0.0, 1e6)})
SLOW = Machine("slow net", Rates({"float64": 144.0}, 1e9), {"any": Link(1.0, 144.0)})


@functools.cache
def captured() -> Captured:
    return capture(chain(6, width=6, per_layer=2))


def work(direction: str, plan: Plan) -> Work:
    gm = getattr(captured(), direction)()
    scheduled(gm, direction, plan)
    return work_of(gm.graph, direction)


def plan(bucket_bytes: int | None, prefetch: int, limit: int | None, exchange: bool) -> Plan:
    buckets = BucketPlan(bucket_bytes, {}, "coalesced", limit, "packed" if exchange else None)
    return Plan(buckets, SchedulePlan(prefetch, limit, None), "all_to_all" if exchange else "native")


def signature(w: Work) -> list[Any]:
    """What is comparable: coalesced waits of one bucket in a row are one, kernels of ours are not compared (copies of packing)."""
    out: list[Any] = []
    for e in w.events:
        if getattr(e, "ours", False):
            continue
        line = replace(e, bucket="") if isinstance(e, Launch) else (type(e).__name__, getattr(e, "name", ""), getattr(e, "nbytes", 0))
        if line != ("Wait", "", 0) or not out or out[-1] != line:
            out.append(line)
    return out


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("bucket_bytes", [None, 0, 2 * BYTES, 5 * BYTES])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("limit", [None, 6 * BYTES])
def test_replanned_is_what_the_passes_do(direction: str, bucket_bytes: int | None, prefetch: int, limit: int | None) -> None:
    base = base_of(work(direction, BASE))
    got = replan(base, bucket_bytes, prefetch, limit)
    want = work(direction, plan(bucket_bytes, prefetch, limit, False))
    assert signature(got) == signature(want)
    assert simulate([got], SLOW).step == pytest.approx(simulate([want], SLOW).step)
    assert simulate([got], SLOW).peak_gathered_bytes == simulate([want], SLOW).peak_gathered_bytes


@pytest.mark.parametrize("bucket_bytes", [0, 3 * BYTES])
def test_replanned_exchanges(bucket_bytes: int) -> None:
    base = base_of(work("backward", replace(BASE, transport="all_to_all")))
    got = replan(base, bucket_bytes, 1, exchange=True)
    assert signature(got) == signature(work("backward", plan(bucket_bytes, 1, None, True)))


PLANNED = [(2, None, None, None), (2, None, None, 0), (1, 1 << 21, None, 0), (1, 1 << 21, None, None), (3, 1 << 20, 2 << 20, 0)]


@pytest.mark.parametrize(
    "prefetch, bucket_bytes, limit, kept, kept_in_base",
    [pytest.param(*p, 0, id=f"base-{i}") for i, p in enumerate(PLANNED)]
    # What a graph carries, it carries: no plan that keeps nothing can be made of works that keep something.
    + [pytest.param(*p, None, id=f"kept in base-{i}") for i, p in enumerate(PLANNED) if p[-1] is None],
)
def test_replanned_decoder(prefetch: int, bucket_bytes: int | None, limit: int | None, kept: int | None, kept_in_base: int | None) -> None:
    base = decoder(bucket_bytes=0, prefetch=0, limit_reduce_scatters=1 << 62, keep_bytes=kept_in_base)
    real = decoder(bucket_bytes=bucket_bytes, prefetch=prefetch, limit_all_gathers=limit, keep_bytes=kept)
    assert bool(real.kept) == (kept is None) and bool(base.kept) == (kept_in_base is None)
    for machine in (device("A100"), Machine("cpu", Rates({"float32": 1e11}, 2e10, 3e-6), {"any": Link(5e-4, 5e8)})):
        want = real.simulate(machine, "none")
        keep = real.kept if kept_in_base == 0 else frozenset()
        got = simulate(replanner(g.work for g in base.graphs)(bucket_bytes, prefetch, limit, keep), machine)
        assert got.step == pytest.approx(want.step, rel=0.03)
        assert want.peak_gathered_bytes <= got.peak_gathered_bytes <= 1.15 * want.peak_gathered_bytes


@functools.cache
def decoder(**options: Any) -> Report:
    model, _ = load_file(example_file("decoder.py")).example()
    return explain(model, torch.zeros(2, 64, dtype=torch.long), world_size=2, lowering="fx", **options)


def both() -> list[Work]:
    return [work("forward", BASE), work("backward", BASE)]


def test_a_fast_network_takes_the_least_memory() -> None:
    got = choose(replanner(both()), FAST, buckets=(BYTES, 4 * BYTES, 100 * BYTES))
    assert (got.bucket_bytes, got.peak_gathered_bytes) == (BYTES, BYTES)


def test_latency_makes_larger_buckets_and_prefetch_worth_it() -> None:
    got = choose(replanner(both()), SLOW, buckets=(BYTES, 4 * BYTES, 100 * BYTES))
    assert got.bucket_bytes > BYTES
    assert got.prefetch >= 1


def test_the_usual_plan_unless_another_is_clearly_faster() -> None:
    """A prediction errs by more than what it says is gained by hiding little."""
    little = Machine("net", Rates({"float64": 144.0}, 1e9), {"any": Link(0.02, 1e6)})
    usual = (0, 0, NOTHING)
    best, taken = choose(replanner(both()), little), choose(replanner(both()), little, usual=usual)
    assert (taken.bucket_bytes, taken.prefetch) == (0, 0) != (best.bucket_bytes, best.prefetch)
    assert best.seconds < taken.seconds < best.seconds / (1 - SURE)
    assert choose(replanner(both()), SLOW, usual=usual) == choose(replanner(both()), SLOW), "here it is slower by far"
    large = (100 * BYTES, 2, NOTHING)
    assert choose(replanner(both()), little, usual=large).bucket_bytes == large[0]
    assert choose(replanner(both()), little, BYTES, usual=large).peak_gathered_bytes == BYTES, "it does not fit the budget"


def test_the_budget_is_kept_and_costs_time() -> None:
    free = choose(replanner(both()), SLOW, buckets=(BYTES, 4 * BYTES, 100 * BYTES))
    tight = choose(replanner(both()), SLOW, 2 * BYTES, buckets=(BYTES, 4 * BYTES, 100 * BYTES))
    assert tight.peak_gathered_bytes <= 2 * BYTES == tight.limit_all_gathers < free.peak_gathered_bytes
    assert tight.seconds > free.seconds
    with pytest.raises(ValueError, match=f"within {BYTES - 1} bytes"):
        choose(replanner(both()), SLOW, BYTES - 1)
    with pytest.raises(ValueError, match="must be positive"):
        choose(replanner(both()), SLOW, 0)


def spent(budget: int, machine: Machine = FAST) -> tuple[Choice, Choice]:
    build = replanner(both())
    choice = choose(build, machine, budget, usual=(0, 1, NOTHING))
    return choice, spend(build, machine, budget, choice, first_of(order_of_keeping(both())))


def test_what_the_budget_leaves_is_spent() -> None:
    order = order_of_keeping(both())
    before, after = spent(1 << 30)
    assert not before.keep and set(after.keep) == set(first_of(order)) and after.seconds <= before.seconds
    before, after = spent(4 * BYTES)
    assert set(after.keep) == set(first_of(order, 3 * BYTES)) and after.peak_gathered_bytes <= 4 * BYTES
    before, after = spent(BYTES)
    assert after == before


def test_a_graph_keeps_no_more_than_its_share() -> None:
    order = order_of_keeping(both())
    assert first_of(order, BYTES - 1) == [] and len(first_of(order, 2 * BYTES + 1)) == 2
    largest = max(keeps(order, frozenset(first_of(order)), 4 * BYTES), key=len)
    assert largest == frozenset(first_of(order, 4 * BYTES)[: len(largest)]) and len(largest) <= 4


def test_nothing_better_among_all_candidates_and_always_the_same() -> None:
    build = replanner(both())
    buckets, prefetches = (None, 0, BYTES, 3 * BYTES, 6 * BYTES), (0, 1, 2)
    got = choose(build, SLOW, buckets=buckets, prefetches=prefetches)
    assert got == choose(replanner(both()), SLOW, buckets=buckets, prefetches=prefetches)
    every = [simulate(build(b, p, None, NOTHING), SLOW).step for b in buckets for p in prefetches]
    assert min(every) <= got.seconds <= min(every) * 1.005


def test_a_large_model_in_time() -> None:
    graph = synthetic(126, 9)
    scheduled(fx.GraphModule(nn.Module(), graph), "backward", BASE)
    base = work_of(graph, "backward")
    began = time.process_time()
    got = choose(replanner([base]), SLOW, buckets=(None, *(1 << i for i in range(7, 16))))
    assert time.process_time() - began < 5
    assert got.prefetch >= 1
