"""bucket: what may share a collective, in which order, under which limits, and what the merged graph looks like."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_compile.passes.bucket import BucketPlan, bucket
from fsdp_compile.passes.graph_ops import aten, c10d
from fsdp_compile.passes.insert import insert
from fsdp_compile.passes.pipeline import Plan
from fsdp_compile.passes.roles import nodes_of, role_of
from fsdp_compile.passes.schedule import SchedulePlan, schedule
from graphs import Captured, Program, Read, capture, chain, plan_of
from torch import fx

BYTES = 288  # gathered bytes of each 6 x 6 float64 matrix
EACH = ["0", "1", "2", "3", "4"]


@functools.cache
def captured() -> Captured:
    return capture(chain(5, width=6))


def buckets(got: Captured, kind: str, plan: Plan, direction: str = "backward") -> list[tuple[str, ...]]:
    roles = {int(r.bucket[2:]): r.params for _, r in nodes_of(bucketed(got, plan, direction), kind)}
    return [roles[i] for i in sorted(roles)]  # by number, which is the order of use; `schedule` has yet to move them


def bucketed(got: Captured, plan: Plan, direction: str = "backward") -> fx.Graph:
    graph = getattr(got, direction)().graph
    insert(graph, direction)
    count = bucket(graph, plan.bucket)
    graph.lint()
    assert count == len(nodes_of(graph, "gather", "reduce"))
    return graph


def numbers(found: list[tuple[str, ...]]) -> list[str]:
    return ["".join(p.removeprefix("layer").removesuffix(".w0") for p in b) for b in found]


@pytest.mark.parametrize(
    "size, forward, reduced",
    [
        (0, ["0", "1", "2", "3", "4"], ["4", "3", "2", "1", "0"]),
        (2 * BYTES - 1, ["0", "1", "2", "3", "4"], ["4", "3", "2", "1", "0"]),
        (2 * BYTES, ["01", "23", "4"], ["43", "21", "0"]),
        (3 * BYTES + 1, ["012", "34"], ["432", "10"]),
        (1 << 30, ["01234"], ["43210"]),
    ],
)
@pytest.mark.parametrize("mode", ["coalesced", "packed"])
def test_size_limits(size: int, forward: list[str], reduced: list[str], mode: str) -> None:
    assert numbers(buckets(captured(), "gather", plan_of(size, mode), "forward")) == forward
    assert numbers(buckets(captured(), "reduce", plan_of(size, mode))) == reduced


def test_modules_share_a_bucket_whatever_their_size_and_no_other() -> None:
    labels = {f"layer{i}.w0": "first" if i < 3 else "second" for i in range(5)}
    assert numbers(buckets(captured(), "gather", plan_of(0, labels=labels), "forward")) == ["012", "34"]
    assert numbers(buckets(captured(), "reduce", plan_of(1 << 30, labels=labels))) == ["43", "210"]
    some = {"layer1.w0": "one", "layer2.w0": "one"}
    assert numbers(buckets(captured(), "gather", plan_of(1 << 30, labels=some), "forward")) == ["0", "12", "34"]


def test_no_bucket_of_gathers_above_the_limit_on_gathered_bytes() -> None:
    assert numbers(buckets(captured(), "gather", plan_of(1 << 30, limit=2 * BYTES), "forward")) == ["01", "23", "4"]
    labels = {f"layer{i}.w0": "all" for i in range(5)}
    assert numbers(buckets(captured(), "gather", plan_of(0, limit=2 * BYTES, labels=labels), "forward")) == ["01", "23", "4"]
    assert numbers(buckets(captured(), "reduce", plan_of(1 << 30, limit=2 * BYTES))) == ["43210"]


def test_one_parameter_above_the_limit_is_named() -> None:
    with pytest.raises(ValueError, match=f"limit_all_gathers={BYTES - 1} .*'layer0.w0'.* at least {BYTES}"):
        buckets(captured(), "gather", plan_of(0, limit=BYTES - 1), "forward")


def test_gathers_in_order_of_first_use_not_of_trace() -> None:
    def fn(read: Read, x: Any) -> Any:
        names = [f"layer{i}.w0" for i in range(4)]
        weights = {n: read(n) for n in names}  # traced 0 1 2 3, used 2 0 3 1
        for i in (2, 0, 3, 1):
            x = torch.tanh(x @ weights[f"layer{i}.w0"].t())
        return x

    got = capture(Program(fn, chain(4, width=6).specs, (torch.empty(2, 6, dtype=torch.float64),)))
    for plan, want in ((plan_of(0), ["2", "0", "3", "1"]), (plan_of(2 * BYTES), ["20", "31"])):
        assert numbers(buckets(got, "gather", plan, "forward")) == want
        graph = bucketed(got, plan, "forward")
        for kind in ("wait_gather", "unpack", "free"):  # names follow the merge, whatever number they had before
            for n, r in nodes_of(graph, kind):
                assert {p for _, g in nodes_of(graph, "gather") if g.bucket == r.bucket for p in g.params} >= set(r.params), n
                if kind == "free":
                    assert r.nbytes == BYTES


@pytest.mark.parametrize("mode", ["coalesced", "packed"])
@pytest.mark.parametrize(
    "change, gathers, reductions",
    [
        ({"group": "h"}, EACH, EACH[::-1]),
        ({"compute_dtype": torch.float32}, EACH, ["43210"]),
        ({"reduce_op": "sum"}, ["01234"], EACH[::-1]),
        ({"reduce_dtype": torch.float32}, ["01234"], EACH[::-1]),
    ],
    ids=["group", "compute dtype", "reduce op", "reduce dtype"],
)
def test_what_differs_is_never_merged(change: dict[str, Any], gathers: list[str], reductions: list[str], mode: str) -> None:
    base = chain(5, width=6)
    specs = tuple(replace(s, **change) if i % 2 else s for i, s in enumerate(base.specs))

    def fn(read: Read, x: Any) -> Any:
        for s in specs:
            x = torch.tanh(x @ read(s.fqn).double())
        return x

    got = capture(replace(base, specs=specs, fn=fn))
    assert numbers(buckets(got, "gather", plan_of(1 << 30, mode), "forward")) == gathers
    assert numbers(buckets(got, "reduce", plan_of(1 << 30, mode))) == reductions


def test_a_reduction_whose_result_the_graph_uses_stays_alone() -> None:
    gm = captured().backward()
    graph, out = gm.graph, gm.graph.output_node()
    mark = [n for n in graph.nodes if "reduce_grad" in str(n.target)][2]  # layer2
    with graph.inserting_before(out):
        total = graph.call_function(aten.add.Tensor, (mark, 1.0))
        total.meta["val"] = mark.meta["val"]
    out.replace_input_with(mark, total)
    insert(graph, "backward")
    bucket(graph, plan_of(1 << 30).bucket)
    graph.lint()
    assert numbers([r.params for _, r in nodes_of(graph, "reduce")]) == ["43", "2", "10"]


def test_a_shard_that_the_graph_computes_is_gathered_alone_and_not_before_it_exists() -> None:
    gm = captured().forward()
    graph = gm.graph
    mark = [n for n in graph.nodes if "unshard" in str(n.target)][1]
    shard = mark.args[0]
    with graph.inserting_before(mark):
        scaled = graph.call_function(aten.mul.Tensor, (shard, 2.0))
        scaled.meta["val"] = shard.meta["val"]
    mark.replace_input_with(shard, scaled)
    insert(graph, "forward")
    bucket(graph, plan_of(1 << 30).bucket)
    graph.lint()
    assert numbers([r.params for _, r in nodes_of(graph, "gather")]) == ["0", "1", "234"]
    schedule(graph, SchedulePlan(5))
    graph.lint()


def test_packed_buckets_keep_what_leaves_the_graph_apart() -> None:
    base = chain(4, width=6)
    got = capture(replace(base, specs=tuple(replace(s, reshard=i != 1) for i, s in enumerate(base.specs))))
    assert numbers(buckets(got, "gather", plan_of(1 << 30, "packed"), "forward")) == ["0", "1", "23"]
    assert numbers(buckets(got, "gather", plan_of(1 << 30, "coalesced"), "forward")) == ["0123"]


def test_the_two_modes() -> None:
    coalesced, packed = (bucketed(captured(), plan_of(1 << 30, m)) for m in ("coalesced", "packed"))
    (launch,) = (n for n, _ in nodes_of(coalesced, "gather"))
    assert launch.target is c10d.all_gather_into_tensor_coalesced.default and launch.args[1:] == (2, "g")
    assert len(nodes_of(coalesced, "wait_gather")) == len(nodes_of(coalesced, "free")) == 4
    (launch,) = (n for n, _ in nodes_of(packed, "gather"))
    assert launch.target is c10d.all_gather_into_tensor.default
    assert launch.args[0].target is aten.cat.default  # type: ignore[union-attr]
    ((free, role),) = nodes_of(packed, "free")
    assert role.nbytes == 4 * BYTES and free.args[0] is nodes_of(packed, "wait_gather")[0][0]
    assert not any(role_of(n) and n.target is aten.cat.default for n in coalesced.nodes)


def test_reductions_may_have_a_mode_of_their_own() -> None:
    plan = Plan(BucketPlan(1 << 30, reduce_mode="packed"))
    graph = bucketed(captured(), plan)
    assert nodes_of(graph, "gather")[0][0].target is c10d.all_gather_into_tensor_coalesced.default
    assert nodes_of(graph, "reduce")[0][0].target is c10d.reduce_scatter_tensor.default


@pytest.mark.parametrize("bad", [{"bucket_bytes": -1}, {"mode": "both"}, {"limit": 0}, {"reduce_mode": "x"}])
def test_bad_plans(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bucket_bytes|collective must be|limit_all_gathers"):
        BucketPlan(**bad)
