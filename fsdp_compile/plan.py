"""`make_plan`: decide buckets, prefetch and what to keep for backward by simulating a model's step on a machine, under a memory budget.

::

    explain with the finest buckets  ──►  replan, simulate: some hundred plans  ──►  the best one, explained  ──►  JSON for option ``plan``

Made once, before training, without ranks: every rank then reads the same plan.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_compile.explain import explain
from fsdp_compile.options import DECIDED, ON_GLOO, as_bytes
from fsdp_compile.passes.machine import Machine
from fsdp_compile.passes.planner import choose, first_of, keeps, order_of_keeping, replanner, spend
from fsdp_compile.passes.simulate import Timeline
from fsdp_compile.report import Report


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
    _check(machine, world_size, memory_budget)
    for name in options:
        if name in (*DECIDED, "plan"):
            raise ValueError(f"{name} is what make_plan decides: leave it out")
    if machine.backend == "gloo":
        options = {**ON_GLOO, **options}
    exchange = options.get("transport", "native") not in ("native", "auto")
    mode = options.get("collective", "coalesced")

    def explained(**more: Any) -> tuple[Report, Timeline]:
        report = explain(model, *inputs, world_size=world_size, **options, **more)
        return report, report.simulate(machine, "none")

    default, default_time = explained()
    budget = default_time.peak_gathered_bytes if memory_budget is None else memory_budget
    if not default.buckets:  # one rank, or nothing that a graph gathers
        return Planned(default.plan, default, default_time, default_time, budget)
    finest, finest_time = explained(bucket_bytes=0, prefetch=0, keep_bytes=0, limit_reduce_scatters=1 << 62)
    if budget < finest_time.peak_gathered_bytes:
        raise ValueError(
            f"memory_budget: no plan keeps gathered weights within {budget} bytes; the least possible is {finest_time.peak_gathered_bytes}"
        )
    candidates = [(default, default_time), explained(bucket_bytes=0, prefetch=0, keep_bytes=0)]
    with contextlib.suppress(ValueError):  # replanned events see a little more alive than there is: there may be nothing within the budget
        order = order_of_keeping(finest.works)
        sets = keeps(order, frozenset(default.plan["keep"]))
        build = replanner(finest.works, mode, exchange)
        best = choose(build, machine, budget, keep=sets)
        if memory_budget is not None:
            best = spend(build, machine, budget, best, first_of(order))
        decided = {"bucket_bytes": best.bucket_bytes, "prefetch": best.prefetch, "plan": {"keep": list(best.keep)}}
        if mode == "coalesced":
            decided["limit_all_gathers"] = best.limit_all_gathers
        candidates.insert(0, explained(**decided))
    fitting = [c for c in candidates if c[1].peak_gathered_bytes <= budget]
    report, predicted = min(fitting, key=lambda c: c[1].step)
    return Planned(report.plan, report, predicted, default_time, budget)


def _check(machine: Any, world_size: Any, memory_budget: Any) -> None:
    if not isinstance(machine, Machine):
        raise TypeError(
            "machine must be a Machine, such as fsdp_compile.devices.device('H100') or fsdp_compile.calibrate.load_machine(2), "
            f"got {machine!r}"
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be a whole number, got {world_size!r}")
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, int)):
        raise TypeError(f"memory_budget must be a whole number of bytes, got {memory_budget!r}" + as_bytes(memory_budget))
