"""cost: bytes and FLOPs of a graph's kernels, what is fused into one, what collectives send. All values by hand."""

from __future__ import annotations

import pytest
import torch
from fsdp_compile.passes.cost import Free, Kernel, Launch, Wait, Work, work_of
from fsdp_compile.passes.graph_ops import aten
from fsdp_compile.passes.lower import lower
from fsdp_compile.passes.machine import ANY, Link, Machine, Rates, from_json, wire_bytes
from graphs import capture, chain, plan_of, scheduled
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

SIDE = 6
WEIGHT = SIDE * SIDE * 8  # bytes of a float64 matrix
ROWS = 2 * SIDE * 8  # bytes of the activations


def kernels(fn, *args: torch.Tensor, mode: str = "fake") -> list[Kernel]:
    return work_of(make_fx(fn, tracing_mode=mode)(*args).graph, "forward").kernels


def f32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def test_a_matmul() -> None:
    (k,) = kernels(torch.mm, f32(4, 8), f32(8, 16))
    assert (k.flops, k.nbytes, k.dtype) == (2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16), "float32")


def test_a_chain_is_one_kernel_that_reads_its_inputs_and_writes_its_output() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w

    (k,) = kernels(norm, f32(10, 64), f32(64))
    assert k.nbytes == 4 * (10 * 64 + 64 + 10 * 64)
    assert k.flops == 0


def test_a_value_that_is_used_outside_is_written() -> None:
    (k,) = kernels(lambda x: (y := x.sin(), y.cos()), f32(100))
    assert k.nbytes == 4 * 300


def test_chains_end_at_matmuls_and_unconnected_ones_are_apart() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sin().cos() @ x).exp(), y.tan()

    got = kernels(fn, f32(8, 8), f32(5))
    assert [(k.flops, k.nbytes) for k in got] == [(0, 512), (1024, 768), (0, 512), (0, 40)]


def test_views_are_free_and_carry_through() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin().view(16, 4).t().cos()

    (k,) = kernels(fn, f32(8, 8))
    assert k.nbytes == 512
    assert kernels(lambda x: x.view(-1)[3:], f32(8, 8)) == []


def test_a_part_is_read_as_a_part_and_overlapping_parts_once() -> None:
    (k,) = kernels(lambda x: x[:10].sin(), f32(100))
    assert k.nbytes == 80
    (k,) = kernels(lambda x: x[:60] + x[:60] * x[40:], f32(100))
    assert k.nbytes == 4 * (100 + 60)


def test_a_broadcast_counts_once_and_an_embedding_reads_rows() -> None:
    (k,) = kernels(lambda x: x.expand(50, 10).sin(), f32(1, 10))
    assert k.nbytes == 4 * (10 + 500)
    (k,) = kernels(lambda i, w: torch.nn.functional.embedding(i, w), torch.empty(3, dtype=torch.long), f32(1000, 8))
    assert k.nbytes == 8 * 3 + 4 * (3 * 8) * 2


def test_a_copying_reshape_costs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = f32(4, 6).t()
    y = graph.call_function(aten.reshape.default, (x, [-1]))
    y.meta["val"] = f32(24)
    graph.output(y)
    assert [k.nbytes for k in work_of(graph, "forward").kernels] == [2 * 96]


def test_attention_on_cpu_has_flops() -> None:
    q = f32(1, 2, 16, 8)

    def fn(q: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    (k,) = kernels(fn, q)
    assert k.flops == 2 * (2 * 2 * 16 * 16 * 8)  # two batched products, heads 2


def test_symbols_survive() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ w).relu()

    got = kernels(fn, f32(6, 4), f32(4, 3), mode="symbolic")
    mm = got[1]
    assert mm.flops == 2 * 6 * 4 * 3
    symbols = sorted(mm.flops_expr.free_symbols, key=str)
    assert len(symbols) == 3
    sizes = {s: n for s in symbols for n in (6, 4, 3) if mm.flops_expr.diff(s).subs({t: 1 for t in symbols}) == 2}
    assert set(sizes) == set(symbols)
    first = got[0].bytes_expr
    assert first.subs({s: 10 for s in first.free_symbols}) == 2 * 4 * 100
    assert got[0].nbytes == 2 * 4 * 24


# --- Collectives ----------------------------------------------------------------------------------------------------------


def test_bytes_on_the_wire() -> None:
    assert wire_bytes("all_gather", 800, 4) == 600
    assert wire_bytes("reduce_scatter", 800, 4) == 600
    assert wire_bytes("reduce_scatter", 800, 4, "gloo") == 1200
    assert wire_bytes("all_to_all", 800, 8, "gloo") == 700
    assert wire_bytes("all_gather", 800, 1) == 0
    with pytest.raises(ValueError, match="unknown collective"):
        wire_bytes("broadcast", 1, 2)


@pytest.mark.parametrize("mode", ["coalesced", "packed"])
@pytest.mark.parametrize("lowered", [False, True])
def test_the_events_of_a_forward(mode: str, lowered: bool) -> None:
    gm = capture(chain(3, width=SIDE)).forward()
    scheduled(gm, "forward", plan_of(bucket_bytes=0, mode=mode))
    if lowered:
        lower(gm.graph)
    launch, wait, layer = (Launch, WEIGHT), (Wait, 0), [(Kernel, 2 * ROWS + WEIGHT), (Free, WEIGHT), (Kernel, 2 * ROWS)]
    events = [(type(e), getattr(e, "nbytes", 0)) for e in work_of(gm.graph, "forward").events]
    assert events == [launch, launch, wait, *layer, launch, wait, *layer, wait, *layer]


@pytest.mark.parametrize("transport", ["all_to_all", "own"])
def test_the_exchange_and_its_sum(transport: str) -> None:
    gm = capture(chain(2, width=SIDE)).backward()
    scheduled(gm, "backward", plan_of(bucket_bytes=0, transport=transport))
    work = work_of(gm.graph, "backward")
    exchanges = [e for e in work.launches if e.kind == "all_to_all"]
    assert [(e.world, e.nbytes, e.lowering, e.group) for e in exchanges] == [(2, WEIGHT, "packed", "g")] * 2
    sums = [k for k in work.kernels if k.ours]
    assert [k.nbytes for k in sums] == [WEIGHT + WEIGHT // 2] * 2


def test_a_kept_weight_is_never_freed() -> None:
    gm = capture(chain(2, width=SIDE, reshard=False)).forward()
    scheduled(gm, "forward", plan_of(bucket_bytes=0))
    freed = [e.bucket for e in work_of(gm.graph, "forward").events if isinstance(e, Free)]
    assert len(freed) == 1  # the first layer's weight has no use in backward, x needs no gradient


def test_a_wait_before_its_launch_is_refused() -> None:
    with pytest.raises(ValueError, match="before its launch"):
        Work("forward", (Wait("ag1"),))


# --- Machines -------------------------------------------------------------------------------------------------------------


def machine(**links: Link) -> Machine:
    return Machine("m", Rates({"float32": 100.0, "bfloat16": 400.0}, 10.0, 0.5), links or {ANY: Link(1.0, 10.0)})


def test_rates() -> None:
    r = machine().rates
    assert r.seconds(1000, 0, "float32") == 10.5
    assert r.seconds(1000, 0, "bfloat16") == 3.0
    assert r.seconds(1000, 200, "float32") == 20.5
    assert r.seconds(1000, 0, "float64") == 10.5  # unknown: the slowest


def test_the_closest_link_is_used() -> None:
    a, b, c = Link(1, 1), Link(2, 1), Link(3, 1)
    m = Machine("m", Rates({"float32": 1.0}, 1.0), {"all_gather/packed/float32": a, "all_gather/packed": b, "all_to_all": c})
    assert m.link("all_gather", "packed", "float32") is a
    assert m.link("all_gather", "packed", "bfloat16") is b
    assert m.link("all_gather", "coalesced", "float32") is a
    assert m.link("all_to_all", "packed", "float32") is c
    with pytest.raises(ValueError, match="no link for reduce_scatter"):
        m.link("reduce_scatter", "packed")


def test_json_round_trip_and_bad_values() -> None:
    assert from_json(machine().to_json()) == machine()
    for text in ("{}", '{"rates": 1, "links": {}}', "[]"):
        with pytest.raises(ValueError, match="not a machine"):
            from_json(text)
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Link(0.0, 0.0)
    with pytest.raises(ValueError, match="no known kind"):
        machine(broadcast=Link(0.0, 1.0))
    with pytest.raises(ValueError, match="must be positive"):
        Rates({}, 1.0)
