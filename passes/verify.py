"""verify: prove the invariants of a scheduled graph, or refuse it. It reads the final order and trusts no other pass.

Numbers as in the design: 1 lifetimes, 2 reductions, 3 no dependence on shapes, 4 nothing of one rank, 5 bytes, 6 reduction inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from .graph_ops import REDUCE_GRAD, UNSHARD, alias_closure, output_of, positions, written_args
from .roles import Role, nodes_of, role_of


class ScheduleError(RuntimeError):
    """A schedule that must not run. The message names the invariant, the node and the bucket."""


@dataclass(frozen=True)
class Expectation:
    """What the graph owes: FQNs whose gradient must be reduced (each once), FQNs that the program returns whole on purpose,
    and the limit on gathered bytes (None: none)."""

    reduced: tuple[str, ...] = ()
    escaping: frozenset[str] = frozenset()
    limit_gathers: int | None = None


def verify(graph: fx.Graph, expect: Expectation) -> None:
    """Raise `ScheduleError` unless all six invariants hold."""
    at = positions(graph)
    for n in graph.nodes:
        if n.op == "call_function" and n.target in (UNSHARD, REDUCE_GRAD):
            _refuse(1, n, None, "is a marker that no pass has expanded")
        for a in n.all_input_nodes:
            if at[a] > at[n]:
                _refuse(1, n, role_of(n), f"runs before its input {a.name}")
    _lifetimes(graph, at, expect)
    _reductions(graph, at, expect)
    _shapes_and_ranks(graph)
    _bytes(graph, expect)


def _refuse(number: int, node: fx.Node, role: Role | None, what: str) -> None:
    where = f"bucket {role.bucket} ({', '.join(role.params[:3])}{', …' if len(role.params) > 3 else ''})" if role else "no bucket"
    raise ScheduleError(f"invariant {number} broken: node {node.name}, {where}: {what}")


def _launch_waits(graph: fx.Graph, launch: fx.Node, role: Role, number: int) -> list[fx.Node]:
    """The waits of one launch: exactly one for each result."""
    results = [launch] if isinstance(launch.meta["val"], torch.Tensor) else [u for u in launch.users if role_of(u)]
    if not isinstance(launch.meta["val"], torch.Tensor) and len(results) != len(launch.meta["val"]):
        _refuse(number, launch, role, f"delivers {len(launch.meta['val'])} tensors but {len(results)} are taken")
    waits = []
    for res in results:
        mine = [u for u in res.users if (r := role_of(u)) is not None and r.kind in ("wait_gather", "wait_reduce")]
        if len(mine) != 1:
            _refuse(number, res, role, f"has {len(mine)} waits; each launch needs exactly one")
        for u in res.users:
            if u is not mine[0]:
                _refuse(number, u, role, f"reads {res.name} without waiting for it")
        waits.append(mine[0])
    return waits


def _lifetimes(graph: fx.Graph, at: dict[fx.Node, int], expect: Expectation) -> None:
    out = output_of(graph)
    for launch, role in nodes_of(graph, "gather"):
        for wait in _launch_waits(graph, launch, role, 1):
            aliases = alias_closure([wait])
            users = {u for n in aliases for u in n.users}
            frees = [u for u in users if (r := role_of(u)) is not None and r.kind == "free"]
            uses = [u for u in users if u not in frees]
            if len(frees) > 1:
                _refuse(1, frees[1], role, "frees a buffer that is freed already")
            if not frees:
                if out not in users:
                    _refuse(1, wait, role, "is never freed")
                wrole = role_of(wait)
                assert wrole is not None
                stray = [p for p in wrole.params if p not in expect.escaping]
                if stray:
                    _refuse(1, wait, role, f"the gathered value of {stray[0]!r} leaves the graph (saved for backward or returned)")
                continue
            (free,) = frees
            for u in uses:
                if at[u] > at[free]:
                    what = "the graph returns it" if u is out else "uses it"
                    _refuse(1, u, role, f"{what} after {free.name} has freed it")


def _reductions(graph: fx.Graph, at: dict[fx.Node, int], expect: Expectation) -> None:
    out = output_of(graph)
    found: Counter[str] = Counter()
    for launch, role in nodes_of(graph, "reduce"):
        found.update(role.params)
        waits = _launch_waits(graph, launch, role, 2)
        for wait in waits:
            if out not in _reach(wait):
                _refuse(2, wait, role, "its result does not reach the graph's output")
        _inputs_untouched(graph, launch, role, at, max(at[w] for w in waits))
    for node, role in nodes_of(graph, "pack", "grad"):  # world 1 and empty parameters reduce without a collective
        for p in role.params:
            if p not in found and p in expect.reduced:
                found[p] = 1
    for fqn, times in found.items():
        if fqn not in expect.reduced:
            node = next(n for n, r in nodes_of(graph, "reduce") if fqn in r.params)
            _refuse(2, node, role_of(node), f"reduces {fqn!r}, which has no gradient here (frozen or unused)")
        if times > 1:
            node = [n for n, r in nodes_of(graph, "reduce") if fqn in r.params][-1]
            _refuse(2, node, role_of(node), f"reduces {fqn!r} {times} times")
    for fqn in expect.reduced:
        if not found[fqn] and not _local_reduction(graph, fqn):
            _refuse(2, out, None, f"the gradient of {fqn!r} is never reduced")
    twice = [f for f, k in Counter(expect.reduced).items() if k > 1]
    if twice:
        _refuse(2, out, None, f"{twice[0]!r} has {Counter(expect.reduced)[twice[0]]} gradients in one graph; they must be summed first")


def _local_reduction(graph: fx.Graph, fqn: str) -> bool:
    return any(fqn in r.params for _, r in nodes_of(graph, "pack", "grad"))


def _reach(node: fx.Node) -> set[fx.Node]:
    seen, todo = {node}, [node]
    while todo:
        for u in todo.pop().users:
            if u not in seen:
                seen.add(u)
                todo.append(u)
    return seen


def _memory_sources(node: fx.Node) -> set[fx.Node]:
    """The node and what its memory may be a view of."""
    from .graph_ops import is_alias_op

    seen, todo = {node}, [node]
    while todo:
        n = todo.pop()
        if is_alias_op(n):
            for a in n.all_input_nodes:
                if a not in seen:
                    seen.add(a)
                    todo.append(a)
    return seen


def _inputs_untouched(graph: fx.Graph, launch: fx.Node, role: Role, at: dict[fx.Node, int], until: int) -> None:
    """6: nobody writes a reduction's input between launch and wait, and the launch itself writes no caller's buffer."""
    if written_args(launch):
        _refuse(6, launch, role, "writes into a given buffer: its input would not be kept alive until the wait")
    inputs = launch.args[0] if isinstance(launch.args[0], (list, tuple)) else [launch.args[0]]
    roots = {s for i in inputs if isinstance(i, fx.Node) for s in _memory_sources(i)}
    memory = set(alias_closure(roots))
    for n in graph.nodes:
        if at[launch] < at[n] < until and n.op == "call_function" and role_of(n) is None:
            for w in written_args(n):
                if w in memory:
                    _refuse(6, n, role, f"writes {w.name} while {launch.name} is still reading it")


def _shapes_and_ranks(graph: fx.Graph) -> None:
    for launch, role in nodes_of(graph, "gather", "reduce"):
        inputs = launch.args[0] if isinstance(launch.args[0], (list, tuple)) else [launch.args[0]]
        for i in inputs:
            if isinstance(i, fx.Node) and not all(isinstance(s, int) for s in i.meta["val"].shape):
                _refuse(3, launch, role, f"sends {tuple(i.meta['val'].shape)}: its size depends on an activation's shape")
    for n in graph.nodes:
        role = role_of(n)
        if role is None:
            continue
        for a in _leaves(n.args):
            if not isinstance(a, (fx.Node, int, float, bool, str, torch.dtype, type(None))):
                _refuse(4, n, role, f"holds a {type(a).__name__}; only group names and sizes may stand in a graph")
    for n in graph.nodes:
        if role_of(n) is None and n.op == "call_function" and getattr(n.target, "namespace", "") == "_c10d_functional":
            continue  # the program's own collectives stay where they are


def _leaves(x: object) -> Iterable[object]:
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _leaves(y)
    else:
        yield x


def _bytes(graph: fx.Graph, expect: Expectation) -> None:
    if expect.limit_gathers is None:
        return
    alive: dict[str, int] = {}
    for n in graph.nodes:
        r = role_of(n)
        if r is not None and r.kind == "gather":
            alive[r.bucket] = alive.get(r.bucket, 0) + r.nbytes
            if sum(alive.values()) > expect.limit_gathers:
                held = ", ".join(f"{b}: {v}" for b, v in alive.items() if v)
                _refuse(5, n, r, f"{sum(alive.values())} gathered bytes alive ({held}), limit_all_gathers is {expect.limit_gathers}; "
                        f"raise it to at least {sum(alive.values())}")
        elif r is not None and r.kind == "free":
            alive[r.bucket] -= r.nbytes
