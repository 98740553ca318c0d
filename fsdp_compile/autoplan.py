"""Option ``plan="auto"``: buckets, prefetch and what to keep for backward, decided for each frame by simulating its step.

::

    joint graph ──► partition, or a trial of one with nothing kept, if a budget says how much may be
                      │ copies
                      ▼
                    finest buckets ──► works ──► choose (simulate some hundred plans) ──► Decision ──► the real passes
                                                   Machine (lead.py)

On rank 0; the others hear of it (`lead`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from fsdp_compile.options import Options
from fsdp_compile.passes.cost import Work, work_of
from fsdp_compile.passes.machine import Machine
from fsdp_compile.passes.pipeline import Decision, Plan, run_passes
from fsdp_compile.passes.planner import choose, keeps, replanner
from fsdp_compile.passes.replan import BASE
from fsdp_compile.passes.simulate import simulate


@dataclass(frozen=True)
class Automatic:
    """What to decide by: ``memory_budget`` is most bytes of gathered weights alive at once (None: what the default options take),
    beside ``held`` bytes of them that are there already."""

    machine: Machine
    memory_budget: int | None = None
    held: int = 0

    def __post_init__(self) -> None:
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(f"memory_budget must be positive, got {self.memory_budget}")


def decide(
    graphs: Sequence[tuple[str, fx.Graph]],
    plan: Plan,
    automatic: Automatic,
    escaping: frozenset[str],
    usual: frozenset[str] | None = None,
) -> Decision:
    """The fastest plan for these graphs, (direction, graph) each, forward first, or the default one if none is clearly faster; they are
    rewritten on the way. ``plan``: transport and lowering. ``usual``: which weights stay gathered from forward to backward by default, if
    that is to be decided, too (None: what these graphs carry, they carry). Raises ValueError, with the least possible, if no plan keeps
    within the budget."""
    standard = (Options.bucket_bytes, Options.prefetch, usual or frozenset())
    base = replace(BASE, transport=plan.transport, bucket=replace(plan.bucket, bucket_bytes=0, limit=None))
    works: list[Work] = []
    for direction, graph in graphs:
        seen: list[Work] = []
        look = lambda stage, g: seen.append(work_of(g, direction)) if stage == "verify" else None  # noqa: B023, E731
        run_passes(graph, direction, base, escaping, look)
        works += seen
    build = replanner(works, plan.bucket.mode, plan.transport != "native")
    budget, least = automatic.memory_budget, simulate(works, automatic.machine).peak_gathered_bytes
    if budget is None:
        default = build(standard[0], standard[1], None, standard[2])
        budget = max(least, simulate(default, automatic.machine).peak_gathered_bytes)
    if least > budget:
        beside = f", beside {automatic.held} that no_sync(keep_bytes=...) holds" if automatic.held else ""
        raise ValueError(
            f"option memory_budget: no plan keeps gathered weights within {budget} bytes here{beside}; the least possible is {least}"
        )
    sets = [frozenset[str]()] if usual is None else keeps(works, usual)
    try:
        best = choose(build, automatic.machine, budget, keep=sets, usual=standard, limited=automatic.memory_budget is not None)
    except ValueError:  # replanned events see a little more alive than there is: the finest plan fits all the same
        best = {"bucket_bytes": 0, "prefetch": 0, "keep": (), "peak_gathered_bytes": least}
    limit = automatic.memory_budget  # no other bound: what is decided here may also hold for a graph that needs more
    return Decision(best["bucket_bytes"], best["prefetch"], frozenset(best["keep"]), limit, budget - best["peak_gathered_bytes"])
