"""verify, invariants 3 and 4: what a collective sends depends on no shape of an activation and on nothing of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fsdp_compile.passes.graph_ops import aten, c10d
from fsdp_compile.passes.pipeline import Plan
from fsdp_compile.passes.roles import nodes_of
from graphs import Program, capture, chain, scheduled
from refusals import PACKED, PAIRS, PLANS, SINGLE, good, of, refused
from torch import fx


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_3_a_symbolic_size(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph, expect = good("backward", SINGLE)
    sent = of(graph, kind).args[0]
    assert isinstance(sent, fx.Node)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        sent.meta["val"] = torch.empty(mode.shape_env.create_unbacked_symint(), dtype=torch.float64)
    refused(graph, expect, 3, r"bucket (ag|rs)1 \(layer3.w0\): sends \(u\d+,\): its size depends on an activation")


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_3_a_length_that_is_not_the_parameters(kind: str) -> None:
    graph, expect = good("backward", SINGLE)
    sent = of(graph, kind).args[0]
    assert isinstance(sent, fx.Node)
    sent.meta["val"] = torch.empty(5, dtype=torch.float64)
    refused(graph, expect, 3, r"bucket (ag|rs)1 \(layer3.w0\): sends \[5\] elements; its parameters have")


@pytest.mark.parametrize("kind", ["gather", "reduce"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_4_an_object_instead_of_a_group_name(kind: str, plan: Plan) -> None:
    graph, expect = good("backward", plan)
    launch = of(graph, kind)
    launch.args = (*launch.args[:-1], object())  # type: ignore[assignment]
    refused(graph, expect, 4, r"bucket (ag|rs)1 \(layer3.w0.*holds a object; only group names")


@pytest.mark.parametrize("kind", ["gather", "reduce"])
@pytest.mark.parametrize("group", [140234567890, "h"], ids=["pointer", "other"])
def test_4_a_pointer_or_another_group(kind: str, group: object) -> None:
    graph, expect = good("backward", PAIRS)
    launch = of(graph, kind)
    launch.args = (*launch.args[:-1], group)  # type: ignore[assignment]
    refused(graph, expect, 4, r"bucket (ag|rs)1 \(layer3.w0.*runs on .*belongs to")


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_4_another_world_size(kind: str) -> None:
    graph, expect = good("backward", SINGLE)
    launch = of(graph, kind)
    launch.args = (*launch.args[:-2], 4, launch.args[-1])
    refused(graph, expect, 4, r"bucket (ag|rs)1 \(layer3.w0\): runs on .*4.*belongs to .*2")


def test_4_another_reduce_op_dtype_or_operator() -> None:
    graph, expect = good("backward", SINGLE)
    launch = of(graph, "reduce")
    args = launch.args
    launch.args = (args[0], "sum", *args[2:])
    refused(graph, expect, 4, r"bucket rs1 \(layer3.w0\): runs on \('sum', 2, 'g'\)")
    launch.args = args
    other = tuple(replace(s, reduce_dtype=torch.float32) for s in expect.reduced)
    refused(graph, replace(expect, reduced=other), 4, "travels in torch.float32")
    launch.target = c10d.all_reduce.default
    refused(graph, expect, 4, r"bucket rs1 .*calls _c10d_functional.all_reduce")


@pytest.mark.parametrize("kind", ["unpack", "grad"])
def test_4_a_rank_in_the_offset_of_a_packed_part(kind: str) -> None:
    graph, expect = good("backward", PACKED)
    cut = next(n for n, r in nodes_of(graph, kind) if n.target is aten.slice.Tensor and len(r.params) > 1)
    cut.args = (*cut.args[:2], 3, 21)
    refused(graph, expect, 4, r"bucket (ag|rs)1 \(layer3.w0, layer2.w0\): cuts \[3:21\] for 'layer3.w0', which lies at \[0:18\]")


def test_4_two_ranks_graphs_are_textually_equal() -> None:
    texts = []
    for rank in (0, 1):
        program = chain(3, width=5, world=2)
        object.__setattr__(program, "shards", lambda r, program=program, rank=rank: Program.shards(program, rank))
        gm = capture(program).backward()
        scheduled(gm, "backward", PACKED)
        texts.append(gm.graph.python_code("self").src)
    assert texts[0] == texts[1]
