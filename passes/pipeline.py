"""The passes in their order, each timed, logged and shown to an observer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from fsdp_compile.spec import ParamSpec

from .bucket import BucketPlan, bucket
from .graph_ops import positions
from .insert import insert
from .lower import lower
from .roles import nodes_of
from .schedule import SchedulePlan, gather_peak, schedule
from .verify import Expectation, verify

log = logging.getLogger("fsdp_compile.passes")

# observer(stage, graph): called with "markers" before the first pass, then after each pass.
Observer = Callable[[str, fx.Graph], None]


@dataclass(frozen=True)
class Plan:
    """Everything that the passes decide by; equal plans on equal graphs give equal schedules, on any rank."""

    bucket: BucketPlan = BucketPlan()
    schedule: SchedulePlan = SchedulePlan()


@dataclass(frozen=True)
class Collective:
    """One row of the bucket table."""

    kind: str
    bucket: str
    params: tuple[str, ...]
    nbytes: int
    dtype: str
    group: str
    launch: int
    wait: int
    lead: int

    def signature(self) -> str:
        """What all ranks must agree on, without positions: those depend on the graph around, the order does not."""
        return f"{self.kind} {self.dtype} {self.nbytes} bytes group {self.group}: {', '.join(self.params)}"


@dataclass(frozen=True)
class Scheduled:
    """Result of `run_passes`: the collectives in launch order, what was gathered and reduced, and the predicted peak."""

    direction: str
    collectives: tuple[Collective, ...]
    gathered: tuple[ParamSpec, ...]
    reduced: tuple[ParamSpec, ...]
    peak_gathered_bytes: int


def run_passes(
    graph: fx.Graph,
    direction: str,
    plan: Plan,
    escaping: frozenset[str] = frozenset(),
    observer: Observer | None = None,
) -> Scheduled:
    """insert → bucket → schedule → verify → lower on one forward, backward or inference graph, in place.

    Raises ValueError for a plan that cannot be kept and `ScheduleError` for a schedule that must not run."""
    show = observer or (lambda stage, g: None)
    show("markers", graph)
    inserted = _timed("insert", graph, show, lambda: insert(graph, direction))
    _timed("bucket", graph, show, lambda: bucket(graph, plan.bucket))
    _timed("schedule", graph, show, lambda: schedule(graph, plan.schedule))
    expect = Expectation(tuple(s.fqn for s in inserted.reduced), escaping, plan.schedule.limit_gathers)
    _timed("verify", graph, show, lambda: verify(graph, expect))
    table, peak = collective_table(graph), gather_peak(graph)
    _timed("lower", graph, show, lambda: lower(graph))
    return Scheduled(direction, table, inserted.gathered, inserted.reduced, peak)


def _timed(name: str, graph: fx.Graph, show: Observer, run: Callable[[], object]) -> object:
    before, start = len(graph.nodes), time.perf_counter()
    result = run()
    log.info("%-9s %7.1f ms  %+d nodes (%d)", name, 1e3 * (time.perf_counter() - start), len(graph.nodes) - before, len(graph.nodes))
    show(name, graph)
    return result


def collective_table(graph: fx.Graph) -> tuple[Collective, ...]:
    """The collectives of a scheduled graph in launch order, with positions in the graph.

    ``lead``: how many of the program's own operations run between launch and first wait: the compute that can hide it."""
    at = positions(graph)
    ours = {n for n, _ in nodes_of(graph, *_ALL)}
    rows = []
    for launch, role in nodes_of(graph, "gather", "reduce"):
        kinds = ("wait_gather",) if role.kind == "gather" else ("wait_reduce",)
        waits = [at[n] for n, r in nodes_of(graph, *kinds) if r.bucket == role.bucket]
        wait = min(waits)
        first = launch.args[0][0] if isinstance(launch.args[0], (list, tuple)) else launch.args[0]
        between = [n for n in graph.nodes if at[launch] < at[n] < wait and n not in ours and n.op == "call_function"]
        rows.append(
            Collective(
                kind="all_gather" if role.kind == "gather" else "reduce_scatter",
                bucket=role.bucket,
                params=role.params,
                nbytes=role.nbytes,
                dtype=str(first.meta["val"].dtype).removeprefix("torch."),
                group=str(launch.args[-1]),
                launch=at[launch],
                wait=wait,
                lead=len(between),
            )
        )
    return tuple(rows)


def op_counts(graph: fx.Graph) -> Counter[str]:
    """How often each operator stands in a graph."""
    return Counter(str(n.target) for n in graph.nodes if n.op == "call_function")


_ALL = ("cast", "gather", "item", "wait_gather", "unpack", "free", "pack", "reduce", "reduce_item", "wait_reduce", "grad")
