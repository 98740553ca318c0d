"""report.cost and report.simulate: from a model to formulas and to a step on a machine."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from fsdp_compile.passes.machine import Link, Machine, Rates
from fsdp_compile.passes.planner import choose, replanner
from torch import Tensor, nn

from fsdp_compile import Report, explain
from fsdp_compile.timeline_view import draw

MACHINE = Machine("toy", Rates({"float32": 1e9}, 1e9, 1e-6), {"any": Link(1e-5, 1e8)})


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))


@functools.cache
def report(world: int = 4, **options: int) -> Report:
    return explain(mlp(), torch.zeros(8, 64), world_size=world, lowering="fx", **options)


def test_costs_in_numbers() -> None:
    cost = report().cost
    # Three products forward and backward of each layer but the first, whose input needs no gradient.
    assert cost.flops == 2 * 8 * 64 * 128 * 5
    assert cost.symbols == ("world",)
    gathered = 4 * 64 * 128 * (2 + 1)  # both weights forward, the second one backward
    assert cost.subs(world=4).wire == (gathered + 4 * 64 * 128 * 2) * 3 // 4
    assert cost.subs(world=4).wire == report().bytes_per_step
    with pytest.raises(ValueError, match="no symbol 'batch'"):
        cost.subs(batch=4)


def test_costs_over_batch_and_sequence() -> None:
    x = torch.zeros(4, 6, 64)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    cost = explain(mlp(), x, world_size=4, lowering="fx").cost
    assert cost.symbols == ("a0_dim0", "a0_dim1", "world")
    for batch, seq in ((4, 6), (16, 10)):
        assert cost.subs(a0_dim0=batch, a0_dim1=seq).flops == 2 * batch * seq * 64 * 128 * 5
    fixed = explain(mlp(), torch.zeros(16, 10, 64), world_size=4, lowering="fx").cost
    assert cost.subs(a0_dim0=16, a0_dim1=10).memory == pytest.approx(fixed.memory, rel=0.01)


def test_a_step_is_forward_backward_and_optimizer() -> None:
    t = report().simulate(MACHINE)
    assert t.forward > 0 and t.backward > t.forward
    assert t.optimizer == pytest.approx(7 * report().shard_bytes / 1e9)
    assert report().simulate(MACHINE, "none").optimizer == 0
    assert t.compute_busy + t.exposed_seconds == pytest.approx(t.step)
    assert t.peak_gathered_bytes == report().peak_gathered_bytes
    assert draw(t).startswith("step ")
    with pytest.raises(ValueError, match="optimizer must be one of"):
        report().simulate(MACHINE, "lion")


def test_no_communication_without_other_ranks() -> None:
    t = report(world=1).simulate(MACHINE)
    assert (t.comm_busy, t.exposed, t.peak_gathered_bytes) == (0, (), 0)


def test_inference_has_no_backward_and_no_optimizer() -> None:
    with torch.no_grad():
        t = explain(mlp(), torch.zeros(8, 64), lowering="fx").simulate(MACHINE)
    assert (t.backward, t.optimizer) == (0, 0) and t.forward > 0


class Twice(nn.Module):
    """One frame, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def part(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.a(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x))


def test_frames_count_as_often_as_they_are_called() -> None:
    got = explain(Twice(), torch.zeros(4, 32), lowering="fx")
    t = got.simulate(MACHINE)
    per_step = sum(got.calls[g.frame] * len(g.work.launches) for g in got.graphs)
    assert sum(s.lane != "compute" for s in t.spans) == per_step == got.collectives_per_step


def test_a_limit_is_blamed() -> None:
    got = report(limit_all_gathers=4 * 64 * 128, bucket_bytes=0)
    slow = replace(MACHINE, links={"any": Link(1.0, 1e8)})
    assert "limit" in got.simulate(slow).exposed_by_reason


def test_a_plan_for_a_model() -> None:
    base = report(bucket_bytes=0, prefetch=0, limit_reduce_scatters=1 << 62)
    found = choose(replanner(g.work for g in base.graphs), MACHINE, memory_budget=4 * 64 * 128 * 2)
    options = {k: getattr(found, k) for k in ("bucket_bytes", "prefetch", "limit_all_gathers")}
    real = explain(mlp(), torch.zeros(8, 64), world_size=4, lowering="fx", **options)
    assert real.peak_gathered_bytes == found.peak_gathered_bytes
    assert real.simulate(MACHINE, "none").step == pytest.approx(found.seconds)
