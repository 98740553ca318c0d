"""The passes in their order, each timed, logged and shown to an observer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import fx

from fsdp_compile.spec import Entry, ParamSpec

from .arrive import arrive, holds
from .bucket import BucketPlan, bucket
from .exchange import ALL_TO_ALLS, TRANSPORTS, exchange
from .graph_ops import positions, sources
from .insert import insert
from .lift import lift
from .lower import lower
from .roles import nodes_of, role_of
from .rows import exchanged
from .schedule import SchedulePlan, gather_peak, schedule
from .verify import Expectation, verify

log = logging.getLogger("fsdp_compile.passes")

_T = TypeVar("_T")

# observer(stage, graph): called with "markers" before the first pass, then after each pass.
Observer = Callable[[str, fx.Graph], None]


@dataclass(frozen=True)
class Plan:
    """Everything that the passes decide by; equal plans on equal graphs give equal schedules, on any rank.

    ``transport``: what collectives are built on (`exchange`). ``lift``: gathers at a graph's entry may start before it (`lift`)."""

    bucket: BucketPlan = field(default_factory=BucketPlan)
    schedule: SchedulePlan = field(default_factory=SchedulePlan)
    transport: str = "native"
    lift: bool = False

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {TRANSPORTS}, got {self.transport!r}")


@dataclass(frozen=True)
class Decision:
    """What a planner has decided for a step; `applied` to a plan. ``keep``: FQNs of the weights that stay gathered from forward to
    backward. ``limit``: most bytes of gathered weights alive at once. ``left``: bytes of the budget that it does not need."""

    bucket_bytes: int | None
    prefetch: int
    keep: frozenset[str]
    limit: int | None
    left: int

    def applied(self, plan: Plan) -> Plan:
        """``plan`` with what was decided in place of what it says of buckets, prefetch and limits."""
        bucket = replace(plan.bucket, bucket_bytes=self.bucket_bytes, limit=self.limit)
        return replace(plan, bucket=bucket, schedule=replace(plan.schedule, prefetch=self.prefetch, limit_gathers=self.limit))


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
    """Result of `run_passes`: the collectives in launch order, what was gathered and reduced, the predicted peak, and the gathers that
    may start before the graph. ``room``: a memory budget and what the plan leaves of it, if one was given. ``exchanged``: the embeddings
    whose rows it exchanges. ``decision``: what its plan was decided to be, if a planner has decided. ``carried``: FQNs of the weights that
    stay gathered from forward to backward."""

    direction: str
    collectives: tuple[Collective, ...]
    gathered: tuple[ParamSpec, ...]
    reduced: tuple[ParamSpec, ...]
    peak_gathered_bytes: int
    entries: tuple[Entry, ...] = ()
    room: tuple[int, int] | None = None
    exchanged: tuple[ParamSpec, ...] = ()
    decision: Decision | None = None
    carried: frozenset[str] = frozenset()


def run_passes(
    graph: fx.Graph,
    direction: str,
    plan: Plan,
    escaping: frozenset[str] = frozenset(),
    observer: Observer | None = None,
) -> Scheduled:
    """insert → bucket → (exchange) → schedule → verify → (lift) → lower → (arrive) on one forward, backward or inference graph, in place.

    Raises ValueError for a plan that cannot be kept and `ScheduleError` for a schedule that must not run."""
    show = observer or (lambda stage, g: None)
    log.info("%s graph of %d nodes", direction, len(graph.nodes))
    show("markers", graph)
    inserted = _timed("insert", graph, show, lambda: insert(graph, direction))
    _timed("bucket", graph, show, lambda: bucket(graph, plan.bucket))
    if plan.transport != "native":
        _timed("exchange", graph, show, lambda: exchange(graph, plan.transport))
    _timed("schedule", graph, show, lambda: schedule(graph, plan.schedule))
    expect = Expectation(inserted.gathered, inserted.reduced, escaping, plan.schedule.limit_gathers)
    _timed("verify", graph, show, lambda: verify(graph, expect))
    table, peak = collective_table(graph), gather_peak(graph)
    entries = _timed("lift", graph, show, lambda: lift(graph)) if plan.lift else ()
    _timed("lower", graph, show, lambda: lower(graph))
    if direction == "forward" and holds(graph):
        _timed("arrive", graph, show, lambda: arrive(graph))
    return Scheduled(direction, table, inserted.gathered, inserted.reduced, peak, entries, exchanged=exchanged(graph))


def _timed(name: str, graph: fx.Graph, show: Observer, run: Callable[[], _T]) -> _T:
    loud = log.isEnabledFor(logging.INFO)
    before = op_counts(graph) if loud else Counter()
    start = time.perf_counter()
    result = run()
    ms = 1e3 * (time.perf_counter() - start)
    if loud:
        log.info("%-9s %7.1f ms  %4d nodes  %s", name, ms, len(graph.nodes), op_difference(before, op_counts(graph)))
    show(name, graph)
    return result


def collective_table(graph: fx.Graph) -> tuple[Collective, ...]:
    """The collectives of a scheduled graph in launch order, with positions in the graph.

    ``lead``: how many of the program's own operations run between launch and first wait: the compute that can hide it."""
    at = positions(graph)
    first_wait: dict[str, int] = {}
    computed = [0]  # how many of the program's operations stand before each position
    for n in graph.nodes:
        role = role_of(n)
        computed.append(computed[-1] + (role is None and n.op == "call_function"))
        if role is not None and role.kind in ("wait_gather", "wait_reduce"):
            first_wait.setdefault(role.bucket, at[n])
    rows = []
    for launch, role in nodes_of(graph, "gather", "reduce"):
        wait = first_wait[role.bucket]
        rows.append(
            Collective(
                kind="all_gather" if role.kind == "gather" else "all_to_all" if launch.target in ALL_TO_ALLS else "reduce_scatter",
                bucket=role.bucket,
                params=role.params,
                nbytes=role.nbytes,
                dtype=str(sources(launch)[0].meta["val"].dtype).removeprefix("torch."),
                group=str(launch.args[-1]),
                launch=at[launch],
                wait=wait,
                lead=computed[wait] - computed[at[launch]],
            )
        )
    return tuple(rows)


def op_counts(graph: fx.Graph) -> Counter[str]:
    """How often each operator stands in a graph."""
    return Counter(op_name(n) for n in graph.nodes if n.op in ("call_function", "call_method"))


def op_name(node: fx.Node) -> str:
    """A call's short name: ``aten.mm``, ``getitem``."""
    if isinstance(node.target, str):
        return node.target
    if hasattr(node.target, "_schema"):
        return str(node.target).removesuffix(".default")
    return str(getattr(node.target, "__name__", node.target))


def op_difference(before: Counter[str], after: Counter[str]) -> str:
    """Operators added and removed, for example ``"+1 _c10d_functional.wait_tensor, -1 fsdp_compile.unshard"``."""
    changed = {name: after[name] - before[name] for name in sorted({*before, *after}) if after[name] != before[name]}
    return ", ".join(f"{n:+d} {name}" for name, n in sorted(changed.items(), key=lambda x: -x[1])) or "no operator added or removed"
