"""bucket: merge neighbouring collectives of one kind, group, dtype and reduce operation into one.

Two lowerings of a bucket::

    packed      x = cat(s1, s2); g = all_gather(x); copy each parameter out of the ranks' interleaved parts
    coalesced   g1, g2 = all_gather_coalesced([s1, s2])     one launch, each parameter lands contiguous, no copies

The order is the graph's own (execution order), so a bucket's parameters are used one after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .graph_ops import FREE, Replaced, aten, c10d, emit, first_use, output_of, positions, sources
from .roles import KEY, Role, nodes_of, role_of


@dataclass(frozen=True)
class BucketPlan:
    """How to merge.

    ``bucket_bytes``: most bytes of a bucket's gathered buffers (0: no merging; None: `automatic_bytes` of the graph).
    ``label_of``: FQN → label; parameters of different labels never share a bucket (module-based bucketing), and those of one
    label share it whatever their size. ``mode``: "coalesced" or "packed". ``limit``: no gather bucket above this many bytes
    (None: no limit). ``reduce_mode`` and ``reduce_label_of``: of reductions (None: as ``mode``, as ``label_of``).
    """

    bucket_bytes: int | None = None
    label_of: dict[str, str] = field(default_factory=dict)
    mode: str = "coalesced"
    limit: int | None = None
    reduce_mode: str | None = None
    reduce_label_of: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes < 0:
            raise ValueError(f"bucket_bytes must not be negative, got {self.bucket_bytes}")
        for mode in (self.mode, self.reduce_mode or self.mode):
            if mode not in ("coalesced", "packed"):
                raise ValueError(f"collective must be 'coalesced' or 'packed', got {mode!r}")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit_all_gathers must be positive, got {self.limit}")


def automatic_bytes(graph: fx.Graph, kind: str) -> int:
    """`automatic_size` of what the graph's collectives of one kind ("gather" or "reduce") move."""
    return automatic_size(sum(role.nbytes for _, role in nodes_of(graph, kind)))


def automatic_size(total: int) -> int:
    """A sixteenth of ``total`` bytes, between 1 and 25 MiB.

    Large models: 25 MiB, where bandwidth is saturated. Small ones: still many buckets, to overlap at all."""
    return min(max(total // 16, 1 << 20), 25 << 20)


_RAMP = 4  # buckets until the automatic size is reached


@dataclass(frozen=True)
class _Member:
    launch: fx.Node
    wait: fx.Node
    role: Role


def bucket(graph: fx.Graph, plan: BucketPlan) -> int:
    """Merge collectives in place; returns how many buckets are left. Raises ValueError if one parameter exceeds ``plan.limit``."""
    for launch, role in nodes_of(graph, "gather"):
        if plan.limit is not None and role.nbytes > plan.limit:
            raise ValueError(
                f"limit_all_gathers={plan.limit} is smaller than parameter {role.params[0]!r} alone, which takes "
                f"{role.nbytes} bytes when gathered: raise the limit to at least {role.nbytes}"
            )
        assert launch.args
    count = 0
    parts, replaced = _parts(graph), Replaced()
    for kind, prefix, merge in (("gather", "ag", _merge_gathers), ("reduce", "rs", _merge_reduces)):
        for i, group in enumerate(_groups(graph, kind, plan), 1):
            rest = [n for m in group for n in parts[m.role.bucket]]
            merge(graph, group, f"{prefix}{i}", plan.mode if kind == "gather" else plan.reduce_mode or plan.mode, replaced)
            _relabel(rest, f"{prefix}{i}")
            count += 1
    replaced.finish(graph)
    return count


def _parts(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Bucket → the nodes that outlive a merge (casts, views, frees). Taken before the first merge: new names repeat old ones."""
    parts: dict[str, list[fx.Node]] = {}
    for n in graph.nodes:
        if (r := role_of(n)) is not None:
            mine = parts.setdefault(r.bucket, [])
            if r.kind in ("cast", "unpack", "free", "pack", "grad"):
                mine.append(n)
    return parts


def _groups(graph: fx.Graph, kind: str, plan: BucketPlan) -> list[list[_Member]]:
    """Members of each bucket, in order.

    With the automatic size the first gathers and the last reductions are small and grow by doubling: they hide behind nothing, so
    that compute should not wait for more than it needs, nor the step end with a large reduction."""
    cap = automatic_bytes(graph, kind) if plan.bucket_bytes is None else plan.bucket_bytes
    labels = plan.label_of if kind == "gather" or plan.reduce_label_of is None else plan.reduce_label_of
    members: list[_Member] = []
    items: list[Item] = []
    for launch, role in _in_use_order(graph, kind):
        (wait,) = (u for u in launch.users if role_of(u))
        label = labels.get(role.params[0])
        # group, dtype and reduce operation are the launch's other arguments; a mixed bucket cannot be formed.
        key: tuple[Any, ...] = (launch.args[1:], sources(launch)[0].meta["val"].dtype, label, _apart(launch, wait, role, plan.mode))
        members.append(_Member(launch, wait, role))
        items.append(Item(key, role.nbytes, label is not None, not _only_leaves(wait, kind)))
    limit = plan.limit if kind == "gather" else None
    groups = fill(items, cap, plan.bucket_bytes is None, limit, from_end=kind == "reduce")
    return [[members[i] for i in g] for g in groups]


@dataclass(frozen=True)
class Item:
    """One collective to be bucketed: only neighbours of equal ``key`` share a bucket; ``labelled``: whatever its size; ``alone``: never."""

    key: Any
    nbytes: int
    labelled: bool = False
    alone: bool = False


def fill(items: Sequence[Item], cap: int, automatic: bool, limit: int | None, from_end: bool) -> list[list[int]]:
    """Buckets, as indices of ``items``, in their order: at most ``cap`` bytes each, and never more than ``limit``.

    ``automatic``: the first buckets are small and grow by doubling; with ``from_end`` it is the last ones."""
    order = list(range(len(items)))
    backwards = automatic and from_end  # the ramp starts at the end of the step
    if backwards:
        order.reverse()
    groups: list[list[int]] = []
    last_key, size, riders = None, 0, 0
    for i in order:
        item = items[i]
        most = max(cap >> max(0, _RAMP - len(groups)), min(cap, 1 << 20)) if automatic else cap
        # Small ones (biases, norms) ride along even with a full bucket, up to a quarter of it: alone they would cost a collective each.
        within = size + item.nbytes <= most
        rides = item.nbytes * 16 <= cap and riders + item.nbytes <= cap // 4
        fits = item.labelled or within or rides
        if limit is not None:
            fits = fits and size + item.nbytes <= limit
        if item.key == last_key and fits and not item.alone:
            groups[-1].append(i)
            size += item.nbytes
            riders += 0 if within else item.nbytes
        else:
            groups.append([i])
            size, riders = item.nbytes, 0
        last_key = None if item.alone else item.key
    return [g[::-1] for g in reversed(groups)] if backwards else groups


def _apart(launch: fx.Node, wait: fx.Node, role: Role, mode: str) -> Any:
    """What keeps a gather out of its neighbours' bucket: a shard that the graph computes, and, in a packed bucket (one buffer,
    one free), a whole value that leaves the graph and is never freed."""
    paired = _as_real(launch.args[0])  # pairs must stay aligned to two, which a real neighbour in one buffer would upset
    if role.kind != "gather":
        return paired
    if not _from_placeholder(launch.args[0]):
        return launch
    if paired:
        return "complex"
    return mode == "packed" and not any(r.kind == "free" for u in wait.users if (r := role_of(u)) is not None)


def _as_real(x: Any) -> bool:
    """Whether a collective's input is a complex tensor's pairs of real numbers."""
    while role_of(x) is not None:
        if x.target is aten.view_as_real.default:
            return True
        x = x.args[0]
    return False


def _from_placeholder(x: Any) -> bool:
    while role_of(x) is not None:
        x = x.args[0]
    return x.op == "placeholder"


def _in_use_order(graph: fx.Graph, kind: str) -> list[tuple[fx.Node, Role]]:
    """Gathers in the order in which their parameters are first used, reductions in the order in which gradients appear."""
    found = nodes_of(graph, kind)
    if kind == "gather":
        at = positions(graph)
        found.sort(key=lambda x: first_use(x[0], at))
    return found


def _only_leaves(wait: fx.Node, kind: str) -> bool:
    """A reduction whose result the graph itself goes on using (gradients summed in the graph) stays in a bucket of its own."""
    if kind == "gather":
        return True
    out = output_of(wait.graph)
    todo = [wait]
    while todo:
        for u in todo.pop().users:
            if u is not out and role_of(u) is None:
                return False
            if u is not out:
                todo.append(u)
    return True


def _merged_role(group: list[_Member], name: str) -> Role:
    first = group[0].role
    return replace(first, bucket=name, params=tuple(p for m in group for p in m.role.params), nbytes=sum(m.role.nbytes for m in group))


def _relabel(nodes: list[fx.Node], name: str) -> None:
    """Give the members' remaining nodes (casts, views, frees) the merged bucket's name."""
    for n in nodes:
        n.meta[KEY] = replace(n.meta[KEY], bucket=name)


def _merge_gathers(graph: fx.Graph, group: list[_Member], name: str, mode: str, replaced: Replaced) -> None:
    role = _merged_role(group, name)
    if len(group) > 1:
        first = min(m.launch for m in group)
        inputs = [m.launch.args[0] for m in group]
        _move_up(inputs, first)
        world, pg = first.args[1], first.args[2]
        with graph.inserting_before(first):
            if mode == "coalesced":
                launch = emit(graph, c10d.all_gather_into_tensor_coalesced.default, (inputs, world, pg), role)
                items = [emit(graph, operator.getitem, (launch, i), role.of("item")) for i in range(len(group))]
                values = [emit(graph, c10d.wait_tensor.default, (x,), role.of("wait_gather", params=m.role.params))
                          for x, m in zip(items, group)]
            else:
                values = _packed_gather(graph, inputs, world, pg, role)
        for m, v in zip(group, values):
            replaced.replace(m.wait, v)
        for m, v in zip(group, values):
            for u in v.users:
                if (r := role_of(u)) is not None and r.kind == "free":
                    u.meta[KEY] = replace(r, nbytes=m.role.nbytes)
        if mode == "packed":
            _free_packed(graph, role, values)
    else:
        group[0].launch.meta[KEY] = role
        group[0].wait.meta[KEY] = replace(group[0].wait.meta[KEY], bucket=name)


def _packed_gather(graph: fx.Graph, inputs: list[Any], world: Any, pg: Any, role: Role) -> list[fx.Node]:
    x = emit(graph, aten.cat.default, (inputs, 0), role.of("cast"))
    x = emit(graph, c10d.all_gather_into_tensor.default, (x, world, pg), role)
    x = emit(graph, c10d.wait_tensor.default, (x,), role.of("wait_gather"))
    table = emit(graph, aten.reshape.default, (x, [world, -1]), role.of("unpack"))
    values, at = [], 0
    for s in inputs:
        n = s.meta["val"].numel()
        part = emit(graph, aten.slice.Tensor, (table, 1, at, at + n), role.of("unpack"))
        values.append(emit(graph, aten.reshape.default, (part, [-1]), role.of("unpack")))
        at += n
    return values


def _free_packed(graph: fx.Graph, role: Role, values: list[fx.Node]) -> None:
    """A packed bucket is one buffer: one free, after the last of its members' frees; none if a member leaves the graph."""
    frees = [u for v in values for u in v.users if (r := role_of(u)) is not None and r.kind == "free"]
    if len(frees) == len(values):
        last = max(frees)
        wait = values[0].args[0].args[0].args[0]  # type: ignore[union-attr]
        with graph.inserting_after(last):
            emit(graph, FREE, (wait,), role.of("free", nbytes=role.nbytes))
    for f in frees:
        graph.erase_node(f)


def _merge_reduces(graph: fx.Graph, group: list[_Member], name: str, mode: str, replaced: Replaced) -> None:
    role = _merged_role(group, name)
    if len(group) > 1:
        last = group[-1].launch
        inputs = [m.launch.args[0] for m in group]
        op, world, pg = last.args[1:4]
        with graph.inserting_before(last):
            if mode == "coalesced":
                launch = emit(graph, c10d.reduce_scatter_tensor_coalesced.default, (inputs, op, world, pg), role)
                items = [emit(graph, operator.getitem, (launch, i), role.of("reduce_item")) for i in range(len(group))]
                values = [emit(graph, c10d.wait_tensor.default, (x,), role.of("wait_reduce", params=m.role.params))
                          for x, m in zip(items, group)]
            else:
                tables = [emit(graph, aten.reshape.default, (x, [world, -1]), role.of("pack")) for x in inputs]
                x = emit(graph, aten.cat.default, (tables, 1), role.of("pack"))
                x = emit(graph, aten.reshape.default, (x, [-1]), role.of("pack"))
                x = emit(graph, c10d.reduce_scatter_tensor.default, (x, op, world, pg), role)
                x = emit(graph, c10d.wait_tensor.default, (x,), role.of("wait_reduce"))
                values, at = [], 0
                for t in tables:
                    n = t.meta["val"].shape[1]
                    values.append(emit(graph, aten.slice.Tensor, (x, 0, at, at + n), role.of("grad")))
                    at += n
        # The members' own casts stand where their launches stood, before the merged wait: move them behind it.
        tail = values[-1]
        for m in group:
            for n in _after(m.wait):
                tail.append(n)
                tail = n
        for m, v in zip(group, values):
            replaced.replace(m.wait, v)
    else:
        group[0].launch.meta[KEY] = role
        group[0].wait.meta[KEY] = replace(group[0].wait.meta[KEY], bucket=name)


def _after(wait: fx.Node) -> list[fx.Node]:
    """Our own nodes that follow a wait, in order."""
    out: list[fx.Node] = []
    todo = [wait]
    while todo:
        for u in todo.pop(0).users:
            if role_of(u) is not None and u not in out:
                out.append(u)
                todo.append(u)
    return out


def _move_up(inputs: list[Any], before: fx.Node) -> None:
    """Casts of the members' shards depend on placeholders only: put them in front of the merged launch."""
    for x in inputs:
        chain = []
        while role_of(x) is not None:
            chain.append(x)
            x = x.args[0]
        for n in reversed(chain):
            if n is not before:
                before.prepend(n)
