"""schedule: choose where each launch, wait and free stands, so that communication hides behind compute under a memory limit.

The compute order is taken as it is. Our nodes are placed into it::

    prefetch 1        launch 0 · launch 1 · wait 0 · compute 0 · free 0 · launch 2 · wait 1 · compute 1 · free 1 · …
    reductions        … grads of bucket 0 · reduce 0 · compute · reduce 1 · compute · wait 0 · reduce 2 · … · wait 1 · wait 2

A gather is launched before the wait of the bucket ``prefetch`` places ahead of it, so that the communication lane does not run dry;
later if the limit on gathered bytes says so. Earlier where that costs no memory, because weights are carried from forward to backward
(`keep`) and the room that they take at the boundary is still, or again, free::

    forward     | gathered, kept or not ·······▁▂▃▄▅▆▇█ |      carried: bytes that are kept at the end
    backward    | █▇▆▅▄▃▂▁ kept ··· shards of gradients |      gathers run ahead while all three together are below it

A reduction is launched as soon as its gradients exist, and waited for when more than ``limit_reduces`` bytes are in flight, or at the
end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from .graph_ops import alias_closure, output_of, positions, set_order, world_of
from .keep import deaths
from .roles import GATHER_KINDS, REDUCE_KINDS, Role, role_of


@dataclass(frozen=True)
class SchedulePlan:
    """``prefetch``: how many buckets ahead a gather is launched (0: just before its use), or further where that costs no memory; a tuple
    has a number for each bucket, and its last one for all others. ``limit_gathers``: most bytes of gathered
    buffers alive at once, in flight or in use (None: no limit). ``limit_reduces``: most bytes of reductions in flight (None: two
    largest buckets)."""

    prefetch: int | tuple[int, ...] = 2
    limit_gathers: int | None = None
    limit_reduces: int | None = None

    def __post_init__(self) -> None:
        if not self._distances or min(self._distances) < 0:
            raise ValueError(f"prefetch must not be negative, got {self.prefetch}")
        for name, v in (("limit_all_gathers", self.limit_gathers), ("limit_reduce_scatters", self.limit_reduces)):
            if v is not None and v <= 0:
                raise ValueError(f"{name} must be positive, got {v}")

    @property
    def _distances(self) -> tuple[int, ...]:
        return self.prefetch if isinstance(self.prefetch, tuple) else (self.prefetch,)

    def distance(self, i: int) -> int:
        """How many buckets ahead the ``i``-th gather is launched."""
        return self._distances[min(i, len(self._distances) - 1)]


@dataclass
class _Gather:
    name: str
    nbytes: int
    launch: list[fx.Node]  # casts, then the launch itself and its items
    arrive: list[fx.Node]  # waits and the views and copies that make parameters of it
    frees: dict[int, list[fx.Node]]  # compute position → frees that follow it
    first: int  # compute position of the first real use
    ready: int = 0  # compute position before which its shards do not exist (0: they are inputs)

    @property
    def stays(self) -> int:
        """Bytes that the graph does not free."""
        return self.nbytes - sum(_nbytes(f) for frees in self.frees.values() for f in frees)


@dataclass
class _Reduce:
    nbytes: int
    shard: int  # bytes of its result on one rank
    launch: list[fx.Node]
    arrive: list[fx.Node]
    ready: int  # compute position before which not all of its gradients exist
    needed: int  # compute position that reads its result (the end, normally)


def schedule(graph: fx.Graph, plan: SchedulePlan) -> None:
    """Reorder ``graph`` in place. Raises ValueError, with the least possible limit, if ``plan.limit_gathers`` cannot be kept, and
    if a dependency makes the order impossible (a bug in a pass)."""
    work = _Work(graph)
    order = _place(work, plan)
    limit = plan.limit_gathers
    if limit is not None and _peak(order) > limit:
        least = _peak(_place(work, SchedulePlan(0, None, plan.limit_reduces)))
        if least > limit:
            raise ValueError(
                f"limit_all_gathers={limit} is too small for this graph: with these buckets its operations need {least} gathered "
                f"bytes at once; raise it to at least {least}, or make the buckets smaller (bucket_bytes)"
                + (", or keep fewer weights for backward (keep_bytes)" if any(not g.frees for g in work.gathers) else "")
            )
    set_order(graph, order)


class _Work:
    """What there is to place: the program's operations in their order, and our nodes by bucket."""

    def __init__(self, graph: fx.Graph) -> None:
        at = positions(graph)
        owned = _owned(graph)
        self.out = output_of(graph)
        self.compute = [n for n in graph.nodes if n not in owned and n is not self.out]
        self.place = {n: i for i, n in enumerate(self.compute)}
        self.place[self.out] = len(self.compute)
        self.entry = max((i + 1 for n, i in self.place.items() if n.op == "placeholder"), default=0)
        self.gathers = _collect_gathers(owned, self.place, at)
        self.reduces = sorted(_collect_reduces(graph, self.place), key=lambda r: (r.ready, at[r.launch[-1]]))
        self.attached = _attached_views(owned, self.place)
        self.arriving: dict[int, list[fx.Node]] = {}
        self.freed: dict[int, list[fx.Node]] = {}
        for g in self.gathers:
            self.arriving.setdefault(g.first, []).extend(g.arrive)
            for i, frees in g.frees.items():
                self.freed.setdefault(i, []).extend(frees)
        self.dropped: dict[int, int] = {}  # compute position → bytes of kept weights that die after it
        for kept, n in deaths(graph, lambda u: self.place.get(u, 0)).items():
            self.dropped[n] = self.dropped.get(n, 0) + kept.nbytes
        self.carried = max(sum(self.dropped.values()), sum(g.stays for g in self.gathers))


def _place(work: _Work, plan: SchedulePlan) -> list[fx.Node]:
    """The whole order, under ``plan``. A limit delays launches, never beyond their first use."""
    order: list[fx.Node] = []
    gathers, compute, end = work.gathers, work.compute, len(work.compute)
    next_gather = next_reduce = alive = in_flight = 0
    beside = sum(work.dropped.values())  # bytes of kept weights and shards of gradients
    flying: list[_Reduce] = []
    limit_reduces = plan.limit_reduces or 2 * max((r.nbytes for r in work.reduces), default=0)

    def land(group: list[_Reduce]) -> None:
        nonlocal in_flight
        for r in group:
            order.extend(r.arrive)
            flying.remove(r)
            in_flight -= r.nbytes

    for i in range(end + 1):
        if i >= work.entry:
            while next_gather < len(gathers):  # launches whose time has come
                g = gathers[next_gather]
                distance = plan.distance(next_gather)
                ahead = next_gather - distance
                due = ahead < 0 or gathers[ahead].first <= i  # the first ones at the graph's entry, whatever runs before their use
                began = gathers[0].first < i or bool(work.dropped)  # at the entry only those
                due = due or (distance > 0 and began and alive + beside + g.nbytes <= work.carried)
                fits = plan.limit_gathers is None or alive + g.nbytes <= plan.limit_gathers
                if g.first > i and not (due and fits and g.ready <= i):
                    break
                order.extend(g.launch)
                alive += g.nbytes
                next_gather += 1
            while next_reduce < len(work.reduces) and work.reduces[next_reduce].ready <= i:
                r = work.reduces[next_reduce]
                while flying and in_flight + r.nbytes > limit_reduces:
                    land([flying[0]])
                order.extend(r.launch)
                flying.append(r)
                in_flight += r.nbytes
                beside += r.shard
                next_reduce += 1
            land([r for r in flying if r.needed <= i < end])
        order.extend(work.arriving.get(i, ()))
        node = compute[i] if i < end else work.out
        order.extend(work.attached.get(node, ()))
        if node is work.out:
            break
        order.append(node)
        for f in work.freed.get(i, ()):
            order.append(f)
            alive -= _nbytes(f)
        beside -= work.dropped.get(i, 0)
    land(list(flying))
    order.extend(work.freed.get(end, ()))
    order.append(work.out)
    return order


def _nbytes(node: fx.Node) -> int:
    role = role_of(node)
    return role.nbytes if role else 0


def _owned(graph: fx.Graph) -> dict[fx.Node, None]:
    """Our nodes, and the program's own views of gathered buffers, which move with their first use."""
    owned = {n: None for n in graph.nodes if role_of(n) is not None}
    roots = [n for n in owned if role_of(n).kind == "wait_gather"]  # type: ignore[union-attr]
    owned.update((n, None) for n in alias_closure(roots))
    return owned


def _attached_views(owned: dict[fx.Node, None], place: dict[fx.Node, int]) -> dict[fx.Node, list[fx.Node]]:
    """Node → the program's own views of parameters to put right before it, because it is the first to use them."""
    views = [n for n in owned if role_of(n) is None]
    first: dict[fx.Node, int] = {}
    for v in reversed(_in_dependency_order(views)):
        uses = [place[u] if u in place else first.get(u, len(place) - 1) for u in v.users]
        first[v] = min(uses, default=len(place) - 1)
    by_place = {i: n for n, i in place.items()}
    out: dict[fx.Node, list[fx.Node]] = {}
    for v in _in_dependency_order(views):
        out.setdefault(by_place[first[v]], []).append(v)
    return out


def _in_dependency_order(nodes: list[fx.Node]) -> list[fx.Node]:
    mine, done, order = set(nodes), set(), []

    def visit(n: fx.Node) -> None:
        if n in mine and n not in done:
            done.add(n)
            for a in n.all_input_nodes:
                visit(a)
            order.append(n)

    for n in nodes:
        visit(n)
    return order


def _collect_gathers(owned: dict[fx.Node, None], place: dict[fx.Node, int], at: dict[fx.Node, int]) -> list[_Gather]:
    found: dict[str, _Gather] = {}
    frees: dict[str, list[fx.Node]] = {}
    roles: list[tuple[fx.Node, Role]] = [(n, r) for n in owned if (r := role_of(n)) is not None]
    end = len(place) - 1
    for n, r in sorted(roles, key=lambda x: at[x[0]]):
        if r.kind not in GATHER_KINDS:
            continue
        g = found.setdefault(r.bucket, _Gather(r.bucket, 0, [], [], {}, end))
        if r.kind in ("cast", "gather", "item"):
            g.launch.append(n)
            g.nbytes += r.nbytes
            g.ready = max([g.ready, *(place[a] + 1 for a in n.all_input_nodes if a in place)])
        elif r.kind == "free":
            frees.setdefault(r.bucket, []).append(n)
        else:
            g.arrive.append(n)
    for name, g in found.items():
        reads = [place[u] for n in alias_closure([*g.launch, *g.arrive]) for u in n.users if u in place]
        g.first = min(reads, default=end)
        for n in frees.get(name, ()):
            uses = [place[u] for a in alias_closure(n.all_input_nodes) for u in a.users if u in place]
            g.frees.setdefault(max(uses, default=g.first), []).append(n)
    return sorted(found.values(), key=lambda g: (g.first, at[(g.launch or g.arrive)[0]]))


def _collect_reduces(graph: fx.Graph, place: dict[fx.Node, int]) -> list[_Reduce]:
    found: dict[str, _Reduce] = {}
    end = len(place) - 1
    for n in graph.nodes:
        r = role_of(n)
        if r is None or r.kind not in REDUCE_KINDS:
            continue
        g = found.setdefault(r.bucket, _Reduce(0, 0, [], [], 0, end))
        if r.kind in ("pack", "reduce", "reduce_item"):
            g.launch.append(n)
            g.nbytes += r.nbytes
            g.shard += r.nbytes // world_of(n) if r.nbytes else 0
            g.ready = max([g.ready, *(place[a] + 1 for a in n.all_input_nodes if a in place)])
        else:
            g.arrive.append(n)
        if r.kind in ("wait_reduce", "grad", "pack"):
            g.needed = min([g.needed, *(place[u] for u in n.users if u in place)])
    return list(found.values())


def gather_peak(graph: fx.Graph) -> int:
    """Most bytes of gathered buffers alive at once, by the graph's own order of launches and frees."""
    return _peak(graph.nodes)


def _peak(order: Iterable[fx.Node]) -> int:
    alive = peak = 0
    for n in order:
        r = role_of(n)
        if r is not None and r.kind == "gather":
            alive += r.nbytes
            peak = max(peak, alive)
        elif r is not None and r.kind == "free":
            alive -= r.nbytes
    return peak
