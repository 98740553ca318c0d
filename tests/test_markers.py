"""markers: one for each parameter in the Dynamo graph, recompute tags in the joint graph, values that the program returns."""

from __future__ import annotations

from typing import Any

import torch
from fsdp_compile.passes import markers
from fsdp_compile.passes.graph_ops import UNSHARD
from graphs import Program, Read, assert_same, capture, chain, dynamo_graph, plan_of, reference, spec, train
from torch import fx

X = (torch.empty(2, 3, dtype=torch.float64),)


def tied(read: Read, x: Any) -> Any:
    return torch.tanh(x @ read("w")) @ read("v") @ read("w")


TIED = Program(tied, (spec("w", 3, 3), spec("v", 3, 3)), X)


def test_reads_of_one_parameter_are_merged_and_its_gradients_summed() -> None:
    gm = dynamo_graph(TIED)
    assert len(markers.marker_specs(gm)) == 3
    assert markers.dedupe(gm) == 1
    assert [s.fqn for s in markers.marker_specs(gm)] == ["w", "v"]
    assert markers.dedupe(gm) == 0
    got = capture(TIED)
    assert sorted(markers.reduced_fqns(got.backward().graph)) == ["v", "w"]
    assert_same(train(TIED, plan_of(), got), reference(TIED))


def test_only_shards_cross_from_forward_to_backward() -> None:
    program = chain(3)
    got = capture(program)
    saved = got.forward().graph.output_node().args[0][1:]  # type: ignore[index]
    sizes = [tuple(n.meta["val"].shape) for n in saved]  # type: ignore[union-attr]
    assert (3, 3) not in sizes, "a gathered weight, or a view of it, is saved"
    assert sizes.count((6,)) == 2  # the shards of the layers whose weight backward reads
    assert [s.fqn for s in markers.marker_specs(got.backward())] == ["layer2.w0", "layer1.w0"]


def test_casts_and_views_of_a_gathered_weight_are_recomputed_too() -> None:
    def fn(read: Read, x: Any) -> Any:
        return (x @ read("w").to(torch.float32).t().reshape(3, 3).double().tanh()).sin()

    got = capture(Program(fn, (spec("w", 3, 3),), X))
    saved = got.forward().graph.output_node().args[0][1:]  # type: ignore[index]
    assert (3, 3) not in [tuple(n.meta["val"].shape) for n in saved]  # type: ignore[union-attr]


def test_a_kept_parameter_is_saved_whole_and_not_gathered_again() -> None:
    got = capture(chain(3, reshard=False))
    assert not markers.marker_specs(got.backward())


def test_the_chain_ends_where_something_else_is_mixed_in() -> None:
    graph = fx.Graph()
    s, x = graph.placeholder("s"), graph.placeholder("x")
    w = graph.call_function(UNSHARD, (s, spec("w", 3, 3).encode()))
    t = graph.call_function(torch.ops.aten.t.default, (w,))
    c = graph.call_function(torch.ops.aten._to_copy.default, (t,))
    both = graph.call_function(torch.ops.aten.mul.Tensor, (c, w))
    mixed = graph.call_function(torch.ops.aten.mul.Tensor, (c, x))
    graph.call_function(torch.ops.aten.t.default, (mixed,))
    graph.output((mixed, both))
    assert set(markers.unary_chain(w)) == {w, t, c, both}


def test_escaping_values() -> None:
    def fn(read: Read, x: Any) -> Any:
        return x @ read("a"), read("b"), read("c").t()[1:], read("d") * 1

    got = capture(Program(fn, tuple(spec(n, 3, 3) for n in "abcd"), X))
    assert got.escaping == {"b", "c"}


def test_markers_leave_a_checkpoint_body_called_once() -> None:
    body_graph = fx.Graph()
    s, x = body_graph.placeholder("s"), body_graph.placeholder("x")
    w = body_graph.call_function(UNSHARD, (s, spec("w", 3, 3).encode()))
    body_graph.output((body_graph.call_function(torch.matmul, (x, w)),))
    for calls in (1, 2):
        root = torch.nn.Module()
        fresh = fx.Graph()
        fresh.output(fresh.graph_copy(body_graph, {}))
        root.body = fx.GraphModule(torch.nn.Module(), fresh)
        graph = fx.Graph()
        shard, y = graph.placeholder("shard"), graph.placeholder("y")
        body = graph.get_attr("body")
        for _ in range(calls):
            y = graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (body, shard, y))
        graph.output((y,))
        gm = fx.GraphModule(root, graph)
        assert markers.dedupe(gm) == (1 if calls == 1 else 0)
        gm.graph.lint()
        assert [s.fqn for s in markers.marker_specs(gm)] == (["w"] if calls == 1 else [])
        assert len(markers.marker_specs(gm.body)) == (0 if calls == 1 else 1)  # type: ignore[arg-type]
