"""The passes' decisions without their graph: what a `Work` would be with other buckets and another prefetch, in milliseconds.

A graph bucketed with size 0 and scheduled with no prefetch and no limits (`BASE`) tells, as events, all that bucketing and scheduling
decide by: where each parameter is first and last used, where each gradient exists. `Base` reads that, and `replan` lays the events out
anew by the rules of `bucket.fill` and `schedule`. The tests hold it against the passes: on chains of layers the events are equal. On
a decoder, whose fused kernels are indivisible here, times differ by up to 3% (0.5% where compute dominates), and a peak is never
below the real one and at most 15% above. Not known here: module labels (``bucket_modules``), reductions that must stay alone, the
copies of packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .bucket import BucketPlan, Item, automatic_size, fill
from .cost import Event, Free, Kernel, Launch, Wait, Work
from .pipeline import Plan
from .schedule import SchedulePlan

BASE = Plan(BucketPlan(0), SchedulePlan(0, None, 1 << 62))


@dataclass(frozen=True)
class _Part:
    """One parameter's collective. ``place``: index of the kernel before which it is needed (gather) or can start (reduction);
    ``needed``: index of the kernel that reads a reduction's result (the end, mostly); ``frees``: (kernel that they follow, event)."""

    launch: Launch
    before: tuple[Kernel, ...]
    after: tuple[Kernel, ...]
    place: int
    needed: int
    frees: tuple[tuple[int, Free], ...]


@dataclass(frozen=True)
class Base:
    """A `Work` made with the plan `BASE`, taken apart."""

    direction: str
    kernels: tuple[Kernel, ...]
    gathers: tuple[_Part, ...]
    reduces: tuple[_Part, ...]
    kept: tuple[tuple[int, Free], ...] = ()  # of what an earlier graph has gathered


def base_of(work: Work) -> Base:
    """Take a `Work` apart. Our own kernels (casts, copies) belong to the launch that follows them, else to the wait before."""
    kernels: list[Kernel] = []
    found: dict[str, dict[str, list]] = {}
    launches: dict[str, tuple[Launch, int]] = {}
    waits: dict[str, int] = {}
    kept: list[tuple[int, Free]] = []
    ours: list[Kernel] = []
    last_wait = ""
    for e in work.events:
        if isinstance(e, Kernel) and e.ours:
            ours.append(e)
            continue
        if isinstance(e, Launch):
            launches[e.bucket] = e, len(kernels)
            found[e.bucket] = {"before": ours, "after": [], "frees": []}
        elif ours:
            (found[last_wait]["after"] if last_wait else kernels).extend(ours)
        ours = []
        if isinstance(e, Kernel):
            kernels.append(e)
        elif isinstance(e, Wait):
            waits.setdefault(e.bucket, len(kernels))
            last_wait = e.bucket
        elif isinstance(e, Free) and e.bucket not in found:
            kept.append((max(len(kernels) - 1, 0), e))
        elif isinstance(e, Free):
            found[e.bucket]["frees"].append((max(len(kernels) - 1, 0), e))
    if ours:
        (found[last_wait]["after"] if last_wait else kernels).extend(ours)
    gathers: list[_Part] = []
    reduces: list[_Part] = []
    for name, (launch, place) in launches.items():
        f = found[name]
        gather = launch.kind == "all_gather"
        part = _Part(launch, tuple(f["before"]), tuple(f["after"]), waits[name] if gather else place, waits[name], tuple(f["frees"]))
        (gathers if gather else reduces).append(part)
    return Base(work.direction, tuple(kernels), tuple(gathers), tuple(reduces), tuple(kept))


def keepable(bases: Sequence[Base]) -> list[tuple[str, int]]:
    """FQN and gathered bytes of what `keep.kept` would keep, in its order: what the last forward graph uses last, if the first
    backward graph gathers it again."""
    forward = [b for b in bases if b.direction == "forward"]
    backward = [b for b in bases if b.direction == "backward"]
    if not forward or not backward:
        return []
    again = {fqn for p in backward[0].gathers for fqn in p.launch.params}
    mine = [p for p in forward[-1].gathers if again.issuperset(p.launch.params)]
    found = [(max((i for i, _ in p.frees), default=-1), p.place, p.launch) for p in mine]
    found.sort(key=lambda f: f[:2], reverse=True)
    return [(fqn, launch.nbytes) for _, _, launch in found for fqn in launch.params]


def replan(
    base: Base,
    bucket_bytes: int | None,
    prefetch: int,
    limit_gathers: int | None = None,
    mode: str = "coalesced",
    exchange: bool = False,
    keep: frozenset[str] = frozenset(),
) -> Work:
    """The events under another plan; the arguments are those of `BucketPlan` and `SchedulePlan`. ``mode``: how gathers are merged, and
    reductions unless ``exchange`` builds them on all-to-all (always one buffer). ``keep``: weights that forward does not free and backward
    does not gather. Raises ValueError if the limit cannot be kept."""
    parts, kept = [], list(base.kept)
    for p in base.gathers:
        if not keep.issuperset(p.launch.params):
            parts.append(p)
        elif base.direction == "forward":
            parts.append(replace(p, frees=()))
        else:
            kept += [(i, replace(f, bucket=f"kept {p.launch.params[0]}")) for i, f in p.frees]
    gathers = [_merged(g, f"ag{i}", mode) for i, g in enumerate(_buckets(parts, bucket_bytes, limit_gathers, False), 1)]
    reduce_mode = "packed" if exchange else mode
    reduces = [_merged(g, f"rs{i}", reduce_mode) for i, g in enumerate(_buckets(base.reduces, bucket_bytes, None, True), 1)]
    gathers.sort(key=lambda g: g.place)
    reduces.sort(key=lambda r: r.place)
    events = _place(base.kernels, gathers, reduces, kept, prefetch, limit_gathers)
    if limit_gathers is not None and (peak := _peak(events)) > limit_gathers:
        raise ValueError(f"a limit of {limit_gathers} gathered bytes cannot be kept with these buckets: {peak} are needed at once")
    return Work(base.direction, tuple(events))


def _buckets(parts: Sequence[_Part], bucket_bytes: int | None, limit: int | None, from_end: bool) -> list[list[_Part]]:
    items = [Item((p.launch.group, p.launch.dtype, p.launch.kind, p.launch.world), p.launch.nbytes) for p in parts]
    cap = automatic_size(sum(i.nbytes for i in items)) if bucket_bytes is None else bucket_bytes
    return [[parts[i] for i in g] for g in fill(items, cap, bucket_bytes is None, limit, from_end)]


def _merged(parts: Sequence[_Part], name: str, mode: str) -> _Part:
    """One bucket of several. The copies that packing costs are left out, but its buffer dies as a whole."""
    launch = replace(
        parts[0].launch,
        bucket=name,
        nbytes=sum(p.launch.nbytes for p in parts),
        lowering="packed",
        params=tuple(fqn for p in parts for fqn in p.launch.params),
    )
    gather = launch.kind == "all_gather"
    frees = tuple((i, replace(f, bucket=name)) for p in parts for i, f in p.frees)
    if len(parts) > 1:
        launch = replace(launch, lowering=mode)
        if mode == "packed" and frees:
            frees = ((max(i for i, _ in frees), Free(name, launch.nbytes)),) if len(frees) == len(parts) else ()
    pick = min if gather else max
    return _Part(
        launch,
        tuple(k for p in parts for k in p.before),
        tuple(k for p in parts for k in p.after),
        pick(p.place for p in parts),
        min(p.needed for p in parts),
        frees,
    )


def _place(
    kernels: Sequence[Kernel],
    gathers: Sequence[_Part],
    reduces: Sequence[_Part],
    kept: Sequence[tuple[int, Free]],
    prefetch: int,
    limit: int | None,
) -> list[Event]:
    """`schedule._place`, on events."""
    events: list[Event] = []
    end = len(kernels)
    arriving: dict[int, list[_Part]] = {}
    freed: dict[int, list[Free]] = {}
    dropped: dict[int, list[Free]] = {}  # what came in gathered: a schedule does not count it
    for at, f in kept:
        dropped.setdefault(at, []).append(f)
    for g in gathers:
        arriving.setdefault(g.place, []).append(g)
        for i, f in g.frees:
            freed.setdefault(i, []).append(f)
    limit_reduces = 2 * max((r.launch.nbytes for r in reduces), default=0)
    next_gather = next_reduce = alive = in_flight = 0
    entering = beside = sum(f.nbytes for _, f in kept)
    carried = max(entering, sum(g.launch.nbytes - sum(f.nbytes for _, f in g.frees) for g in gathers))
    flying: list[_Part] = []

    def land(group: list[_Part]) -> None:
        nonlocal in_flight
        for r in group:
            events.extend((Wait(r.launch.bucket), *r.after))
            flying.remove(r)
            in_flight -= r.launch.nbytes

    for i in range(end + 1):
        while next_gather < len(gathers):
            g = gathers[next_gather]
            ahead = next_gather - prefetch
            due = ahead < 0 or gathers[ahead].place <= i
            began = gathers[0].place < i or entering > 0
            due = due or (prefetch > 0 and began and alive + beside + g.launch.nbytes <= carried)
            fits = limit is None or alive + g.launch.nbytes <= limit
            if g.place > i and not (due and fits):
                break
            events.extend((*g.before, g.launch))
            alive += g.launch.nbytes
            next_gather += 1
        while next_reduce < len(reduces) and reduces[next_reduce].place <= i:
            r = reduces[next_reduce]
            while flying and in_flight + r.launch.nbytes > limit_reduces:
                land([flying[0]])
            events.extend((*r.before, r.launch))
            flying.append(r)
            in_flight += r.launch.nbytes
            beside += r.launch.nbytes // r.launch.world
            next_reduce += 1
        land([r for r in flying if r.needed <= i < end])
        for g in arriving.get(i, ()):
            events.extend((Wait(g.launch.bucket), *g.after))
        if i < end:
            events += [kernels[i], *dropped.get(i, ())]
            beside -= sum(f.nbytes for f in dropped.get(i, ()))
            for f in freed.get(i, ()):
                events.append(f)
                alive -= f.nbytes
    land(list(flying))
    return events


def _peak(events: Sequence[Event]) -> int:
    alive = peak = 0
    mine: set[str] = set()
    for e in events:
        if isinstance(e, Launch) and e.kind == "all_gather":
            mine.add(e.bucket)
            alive += e.nbytes
            peak = max(peak, alive)
        elif isinstance(e, Free) and e.bucket in mine:
            alive -= e.nbytes
    return peak
