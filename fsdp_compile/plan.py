"""`make_plan`: decide buckets, prefetch and what to keep for backward by simulating a model's step on a machine, under a memory budget.

::

    explain with the finest buckets  ──►  replan, simulate: some hundred plans  ──►  the best one, explained  ──►  JSON for option ``plan``

Made once, before training, without ranks: every rank then reads the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_compile.explain import explain
from fsdp_compile.passes.machine import Machine
from fsdp_compile.passes.planner import choose, keeps, replanner
from fsdp_compile.passes.simulate import Timeline
from fsdp_compile.report import Report

DECIDED = ("bucket_bytes", "min_num_params", "bucket_modules", "prefetch", "limit_all_gathers", "limit_reduce_scatters", "keep_bytes")


@dataclass(frozen=True)
class Planned:
    """A plan (for option ``plan``), what it makes of the model, its predicted step, and that of the default options."""

    plan: dict[str, Any]
    report: Report
    predicted: Timeline
    default: Timeline
    memory_budget: int

    def __post_init__(self) -> None:
        if self.predicted.peak_gathered_bytes > self.memory_budget:
            raise ValueError(f"the plan takes {self.predicted.peak_gathered_bytes} gathered bytes, more than {self.memory_budget}")


def make_plan(
    model: nn.Module, *inputs: Any, machine: Machine, world_size: int = 8, memory_budget: int | None = None, **options: Any
) -> Planned:
    """The fastest plan for ``model(*inputs)`` on ``world_size`` ranks of ``machine``, as predicted by `simulate`.

    ``memory_budget``: most bytes of gathered weights on a rank at once, those kept for backward included (None: what the default options
    take). ``options``: those of the backend that are not decided here. The plan holds for these parameters, whatever the batch; it was
    chosen by these inputs' sizes. Raises ValueError, with the least possible, if nothing fits the budget, and for an option that the plan
    decides."""
    for name in options:
        if name in (*DECIDED, "plan"):
            raise ValueError(f"{name} is what make_plan decides: leave it out")
    if machine.backend == "gloo":
        options = {"transport": "own", **options}
    exchange = options.get("transport", "native") not in ("native", "auto")
    default = explain(model, *inputs, world_size=world_size, **options).simulate(machine, "none")
    budget = default.peak_gathered_bytes if memory_budget is None else memory_budget
    finest = explain(model, *inputs, world_size=world_size, **options, bucket_bytes=0, prefetch=0, limit_reduce_scatters=1 << 62)
    works = finest.works
    mode = options.get("collective", "coalesced")
    if budget < finest.peak_gathered_bytes:
        raise ValueError(f"no plan keeps gathered weights within {budget} bytes; the least possible is {finest.peak_gathered_bytes}")
    try:
        best = choose(replanner(works, mode, exchange), machine, budget, keep=keeps(works))
    except ValueError:  # fused kernels are indivisible there, so that it sees a little more alive than there is
        best = {"bucket_bytes": 0, "prefetch": 0, "limit_all_gathers": budget, "keep": ()}
    limit = best["limit_all_gathers"] if mode == "coalesced" else None
    decided = {"bucket_bytes": best["bucket_bytes"], "prefetch": best["prefetch"], "limit_all_gathers": limit}
    report = explain(model, *inputs, world_size=world_size, **options, **decided, plan={"keep": list(best["keep"])})
    return Planned(report.plan, report, report.simulate(machine, "none"), default, budget)
