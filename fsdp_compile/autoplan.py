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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from fsdp_compile.carried import WHOLE, Share
from fsdp_compile.options import Options
from fsdp_compile.passes.cost import Work, work_of
from fsdp_compile.passes.machine import Machine
from fsdp_compile.passes.pipeline import Decision, Plan, run_passes
from fsdp_compile.passes.planner import NOTHING, choose, first_of, keeps, order_of_keeping, replanner, spend
from fsdp_compile.passes.replan import BASE
from fsdp_compile.passes.simulate import simulate


@dataclass(frozen=True)
class Automatic:
    """What to decide by: ``memory_budget`` is most bytes of gathered weights alive at once (None: what the default options take),
    beside ``held`` bytes of them that are there already. ``share``: of what may be kept for backward, and what earlier graphs keep."""

    machine: Machine
    memory_budget: int | None = None
    held: int = 0
    share: Share = WHOLE

    def __post_init__(self) -> None:
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(f"memory_budget must be positive, got {self.memory_budget}")

    @property
    def beside(self) -> str:
        """What takes of the budget, too, for an error."""
        held = [f"{self.held} that no_sync(keep_bytes=...) holds"] if self.held else []
        kept = [f"{self.share.carried} that earlier graphs of this model keep for backward"] if self.share.carried else []
        return f", beside {' and '.join(held + kept)}" if held or kept else ""

    @property
    def most_kept(self) -> float:
        """Most bytes to keep for backward, so that later graphs find room; infinite where only the budget itself limits it."""
        if self.memory_budget is None or self.share.part == 1:
            return math.inf
        return int(self.share.part * max(0, self.memory_budget - self.share.ahead))


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
    base = replace(BASE, transport=plan.transport, bucket=replace(plan.bucket, bucket_bytes=0, limit=None))
    works: list[Work] = []
    for direction, graph in graphs:
        seen: list[Work] = []
        look = lambda stage, g: seen.append(work_of(g, direction)) if stage == "verify" else None  # noqa: B023, E731
        run_passes(graph, direction, base, escaping, look)
        works += seen
    build = replanner(works, plan.bucket.mode, plan.transport != "native")
    machine, least = automatic.machine, simulate(works, automatic.machine).peak_gathered_bytes
    fixed = simulate(build(Options.bucket_bytes, Options.prefetch, None, usual or NOTHING), machine).peak_gathered_bytes
    limit = automatic.memory_budget  # no other bound: what is decided here may also hold for a graph that needs more
    budget = max(least, fixed) if limit is None else limit
    if least > budget:
        here = f"{budget} bytes here{automatic.beside}"
        raise ValueError(f"option memory_budget: no plan keeps gathered weights within {here}; the least possible is {least}")
    most = automatic.most_kept
    order = [] if usual is None else order_of_keeping(works)
    sets = keeps(order, usual or NOTHING, most)
    standard = (Options.bucket_bytes, Options.prefetch, usual if usual in sets else NOTHING)
    try:
        best = choose(build, machine, budget, keep=sets, usual=standard, limited=limit is not None)
    except ValueError:  # replanned events see a little more alive than there is: the finest plan fits all the same
        return Decision(0, 0, NOTHING, limit, budget - least)
    keep = best.keep if limit is None else spend(build, machine, limit, best, first_of(order, most)).keep
    return Decision(best.bucket_bytes, best.prefetch, frozenset(keep), limit, budget - best.peak_gathered_bytes)
