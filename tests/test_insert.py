"""insert: each marker becomes cast, launch, wait and views; gradients become packs, launches and waits; frees end lifetimes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from fsdp_compile.passes.graph_ops import FREE, REDUCE_GRAD, UNSHARD, c10d
from fsdp_compile.passes.insert import insert
from fsdp_compile.passes.roles import Role, nodes_of, role_of
from graphs import Captured, Program, Read, capture, chain, spec, text
from torch import fx


@functools.cache
def captured(**kwargs: Any) -> Captured:
    return capture(chain(2, width=3, **kwargs))


def inserted(got: Captured, direction: str) -> fx.Graph:
    graph = getattr(got, direction)().graph
    done = insert(graph, direction)
    graph.lint()
    assert len(done.gathered) == len({r.bucket for _, r in nodes_of(graph, "unpack")})
    assert not any(n.target in (UNSHARD, REDUCE_GRAD) for n in graph.nodes)
    return graph


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_new_node_has_a_role_a_value_and_a_bucket_of_one_parameter(direction: str) -> None:
    got = captured()
    old = {n.name for n in getattr(got, direction)().graph.nodes}
    for n in inserted(got, direction).nodes:
        role = role_of(n)
        assert (role is not None) == (n.name not in old), n
        if role is not None:
            assert len(role.params) == 1 and role.direction == direction and "val" in n.meta


def test_values_have_the_shapes_and_dtypes_of_the_specs() -> None:
    got = captured(dtype=torch.float32, compute_dtype=torch.bfloat16, reduce_dtype=torch.float64, world=2)
    graph = inserted(got, "backward")
    (gather,) = (n for n, _ in nodes_of(graph, "gather"))
    assert gather.args[1:] == (2, "g") and gather.meta["val"].shape == (12,) and gather.meta["val"].dtype == torch.bfloat16
    assert nodes_of(graph, "unpack")[-1][0].meta["val"].shape == (3, 3)
    for reduce, role in nodes_of(graph, "reduce"):
        assert reduce.args[1:] == ("avg", 2, "g") and reduce.meta["val"].shape == (6,) and reduce.meta["val"].dtype == torch.float64
        assert role.nbytes == 12 * 8
    assert {n.meta["val"].dtype for n, _ in nodes_of(graph, "grad")} == {torch.float32}
    assert nodes_of(graph, "gather")[0][1].nbytes == 12 * 2


def test_a_free_stands_right_behind_the_last_use() -> None:
    graph = inserted(captured(), "forward")
    frees = nodes_of(graph, "free")
    assert len(frees) == 2
    for free, role in frees:
        assert free.prev.target is torch.ops.aten.mm.default and role.nbytes == 12 * 8


def test_what_leaves_the_graph_is_not_freed() -> None:
    program = chain(2)
    got = capture(Program(lambda read, x: (program.fn(read, x), read("layer0.w0").t()), program.specs, program.inputs))
    assert got.escaping == {"layer0.w0"}
    graph = inserted(got, "forward")
    assert [r.params for _, r in nodes_of(graph, "free")] == [("layer1.w0",)]


@pytest.mark.parametrize("world, shape", [(1, (3, 3)), (4, (0, 3))])
def test_one_rank_and_empty_parameters_need_no_collective(world: int, shape: tuple[int, ...]) -> None:
    def fn(read: Read, x: Any) -> Any:
        return torch.cat([x, read("w")])

    got = capture(Program(fn, (spec("w", *shape, world=world),), (torch.empty(2, 3, dtype=torch.float64),)))
    for direction in ("forward", "backward"):
        graph = inserted(got, direction)
        assert not nodes_of(graph, "gather", "reduce", "free", "wait_gather", "wait_reduce")
        assert all(r.bucket.startswith("local_") for _, r in nodes_of(graph, "unpack", "pack", "grad"))


def test_a_marker_that_nobody_reads_is_dropped() -> None:
    gm = captured().forward()
    mark = next(n for n in gm.graph.nodes if n.target is UNSHARD)
    with gm.graph.inserting_after(mark):
        gm.graph.node_copy(mark)
    assert len(insert(gm.graph, "forward").gathered) == 2
    assert len(nodes_of(gm.graph, "gather")) == 2


def test_scalars_are_repeated_for_every_rank() -> None:
    got = capture(Program(lambda read, x: x * read("s"), (spec("s", world=3),), (torch.empty(2, dtype=torch.float64),)))
    graph = inserted(got, "backward")
    (reduce,) = (n for n, _ in nodes_of(graph, "reduce"))
    assert reduce.target is c10d.reduce_scatter_tensor.default
    assert reduce.args[0].target is torch.ops.aten.repeat.default  # type: ignore[union-attr]
    assert not any(n.target is FREE for n in graph.nodes)  # the scalar is not read in backward


@pytest.mark.parametrize("bad", [{"kind": "x"}, {"direction": "up"}, {"params": ()}, {"nbytes": -1}])
def test_bad_roles(bad: dict[str, Any]) -> None:
    good = {"kind": "gather", "bucket": "ag1", "params": ("w",), "direction": "forward"}
    with pytest.raises(ValueError, match=r"role|direction|parameter|negative"):
        Role(**{**good, **bad})


def test_snapshot() -> None:
    assert_expected_inline(text(inserted(captured(), "backward")), """\
tanh_backward = tanh_backward(tangents_1, detach_2)
t = t(tanh)
mm_2 = mm(t, tanh_backward)
all_gather_into_tensor_default = all_gather_into_tensor(primals_2)
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
slice_tensor = slice(wait_tensor_default)
reshape_default = reshape(slice_tensor)
t_1 = t(reshape_default)
mm_3 = mm(tanh_backward, t_1)
free_default = free(wait_tensor_default)
reshape_default_1 = reshape(mm_2)
constant_pad_nd_default = constant_pad_nd(reshape_default_1)
reduce_scatter_tensor_default = reduce_scatter_tensor(constant_pad_nd_default)
wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default)
detach = detach(tanh)
detach_3 = detach(detach)
tanh_backward_1 = tanh_backward(mm_3, detach_3)
mm_4 = mm(t_2, tanh_backward_1)
reshape_default_2 = reshape(mm_4)
constant_pad_nd_default_1 = constant_pad_nd(reshape_default_2)
reduce_scatter_tensor_default_1 = reduce_scatter_tensor(constant_pad_nd_default_1)
wait_tensor_default_2 = wait_tensor(reduce_scatter_tensor_default_1)
return wait_tensor_default_2, wait_tensor_default_1
""")
