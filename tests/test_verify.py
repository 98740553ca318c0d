"""verify: every invariant has graphs that break it, made from good ones; each is refused with its number, node and bucket.
3 and 4 are in test_verify_sent.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fsdp_compile.passes.graph_ops import FREE, aten, c10d
from fsdp_compile.passes.pipeline import Plan
from fsdp_compile.passes.roles import KEY, nodes_of
from fsdp_compile.passes.verify import Expectation, ScheduleError, verify
from graphs import Program, capture, plan_of, scheduled, spec
from refusals import PACKED, PAIRS, PLANS, SINGLE, captured, good, of, refused
from torch import fx


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_good_graph_passes(direction: str, plan: Plan) -> None:
    graph, expect = good(direction, plan)
    assert nodes_of(graph, "gather") and (direction == "forward" or nodes_of(graph, "reduce"))
    verify(graph, expect)


# --- 1: lifetimes -------------------------------------------------------------------------------------------------------


def test_1_use_before_wait() -> None:
    graph, expect = good("forward", SINGLE)
    launch, wait = of(graph, "gather"), of(graph, "wait_gather")
    for user in list(wait.users):
        if user.target is not FREE:
            user.replace_input_with(wait, launch)
    refused(graph, expect, 1, r"bucket ag1 \(layer0.w0\): reads .* without waiting")


def test_1_a_node_before_its_input() -> None:
    graph, expect = good("forward", SINGLE)
    wait = of(graph, "wait_gather")
    graph.output_node().prepend(wait)
    refused(graph, expect, 1, r"bucket ag1 .*runs before its input")


@pytest.mark.parametrize("plan", [SINGLE, PAIRS, PACKED], ids=["single", "coalesced", "packed"])
def test_1_use_after_free(plan: Plan) -> None:
    graph, expect = good("backward", plan)
    free = of(graph, "free")
    wait = of(graph, "wait_gather")
    of(graph, "unpack").append(free) if plan is PACKED else wait.append(free)
    refused(graph, expect, 1, r"bucket ag1 \(layer3.w0.*uses it after .* has freed it")


def test_1_use_after_free_through_the_programs_own_view() -> None:
    graph, expect = good("backward", SINGLE)
    view = next(n for n in graph.nodes if n.target is aten.t.default and n.args[0] is of(graph, "unpack", 0))
    view.append(of(graph, "free"))
    refused(graph, expect, 1, "node mm_4|uses it after")


@pytest.mark.parametrize("target", [aten._unsafe_view.default, aten.unsafe_split.Tensor])
def test_1_use_after_free_through_an_alias_that_no_schema_declares(target: Callable[..., object]) -> None:
    graph, expect = good("forward", SINGLE)
    weight, free = of(graph, "unpack"), of(graph, "free")
    user = next(u for u in weight.users if u.target is aten.mm.default)
    with graph.inserting_before(user):
        alias = graph.call_function(target, (weight, [6, 6] if target is aten._unsafe_view.default else 6))
        item = alias if target is aten._unsafe_view.default else graph.call_function(operator.getitem, (alias, 0))
    user.replace_input_with(weight, item)
    verify(graph, expect)
    user.prepend(free)
    refused(graph, expect, 1, "uses it after")


def test_1_two_waits() -> None:
    graph, expect = good("forward", SINGLE)
    wait = of(graph, "wait_gather")
    with graph.inserting_after(wait):
        again = graph.node_copy(wait)
    assert again.meta[KEY].bucket == "ag1"
    refused(graph, expect, 1, r"bucket ag1 \(layer0.w0\): has 2 waits")


def test_1_no_wait() -> None:
    graph, expect = good("forward", SINGLE)
    wait, launch = of(graph, "wait_gather"), of(graph, "gather")
    wait.replace_all_uses_with(launch)
    graph.erase_node(wait)
    refused(graph, expect, 1, r"bucket ag1 \(layer0.w0\): has 0 waits")


def test_1_a_result_of_a_coalesced_launch_that_nobody_waits_for() -> None:
    graph, expect = good("forward", PAIRS)
    launch = of(graph, "gather")
    for item in (of(graph, "item", 0), of(graph, "item", 1)):
        item.args = (launch, 1)
    refused(graph, expect, 1, r"bucket ag1 \(layer0.w0, layer1.w0\): delivers 2 tensors")


def test_1_a_wait_labelled_with_another_parameter() -> None:
    graph, expect = good("forward", PAIRS)
    launch = of(graph, "gather")
    of(graph, "item", 0).args, of(graph, "item", 1).args = (launch, 1), (launch, 0)
    refused(graph, expect, 1, r"bucket ag1 .*waits for")


def test_1_a_wait_without_a_launch() -> None:
    graph, expect = good("forward", SINGLE)
    wait = of(graph, "wait_gather")
    with graph.inserting_after(wait):
        stray = graph.node_copy(wait)
    stray.args = (next(n for n in graph.nodes if n.op == "placeholder"),)
    refused(graph, expect, 1, r"bucket ag1 .*no launch of ours")


def test_1_double_free() -> None:
    graph, expect = good("forward", SINGLE)
    free = of(graph, "free")
    with graph.inserting_after(free):
        graph.node_copy(free)
    refused(graph, expect, 1, r"bucket ag1 \(layer0.w0\): frees a buffer that is freed already")


def test_1_never_freed() -> None:
    graph, expect = good("forward", SINGLE)
    graph.erase_node(of(graph, "free"))
    refused(graph, expect, 1, r"bucket ag1 \(layer0.w0\): is never freed")


def test_1_a_free_of_something_else() -> None:
    graph, expect = good("forward", SINGLE)
    of(graph, "free").args = (next(n for n in graph.nodes if n.op == "placeholder"),)
    refused(graph, expect, 1, r"bucket ag1 .*not a gathered buffer")


@pytest.mark.parametrize("freed", [True, False])
def test_1_a_gathered_alias_leaves_only_with_permission(freed: bool) -> None:
    graph, expect = good("forward", SINGLE)
    weight, out = of(graph, "unpack"), graph.output_node()
    out.args = ((*out.args[0], weight),)  # type: ignore[misc]
    if freed:
        refused(graph, expect, 1, r"bucket ag1 \(layer0.w0\): the graph returns it after")
        return
    graph.erase_node(of(graph, "free"))
    refused(graph, expect, 1, r"bucket ag1 \(layer0.w0\): the gathered value of 'layer0.w0' leaves the graph")
    refused(graph, replace(expect, escaping=frozenset({"layer1.w0"})), 1, "layer0.w0")
    verify(graph, replace(expect, escaping=frozenset({"layer0.w0"})))


def test_1_a_parameter_gathered_twice_or_not_at_all() -> None:
    graph, expect = good("forward", SINGLE)
    refused(graph, replace(expect, gathered=(*expect.gathered, expect.gathered[0])), 1, "is gathered 1 times; the graph reads it 2 times")
    refused(graph, replace(expect, gathered=expect.gathered[1:]), 1, r"bucket ag1 \(layer0.w0\): gathers 'layer0.w0'")


def test_1_a_marker_left_over() -> None:
    gm = captured().forward()
    refused(gm.graph, Expectation(), 1, "is a marker")


# --- 2: reductions ------------------------------------------------------------------------------------------------------


def test_2_reduced_twice() -> None:
    graph, expect = good("backward", SINGLE)
    launch, wait, out = of(graph, "reduce"), of(graph, "wait_reduce"), graph.output_node()
    with graph.inserting_before(out):
        launch2 = graph.node_copy(launch)
        wait2 = graph.node_copy(wait, lambda n: launch2)
        out.args = ((*out.args[0], wait2),)  # type: ignore[misc]
    refused(graph, expect, 2, r"bucket rs1 \(layer3.w0\): reduces 'layer3.w0' 2 times")


def test_2_never_reduced_though_its_gradient_is_packed() -> None:
    graph, expect = good("backward", SINGLE)
    launch, wait = of(graph, "reduce"), of(graph, "wait_reduce")
    wait.replace_all_uses_with(launch.args[0])
    graph.erase_node(wait)
    graph.erase_node(launch)
    refused(graph, expect, 2, "the gradient of 'layer3.w0' is never reduced")


def test_2_frozen_reduced() -> None:
    graph, expect = good("backward", SINGLE)
    refused(graph, replace(expect, reduced=expect.reduced[1:]), 2, r"bucket rs1 \(layer3.w0\): reduces 'layer3.w0', which has no gradient")


def test_2_a_result_that_goes_nowhere() -> None:
    graph, expect = good("backward", SINGLE)
    out = graph.output_node()
    out.replace_input_with(of(graph, "wait_reduce"), of(graph, "wait_reduce", 1))
    refused(graph, expect, 2, r"bucket rs1 \(layer3.w0\): its result does not reach")


def test_2_two_gradients_of_one_parameter() -> None:
    graph, expect = good("backward", SINGLE)
    refused(graph, replace(expect, reduced=(*expect.reduced, expect.reduced[0])), 2, "2 gradients in one graph")


def test_2_no_wait_and_use_before_wait() -> None:
    graph, expect = good("backward", SINGLE)
    launch, wait = of(graph, "reduce"), of(graph, "wait_reduce")
    wait.replace_all_uses_with(launch)
    refused(graph, expect, 2, r"bucket rs1 .*without waiting")
    graph.erase_node(wait)
    refused(graph, expect, 2, r"bucket rs1 .*0 waits")


def test_2_an_exchange_combined_with_another_operation() -> None:
    graph, expect = good("backward", PLANS["exchange"])
    combine = next(n for n in graph.nodes if n.target is aten.mean.dim)
    combine.target = aten.sum.dim_IntList
    refused(graph, expect, 2, r"bucket rs1 .*whose sum is scaled by 1.0 instead of 0.5 \(avg\)")
    graph, expect = good("backward", PLANS["exchange"])
    combine = next(n for n in graph.nodes if n.target is aten.mean.dim)
    combine.target = aten.amax.default
    refused(graph, expect, 2, r"bucket rs1 .*nothing combines \(avg\)")


@pytest.mark.parametrize("bucket_bytes, where", [(0, "total"), (1 << 20, "pack")])
def test_2_an_exchange_scaled_twice_or_not_at_all(bucket_bytes: int, where: str) -> None:
    """Our own operators divide while they copy: where gradients are packed, else where they are summed."""
    ours, scales = torch.ops.fsdp_compile, []
    for wrong in (1.0, 0.25):
        graph, expect = good("backward", plan_of(bucket_bytes, transport="own"))
        scaled = next(n for n in graph.nodes if n.target is getattr(ours, where).default)
        scales.append(scaled.args[1])
        scaled.args = (scaled.args[0], wrong)
        refused(graph, expect, 2, rf"bucket rs1 .*whose sum is scaled by {wrong} instead of 0.5 \(avg\)")
    assert scales == [0.5, 0.5]


# --- 5: bytes; 6: inputs ------------------------------------------------------------------------------------------------


def test_5_above_the_limit() -> None:
    graph, expect = good("forward", SINGLE)
    verify(graph, replace(expect, limit_gathers=2 * 288))
    held = r"bucket ag2 \(layer1.w0\): 576 gathered bytes alive \(ag1: 288, ag2: 288\)"
    refused(graph, replace(expect, limit_gathers=2 * 288 - 1), 5, held)


def test_5_a_launch_moved_up_breaks_the_limit() -> None:
    graph, expect = good("forward", SINGLE)
    of(graph, "gather", 0).append(of(graph, "gather", 2))
    refused(graph, replace(expect, limit_gathers=2 * 288), 5, r"864 gathered bytes alive")


@pytest.mark.parametrize("kind", ["gather", "reduce", "free"])
@pytest.mark.parametrize("plan", [SINGLE, PAIRS, PACKED], ids=["single", "coalesced", "packed"])
def test_5_bytes_that_do_not_follow_from_the_specs(kind: str, plan: Plan) -> None:
    graph, expect = good("backward", plan)
    node = of(graph, kind)
    node.meta[KEY] = replace(node.meta[KEY], nbytes=node.meta[KEY].nbytes - 8)
    refused(graph, expect, 5, r"bucket (ag|rs)1 \(layer3.w0.*counted as")


def test_6_the_out_overload() -> None:
    graph, expect = good("backward", SINGLE)
    launch = of(graph, "reduce")
    with graph.inserting_before(launch):
        out = graph.call_function(aten.empty.memory_format, ([18],))
    launch.target = c10d.reduce_scatter_tensor_out.default
    launch.kwargs = {"out": out}
    refused(graph, expect, 6, r"bucket rs1 \(layer3.w0\): writes into a given buffer")


@pytest.mark.parametrize("kind", ["gather", "reduce"])
@pytest.mark.parametrize("through", ["itself", "its memory"])
def test_6_a_write_in_flight(kind: str, through: str) -> None:
    graph, expect = good("backward", SINGLE)
    launch, wait = of(graph, kind), of(graph, "wait_" + kind)
    written = launch.args[0]
    assert isinstance(written, fx.Node)
    if through == "its memory" and kind == "reduce":
        written = written.all_input_nodes[0]  # the gradient whose view is sent
    with graph.inserting_after(launch):
        write = graph.call_function(aten.zero_.default, (written,))
    refused(graph, expect, 6, rf"bucket (ag|rs)1 \(layer3.w0\): writes {written.name} while {launch.name} is still reading it")
    wait.append(write)
    verify(graph, expect)


def test_the_message_names_node_bucket_and_the_first_parameters() -> None:
    graph, expect = good("forward", plan_of(1 << 20))
    of(graph, "gather").meta[KEY] = replace(of(graph, "gather").meta[KEY], nbytes=1)
    with pytest.raises(ScheduleError) as e:
        verify(graph, expect)
    assert str(e.value) == (
        "invariant 5 broken: node all_gather_into_tensor_coalesced_default, bucket ag1 (layer0.w0, layer1.w0, layer2.w0, …): "
        "is counted as 1 bytes, its parameters take 1152"
    )


def test_a_scalar_travels_like_the_others() -> None:
    program = Program(lambda read, x: x * read("s") @ read("w"), (spec("s"), spec("w", 3, 3)), (torch.empty(2, 3, dtype=torch.float64),))
    gm = capture(program).backward()
    done = scheduled(gm, "backward", SINGLE)
    verify(gm.graph, Expectation(done.gathered, done.reduced))
