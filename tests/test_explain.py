"""explain: what it reports, for which models, and that it leaves everything as it was."""

# ruff: noqa: E501

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fsdp_compile import Report, explain, fully_shard

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.fixture(scope="module")
def report() -> Report:
    return explain(mlp(), torch.randn(2, 16), world_size=8, lowering="fx", bucket_bytes=2500)


class Broken(nn.Module):
    """Two frames, and everything that a forward may change on its module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h = torch.nn.functional.dropout(self.norm(self.a(x)))
        torch._dynamo.graph_break()
        return self.b(h)


def test_summary_table_and_timeline(report: Report) -> None:
    assert_expected_inline(
        str(report),
        """\
Sequential
  parameters     676, 2.6 KiB; 404 B on each of 8 ranks
  collectives    5 in a step: 3 all_gather, 2 reduce_scatter
  traffic        6.4 KiB sent by each rank in a step
  peak gathered  3.2 KiB

 graph      collective       bucket     bytes   launch   wait   lead   dtype     parameters
 --------------------------------------------------------------------------------------------------------
 forward    all_gather       ag1      2.1 KiB        5     11      0   float32   0.weight, 0.bias
 forward    all_gather       ag2      1.0 KiB        8     20      3   float32   2.weight, 2.bias
 backward   all_gather       ag1      1.0 KiB        4      5      0   float32   2.weight
 backward   reduce_scatter   rs1      1.2 KiB       31     38      1   float32   2.bias, 2.weight, 0.bias
 backward   reduce_scatter   rs2      2.0 KiB       37     41      0   float32   0.weight

forward: 25 operations, peak gathered 3.2 KiB
  ag1 |>>>>>>########           |
  ag2 |   >>>>>>>>>>>>##########|

backward: 38 operations, peak gathered 1.0 KiB
  ag1 |>#######                              |
  rs1 |                           <<<<<<<<   |
  rs2 |                                 <<<<<|

> all_gather in flight   # gathered and in use   < reduction in flight
""",
    )


def test_diff_of_one_pass(report: Report) -> None:
    assert_expected_inline(report.diff("schedule"), """\
# schedule: no operator added or removed
--- forward/bucket
+++ forward/schedule
@@ -3,4 +3,7 @@
     getitem: "f32[512]" = all_gather_into_tensor_coalesced_default[0]  # item ag1
     getitem_1: "f32[32]" = all_gather_into_tensor_coalesced_default[1]  # item ag1
+    all_gather_into_tensor_coalesced_default_1 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([primals_4, primals_5], 8, 'fsdp')  # gather ag2: 2.weight, 2.bias
+    getitem_2: "f32[256]" = all_gather_into_tensor_coalesced_default_1[0]  # item ag2
+    getitem_3: "f32[8]" = all_gather_into_tensor_coalesced_default_1[1]  # item ag2
     wait_tensor_default_4: "f32[512]" = torch.ops._c10d_functional.wait_tensor.default(getitem)  # wait_gather ag1
     wait_tensor_default_5: "f32[32]" = torch.ops._c10d_functional.wait_tensor.default(getitem_1)  # wait_gather ag1
@@ -12,7 +15,4 @@
     free_default = torch.ops.fsdp_compile.free.default(wait_tensor_default_4)  # free ag1
     relu: "f32[2, 32]" = torch.ops.aten.relu.default(addmm)
-    all_gather_into_tensor_coalesced_default_1 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([primals_4, primals_5], 8, 'fsdp')  # gather ag2: 2.weight, 2.bias
-    getitem_2: "f32[256]" = all_gather_into_tensor_coalesced_default_1[0]  # item ag2
-    getitem_3: "f32[8]" = all_gather_into_tensor_coalesced_default_1[1]  # item ag2
     wait_tensor_default_6: "f32[256]" = torch.ops._c10d_functional.wait_tensor.default(getitem_2)  # wait_gather ag2
     wait_tensor_default_7: "f32[8]" = torch.ops._c10d_functional.wait_tensor.default(getitem_3)  # wait_gather ag2
""")


def test_stages_graphs_and_errors(report: Report) -> None:
    names = [s.name for s in report.stages if s.direction == "forward"]
    assert names == ["markers", "insert", "bucket", "schedule", "verify", "lower"]
    assert [s.name for s in report.stages if s.direction == "backward"] == names
    assert {"dynamo", "dedupe", "joint", "tagged"} <= {s.name for s in report.stages if s.direction == "joint"}
    before, after = report.graph("backward", "markers"), report.graph("backward", "insert")
    assert before.count("fsdp_compile.reduce_grad") == 4 and "reduce_scatter" not in before
    assert after.count("_c10d_functional.reduce_scatter_tensor") == 4 and "fsdp_compile.reduce_grad" not in after
    assert "-4 fsdp_compile.reduce_grad" in report.diff("insert", "backward").splitlines()[0]
    with pytest.raises(ValueError, match="markers, insert, bucket"):
        report.diff("shedule")
    with pytest.raises(ValueError, match="first stage"):
        report.diff("markers")
    with pytest.raises(ValueError, match="frame 3 does not exist; there are 1"):
        report.graph("forward", "lower", frame=3)
    with pytest.raises(ValueError, match="no 'sideways' graph"):
        report.graph("sideways", "lower")


def test_costs_by_hand(report: Report) -> None:
    """Gathered twice unless only forward needs it (biases, the first layer); padded to 8 ranks: 4 rows to 8."""
    w0, b0, w2, b2 = 32 * 16 * 4, 32 * 4, 8 * 32 * 4, 8 * 4
    forward = [b for b in report.buckets if b.direction == "forward"]
    backward = [b for b in report.buckets if b.direction == "backward"]
    assert sum(b.bytes for b in forward) == w0 + b0 + w2 + b2
    assert [(b.parameters, b.bytes) for b in backward if b.kind == "all_gather"] == [(("2.weight",), w2)]
    assert sum(b.bytes for b in backward if b.kind == "reduce_scatter") == w0 + b0 + w2 + b2
    assert report.bytes_per_step == (2 * (w0 + b0 + w2 + b2) + w2) * 7 // 8
    assert report.collectives_per_step == len(report.buckets) == 5
    assert report.parameter_bytes == 4 * (32 * 16 + 32 + 4 * 32 + 4)
    assert report.shard_bytes == (w0 + b0 + w2 + b2) // 8  # slots of 64, 4, 32 and 1 elements need no more alignment
    assert report.peak_gathered_bytes == w0 + b0 + w2 + b2  # prefetch 1: both buckets are alive together


def test_prefetch_and_lowering_are_followed() -> None:
    apart = explain(mlp(), torch.randn(2, 16), lowering="fx", bucket_bytes=2500, prefetch=0)
    launch, wait = ([getattr(b, k) for b in apart.buckets if b.direction == "forward"] for k in ("launch", "wait"))
    assert launch[1] > wait[0]
    assert apart.peak_gathered_bytes < 32 * 16 * 4 + 32 * 4 + 8 * 32 * 4 + 8 * 4
    assert "aten.t.default" in apart.graph("joint", "joint")
    inductor = explain(mlp(), torch.randn(2, 16), bucket_bytes=2500)
    assert "aten.t.default" not in inductor.graph("joint", "joint")  # decomposed into permute
    assert inductor.collectives_per_step == apart.collectives_per_step


@pytest.mark.parametrize("lowering", ["fx", "inductor"])
def test_ten_billion_parameters_on_meta(lowering: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(32768, 32768, bias=False) for _ in range(10)])
    start = time.perf_counter()
    got = explain(model, torch.randn(2, 32768), world_size=64, mp_policy=torch.bfloat16, lowering=lowering, prefetch=1)
    assert time.perf_counter() - start < 30
    assert got.parameters == 10 * 2**30
    assert got.shard_bytes == got.parameter_bytes // 64 == 10 * 2**30 * 4 // 64
    assert got.peak_gathered_bytes == 2 * 2**31  # bfloat16, prefetch 1
    # all but the first weight are gathered again in backward; each is reduced
    kinds = [b.kind for b in got.buckets]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == (19, 10)
    assert {b.dtype for b in got.buckets} == {"bfloat16"}
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


def test_model_inputs_and_random_state_are_untouched() -> None:
    model, x = Broken(), torch.randn(4, 8)
    params = dict(model.named_parameters())
    values = {k: v.detach().clone() for k, v in model.state_dict().items()}
    buffers = {k: (v, v._version) for k, v in model.named_buffers()}
    attributes = {k: set(m.__dict__) for k, m in model.named_modules()}
    x0, rng, cls = x.clone(), torch.get_rng_state(), type(model.a)
    explain(model, x, lowering="fx")
    assert all(p is params[k] and p.grad is None for k, p in model.named_parameters())
    assert all(torch.equal(v, values[k]) and v.dtype == values[k].dtype for k, v in model.state_dict().items())
    assert all(b is buffers[k][0] and b._version == buffers[k][1] for k, b in model.named_buffers())
    assert attributes == {k: set(m.__dict__) for k, m in model.named_modules()}
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert model.seen == 0 and type(model.a) is cls and torch.equal(x, x0)
    assert torch.equal(rng, torch.get_rng_state())
    assert not dist.is_initialized()


def test_graph_breaks_give_frames() -> None:
    got = explain(Broken(), torch.randn(4, 8), lowering="fx")
    assert got.calls == (1, 1)
    forward = {b.frame: b.parameters for b in got.buckets if b.direction == "forward"}
    assert forward == {0: ("a.weight", "a.bias", "norm.weight", "norm.bias"), 1: ("b.weight", "b.bias")}
    # the second frame's input needs a gradient, so its weight is gathered again in backward
    assert [b.parameters for b in got.buckets if (b.frame, b.direction, b.kind) == (1, "backward", "all_gather")] == [("b.weight",)]
    assert "frame 1 backward" in str(got)


def test_a_frame_that_runs_twice_counts_twice() -> None:
    class Part(nn.Module):  # not a class of torch's: Dynamo starts no frame there
        def __init__(self) -> None:
            super().__init__()
            self.all = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.all(x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        @torch._dynamo.disable(recursive=False)
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.part(x), self.part(x)

    once, twice = (explain(m, torch.randn(2, 16), lowering="fx") for m in (mlp(), Twice()))
    assert twice.calls == (2,)
    assert twice.collectives_per_step == 2 * once.collectives_per_step
    assert twice.bytes_per_step == 2 * once.bytes_per_step


def test_many_explanations_of_one_model() -> None:
    """Dynamo's cache entries of earlier explanations neither answer for later ones nor use up the recompile limit."""
    model = Broken()
    worlds = [explain(model, torch.randn(4, 8), world_size=w, lowering="fx") for w in range(2, 12)]
    assert [len(r.calls) for r in worlds] == [2] * 10
    assert [r.world_size for r in worlds] == list(range(2, 12))
    assert all(f"group fsdp x {r.world_size} " in r.graph("joint", "joint", frame=1) for r in worlds)


def test_world_of_one_needs_no_collective() -> None:
    got = explain(mlp(), torch.randn(2, 16), world_size=1, lowering="fx")
    assert (got.buckets, got.collectives_per_step, got.bytes_per_step) == ([], 0, 0)
    assert got.shard_bytes == got.parameter_bytes + 0
    assert "_c10d_functional" not in got.graph("backward", "lower")


def test_uneven_rows_on_three_ranks() -> None:
    got = explain(nn.Linear(5, 7, bias=False), torch.randn(2, 5), world_size=3, lowering="fx")
    assert got.shard_bytes == 3 * 5 * 4  # ceil(7 / 3) rows
    assert [b.bytes for b in got.buckets] == [9 * 5 * 4] * 2
    assert "slice" in got.graph("forward", "lower")  # the padding is cut off


def test_tied_weights_are_gathered_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    got = explain(Tied(), torch.zeros(2, 3, dtype=torch.long), lowering="fx")
    assert [(b.direction, b.kind, b.parameters) for b in got.buckets] == [
        ("forward", "all_gather", ("embed.weight",)),
        ("backward", "all_gather", ("embed.weight",)),
        ("backward", "reduce_scatter", ("embed.weight",)),
    ]
    assert got.parameters == 16 * 8


def test_frozen_parameters_are_not_reduced_and_ignored_ones_not_gathered() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    got = explain(model, torch.randn(2, 16), lowering="fx", ignored_params=[model[2].bias])
    of = {kind: {p for b in got.buckets if b.kind == kind for p in b.parameters} for kind in ("all_gather", "reduce_scatter")}
    assert of == {"all_gather": {"0.weight", "0.bias", "2.weight"}, "reduce_scatter": {"2.weight"}}


class Peek(nn.Module):
    """Reads its weight without gradients first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.a.weight.abs().amax()
        return self.a(x) / scale


def test_gradients_of_a_parameter_first_read_without_grad() -> None:
    got = explain(Peek(), torch.randn(2, 8), lowering="fx")
    assert [b.kind for b in got.buckets] == ["all_gather", "reduce_scatter"]


def peek_on_rank() -> None:
    torch.manual_seed(0)
    model, x = Peek(), torch.randn(2, 8)
    model(x).sum().backward()
    want = model.a.weight.grad.clone()
    model.zero_grad()
    compiled = torch.compile(fully_shard(model), backend="fsdp", options={"lowering": "fx"})
    compiled(x).sum().backward()
    torch.testing.assert_close(model.a._parameters["weight"].grad.full_tensor(), want)


def test_gradients_of_a_sharded_parameter_first_read_without_grad(pool) -> None:
    pool.run(2, peek_on_rank)


def test_no_grad_gives_inference_graphs() -> None:
    with torch.no_grad():
        got = explain(mlp(), torch.randn(2, 16), lowering="fx")
    assert [b.kind for b in got.buckets] == ["all_gather"]
    assert {g.direction for g in got.graphs} == {"forward"}


def test_mixed_precision_traces_in_the_compute_dtype() -> None:
    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.a(x + shift.to(self.a.weight.dtype))

    model = Follows()
    weight = model.a.weight
    got = explain(model, torch.randn(2, 8), input_kwargs={"shift": torch.ones(8)}, lowering="fx", mp_policy=torch.bfloat16)
    assert {b.dtype for b in got.buckets} == {"bfloat16"}
    assert 'bf16[2, 8]" = torch.ops.aten.addmm' in got.graph("forward", "lower")
    assert model.a.weight is weight and weight.dtype == torch.float32
    assert not model._forward_pre_hooks


class Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = mlp()

    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def test_options_and_arguments_are_checked() -> None:
    x = torch.randn(2, 16)
    with pytest.raises(ValueError, match="Did you mean 'bucket_bytes'"):
        explain(mlp(), x, bukcet_bytes=1)
    with pytest.raises(ValueError, match="lowering must be"):
        explain(mlp(), x, lowering="c++")
    with pytest.raises(ValueError, match="limit_all_gathers=100 is smaller"):
        explain(mlp(), x, lowering="fx", limit_all_gathers=100)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        explain(mlp(), x, world_size=0)
    with pytest.raises(ValueError, match="no parameters"):
        explain(nn.ReLU(), x)
    with pytest.raises(RuntimeError, match="compiled no graph"):
        explain(Disabled(), x, lowering="fx")


def sharded_on_rank() -> str:
    torch.manual_seed(0)
    model = fully_shard(Broken())
    before = {k: p._local_tensor.clone() for k, p in model.named_parameters()}
    got = explain(model, torch.randn(4, 8), lowering="fx")
    assert got.world_size == 2 and got.calls == (1, 1), (got.world_size, got.calls)
    assert got.shard_bytes * 2 >= got.parameter_bytes
    assert all(torch.equal(p._local_tensor, before[k]) and p.grad is None for k, p in model.named_parameters())
    return figures(got)


def figures(r: Report) -> str:
    rows = [[b.frame, b.direction, b.kind, b.parameters, b.bytes] for b in r.buckets]
    return json.dumps([rows, r.parameters, r.parameter_bytes, r.shard_bytes, r.bytes_per_step, r.peak_gathered_bytes])


def test_sharded_model_is_explained_like_the_plain_one(pool) -> None:
    """A model on gloo reduces by all-to-all; a plain one, which has no process group, is told to."""
    both = pool.run(2, sharded_on_rank)
    plain = explain(Broken(), torch.randn(4, 8), lowering="fx", world_size=2, transport="all_to_all")
    assert both[0] == both[1] == figures(plain)


def test_save_and_json(report: Report, tmp_path: Path) -> None:
    files = report.save(tmp_path / "graphs")
    assert len(files) == 1 + len(report.stages)
    assert (tmp_path / "graphs" / "frame0_forward_3_schedule.txt").read_text() == report.graph("forward", "schedule")
    again = json.loads(json.dumps(report.to_dict()))
    assert again["bytes_per_step"] == report.bytes_per_step
    assert again["buckets"][0]["parameters"] == ["0.weight", "0.bias"]
    assert set(again["pass_seconds"]) == {"insert", "bucket", "schedule", "verify", "lower"}
