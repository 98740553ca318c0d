"""verify: prove the invariants of a scheduled graph, or refuse it. It reads the final order and trusts no other pass.

Numbers as in the design: 1 lifetimes, 2 reductions, 3 no dependence on shapes, 4 nothing of one rank, 5 bytes, 6 collectives' inputs.
What a collective must look like (group, world size, dtype, lengths) follows from the parameters' specs, not from what a pass noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from fsdp_compile.spec import ParamSpec

from .exchange import ALL_GATHERS, ALL_TO_ALLS
from .graph_ops import FREE, REDUCE_GRAD, UNSHARD, alias_closure, c10d, is_alias_op, output_of, positions, written_args
from .roles import Role, nodes_of, role_of


class ScheduleError(RuntimeError):
    """A schedule that must not run. The message names the invariant, the node and the bucket."""


@dataclass(frozen=True)
class Expectation:
    """What the graph owes: specs of the parameters that it gathers, one for each marker, and of those whose gradient it must
    reduce, each once; FQNs that the program returns whole on purpose; the limit on gathered bytes (None: none)."""

    gathered: tuple[ParamSpec, ...] = ()
    reduced: tuple[ParamSpec, ...] = ()
    escaping: frozenset[str] = frozenset()
    limit_gathers: int | None = None


_LAUNCHES = {
    "gather": ALL_GATHERS,
    "reduce": (
        c10d.reduce_scatter_tensor.default,
        c10d.reduce_scatter_tensor_coalesced.default,
        *ALL_TO_ALLS,
    ),
}
_WAITS = {"gather": "wait_gather", "reduce": "wait_reduce"}


def verify(graph: fx.Graph, expect: Expectation) -> None:
    """Raise `ScheduleError` unless all six invariants hold."""
    at = positions(graph)
    for n in graph.nodes:
        if n.op == "call_function" and n.target in (UNSHARD, REDUCE_GRAD):
            _refuse(1, n, None, "is a marker that no pass has expanded")
        for a in n.all_input_nodes:
            if at[a] > at[n]:
                _refuse(1, n, role_of(n), f"runs before its input {a.name}")
    _plain_arguments(graph)
    _launches(graph, expect)
    waits = {n: _waits_of(n, r) for n, r in nodes_of(graph, "gather", "reduce")}
    _strays(graph, waits)
    _lifetimes(graph, at, waits, expect)
    _reductions(graph, waits, expect)
    _inputs_untouched(graph, at, waits)
    _bytes(graph, expect)


def _refuse(number: int, node: fx.Node, role: Role | None, what: str) -> NoReturn:
    where = f"bucket {role.bucket} ({', '.join(role.params[:3])}{', …' if len(role.params) > 3 else ''})" if role else "no bucket"
    raise ScheduleError(f"invariant {number} broken: node {node.name}, {where}: {what}")


# --- 3 and 4: what is sent ----------------------------------------------------------------------------------------------


def _plain_arguments(graph: fx.Graph) -> None:
    """4: our nodes hold nodes, sizes, dtypes and names, nothing that is an object of one process."""
    for n in graph.nodes:
        role = role_of(n)
        if role is None:
            continue
        for a in _leaves((n.args, tuple(n.kwargs.values()))):
            if not isinstance(a, (fx.Node, int, float, bool, str, torch.dtype, type(None))):
                _refuse(4, n, role, f"holds a {type(a).__name__}; only group names and sizes may stand in a graph")


def _launches(graph: fx.Graph, expect: Expectation) -> None:
    """3, 4: each launch sends what its parameters' specs say, on their group."""
    known = {"gather": {s.fqn: s for s in expect.gathered}, "reduce": {s.fqn: s for s in expect.reduced}}
    for launch, role in nodes_of(graph, "gather", "reduce"):
        if written_args(launch):
            _refuse(6, launch, role, "writes into a given buffer: its input would not be kept alive until the wait")
        if launch.target not in _LAUNCHES[role.kind]:
            _refuse(4, launch, role, f"is a {role.kind} by its role but calls {launch.target}")
        inputs = _inputs(launch)
        for i in inputs:
            if not all(isinstance(s, int) for s in i.meta["val"].shape):
                _refuse(3, launch, role, f"sends {tuple(i.meta['val'].shape)}: its size depends on an activation's shape")
        specs = []
        for fqn in role.params:
            if fqn not in known[role.kind]:
                number, what = (2, "reduces {!r}, which has no gradient here (frozen or unused)") if role.kind == "reduce" else (
                    1, "gathers {!r}, which the graph does not read")
                _refuse(number, launch, role, what.format(fqn))
            specs.append(known[role.kind][fqn])
        _sends(launch, role, specs, inputs)
    _packed_parts(graph, known)


def _sends(launch: fx.Node, role: Role, specs: list[ParamSpec], inputs: list[fx.Node]) -> None:
    reduces = role.kind == "reduce"
    for s in specs:
        where: tuple[Any, ...] = (s.reduce_op, s.world, s.group) if reduces else (s.world, s.group)
        if launch.target in ALL_TO_ALLS:
            part = [inputs[0].meta["val"].numel() // s.world] * s.world
            where = (part, part, s.group) if launch.target is c10d.all_to_all_single.default else (s.world, s.group)
            _combines(launch, role, s)
        if launch.args[1:] != where:
            _refuse(4, launch, role, f"runs on {launch.args[1:]}, but {s.fqn!r} belongs to {where}")
        dtype = s.reduce_dtype if reduces else s.real_dtype
        if inputs[0].meta["val"].dtype != dtype:
            _refuse(4, launch, role, f"sends {inputs[0].meta['val'].dtype}, but {s.fqn!r} travels in {dtype}")
    want = [_wire_numel(s, reduces) for s in specs]
    have = [i.meta["val"].numel() for i in inputs]
    if have != want and not (len(have) == 1 and have[0] == sum(want)):
        _refuse(3, launch, role, f"sends {have} elements; its parameters have {want}")
    nbytes = sum(_wire_bytes(s, reduces) for s in specs)
    if role.nbytes != nbytes:
        _refuse(5, launch, role, f"is counted as {role.nbytes} bytes, its parameters take {nbytes}")


def _combines(launch: fx.Node, role: Role, s: ParamSpec) -> None:
    """2: what an all-to-all brings is summed, or averaged, as the spec says; packing may have divided already."""
    aten, ours = torch.ops.aten, torch.ops.fsdp_compile
    mean = 1.0 / s.world
    want = mean if s.reduce_op == "avg" else 1.0
    factors: dict[Any, float] = {aten.mean.dim: mean, aten.sum.dim_IntList: 1.0}
    mine = [n for n in alias_closure([launch]) for n in n.users if role_of(n) and n.target in (*factors, ours.total.default)]
    if len(mine) != 1:
        _refuse(2, launch, role, f"brings the ranks' parts, which nothing combines ({s.reduce_op})")
    factor = factors[mine[0].target] if mine[0].target in factors else _scale(mine[0])
    x = launch.args[0]
    while isinstance(x, fx.Node) and (r := role_of(x)) is not None and r.kind == "pack":
        factor *= _scale(x) if x.target is ours.pack.default else 1.0
        x = x.args[0]
    if factor != want:
        _refuse(2, launch, role, f"brings the ranks' parts, whose sum is scaled by {factor} instead of {want} ({s.reduce_op})")


def _scale(node: fx.Node) -> float:
    scale = node.args[1]
    assert isinstance(scale, float)
    return scale


def _wire_numel(s: ParamSpec, reduces: bool) -> int:
    return (s.padded_numel if reduces else s.shard_numel) * s.wire_factor


def _wire_bytes(s: ParamSpec, reduces: bool) -> int:
    return s.padded_numel * s.wire_factor * s.reduce_dtype.itemsize if reduces else s.gathered_bytes


def _packed_parts(graph: fx.Graph, known: dict[str, dict[str, ParamSpec]]) -> None:
    """4: slices of a packed bucket stand at the running sum of its parameters' lengths, a function of the specs and of no rank."""
    cuts: dict[tuple[str, str], list[tuple[fx.Node, Role]]] = {}
    for n, r in nodes_of(graph, "unpack", "grad"):
        if n.target is torch.ops.aten.slice.Tensor and len(r.params) > 1:
            cuts.setdefault(("gather" if r.kind == "unpack" else "reduce", r.bucket), []).append((n, r))
    for (kind, _), found in cuts.items():
        start = 0
        if len(found) != len(found[0][1].params):
            _refuse(4, found[0][0], found[0][1], f"one of {len(found)} slices for {len(found[0][1].params)} parameters")
        for (n, r), fqn in zip(found, found[0][1].params):
            length = known[kind][fqn].shard_numel * known[kind][fqn].wire_factor
            if n.args[2:4] != (start, start + length):
                _refuse(4, n, r, f"cuts [{n.args[2]}:{n.args[3]}] for {fqn!r}, which lies at [{start}:{start + length}]")
            start += length


def _inputs(launch: fx.Node) -> list[fx.Node]:
    given = launch.args[0]
    return [i for i in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(i, fx.Node)]


def _leaves(x: object) -> Iterator[object]:
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _leaves(y)
    else:
        yield x


# --- 1: lifetimes -------------------------------------------------------------------------------------------------------


def _waits_of(launch: fx.Node, role: Role) -> list[fx.Node]:
    """The waits of one launch: exactly one for each result, and nobody else reads what is still in flight."""
    number = 1 if role.kind == "gather" else 2
    results = [launch]
    if not isinstance(launch.meta["val"], torch.Tensor):
        results = list(launch.users)
        count = len(launch.meta["val"])
        if sorted(u.args[1] if role_of(u) else -1 for u in results) != list(range(count)):  # type: ignore[type-var]
            _refuse(number, launch, role, f"delivers {count} tensors, of which {len(results)} are taken: {[u.name for u in results]}")
        results.sort(key=lambda u: u.args[1])  # type: ignore[arg-type,return-value]
    waits = []
    for i, res in enumerate(results):
        mine = [u for u in res.users if (r := role_of(u)) is not None and r.kind == _WAITS[role.kind]]
        if len(mine) != 1:
            _refuse(number, res, role, f"has {len(mine)} waits; each launch needs exactly one")
        for u in res.users:
            if u is not mine[0]:
                _refuse(number, u, role, f"reads {res.name} without waiting for it")
        wait_role = role_of(mine[0])
        assert wait_role is not None
        params = role.params if res is launch else (role.params[i],)
        if wait_role.bucket != role.bucket or wait_role.params != params:
            _refuse(number, mine[0], wait_role, f"waits for {', '.join(params)} of bucket {role.bucket}")
        waits.append(mine[0])
    return waits


def _strays(graph: fx.Graph, waits: dict[fx.Node, list[fx.Node]]) -> None:
    """1: no wait without its launch, no free of anything but a gathered buffer."""
    known = {w for found in waits.values() for w in found}
    for n in graph.nodes:
        role = role_of(n)
        waited = role is not None and role.kind in _WAITS.values()
        if waited and n not in known:
            _refuse(1, n, role, "waits for something that no launch of ours delivers")
        if n.op == "call_function" and n.target is FREE and n.args[0] not in known:
            _refuse(1, n, role, f"frees {n.args[0]}, which is not a gathered buffer")


def _lifetimes(graph: fx.Graph, at: dict[fx.Node, int], waits: dict[fx.Node, list[fx.Node]], expect: Expectation) -> None:
    out = output_of(graph)
    per = {s.fqn: s.gathered_bytes for s in expect.gathered}
    want = Counter(s.fqn for s in expect.gathered if s.world > 1 and s.numel)
    have = Counter(p for _, r in nodes_of(graph, "gather") for p in r.params)
    for fqn in want | have:
        if want[fqn] != have[fqn]:
            last = next((n for n, r in reversed(nodes_of(graph, "gather")) if fqn in r.params), out)
            _refuse(1, last, role_of(last), f"{fqn!r} is gathered {have[fqn]} times; the graph reads it {want[fqn]} times")
    for launch, found in waits.items():
        role = role_of(launch)
        assert role is not None
        for wait in found if role.kind == "gather" else ():
            users = {u for n in alias_closure([wait]) for u in n.users}
            frees = sorted(u for u in users if u.target is FREE)
            if len(frees) > 1:
                _refuse(1, frees[1], role, "frees a buffer that is freed already")
            if not frees:
                _kept(wait, role, out in users, expect)
                continue
            free_role = role_of(frees[0])
            wait_role = role_of(wait)
            assert wait_role is not None
            nbytes = sum(per[p] for p in wait_role.params)
            if free_role is None or free_role.bucket != role.bucket or free_role.nbytes != nbytes:
                _refuse(5, frees[0], role, f"frees {nbytes} bytes of bucket {role.bucket} but is counted as {free_role}")
            for u in users:
                if u is not frees[0] and at[u] > at[frees[0]]:
                    what = "the graph returns it" if u is out else "uses it"
                    _refuse(1, u, role, f"{what} after {frees[0].name} has freed it")


def _kept(wait: fx.Node, role: Role, leaves: bool, expect: Expectation) -> None:
    """A gathered buffer without a free: only one that leaves the graph with permission."""
    if not leaves:
        _refuse(1, wait, role, "is never freed")
    wait_role = role_of(wait)
    assert wait_role is not None
    for p in wait_role.params:
        if p not in expect.escaping:
            _refuse(1, wait, role, f"the gathered value of {p!r} leaves the graph (saved for backward or returned)")


# --- 2: reductions ------------------------------------------------------------------------------------------------------


def _reductions(graph: fx.Graph, waits: dict[fx.Node, list[fx.Node]], expect: Expectation) -> None:
    out = output_of(graph)
    returned = _needed_by(out)
    times: Counter[str] = Counter()
    last: dict[str, fx.Node] = {}
    for launch, role in nodes_of(graph, "reduce"):
        times.update(role.params)
        last.update(dict.fromkeys(role.params, launch))
        for wait in waits[launch]:
            if wait not in returned:
                _refuse(2, wait, role, "its result does not reach the graph's output")
    local = {p for n, r in nodes_of(graph, "pack", "grad") if n in returned for p in r.params}
    owed = Counter(s.fqn for s in expect.reduced)
    for fqn, k in owed.items():
        if k > 1:
            _refuse(2, out, None, f"{fqn!r} has {k} gradients in one graph; they must be summed first")
    for s in expect.reduced:
        if times[s.fqn] > 1:
            _refuse(2, last[s.fqn], role_of(last[s.fqn]), f"reduces {s.fqn!r} {times[s.fqn]} times")
        alone = s.world == 1 or not s.numel  # no collective: the gradient only passes through our nodes
        if not times[s.fqn] and not (alone and s.fqn in local):
            _refuse(2, out, None, f"the gradient of {s.fqn!r} is never reduced")


def _needed_by(node: fx.Node) -> set[fx.Node]:
    seen, todo = {node}, [node]
    while todo:
        for a in todo.pop().all_input_nodes:
            if a not in seen:
                seen.add(a)
                todo.append(a)
    return seen


# --- 5 and 6: memory ----------------------------------------------------------------------------------------------------


def _memory_sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and what their memory may be a view of."""
    seen = set(nodes)
    todo = list(seen)
    while todo:
        n = todo.pop()
        for a in n.all_input_nodes if is_alias_op(n) else ():
            if a not in seen:
                seen.add(a)
                todo.append(a)
    return seen


def _inputs_untouched(graph: fx.Graph, at: dict[fx.Node, int], waits: dict[fx.Node, list[fx.Node]]) -> None:
    """6: nobody writes a collective's input between its launch and its last wait."""
    writes: list[tuple[fx.Node, list[fx.Node]]] = [(n, w) for n in graph.nodes if n.op == "call_function" and (w := written_args(n))]
    for launch, found in waits.items() if writes else ():
        until = max(at[w] for w in found)
        memory: set[Any] = set()
        for n, written in writes:
            if not at[launch] < at[n] < until:
                continue
            memory = memory or set(alias_closure(_memory_sources(_inputs(launch))))
            for target in written:
                if target in memory:
                    _refuse(6, n, role_of(launch), f"writes {target.name} while {launch.name} is still reading it")


def _bytes(graph: fx.Graph, expect: Expectation) -> None:
    """5: gathered bytes alive, from launch to free, never exceed the limit."""
    alive: dict[str, int] = {}
    total = 0
    for n, r in nodes_of(graph, "gather", "free"):
        if r.kind == "gather":
            alive[r.bucket] = alive.get(r.bucket, 0) + r.nbytes
            total += r.nbytes
            if expect.limit_gathers is not None and total > expect.limit_gathers:
                held = ", ".join(f"{b}: {v}" for b, v in alive.items() if v)
                _refuse(5, n, r, f"{total} gathered bytes alive ({held}), limit_all_gathers is {expect.limit_gathers}")
        else:
            alive[r.bucket] = alive.get(r.bucket, 0) - r.nbytes
            total -= r.nbytes
            if alive[r.bucket] < 0:
                _refuse(5, n, r, "frees more bytes than its bucket has gathered")
