"""Small facts about FX graphs that several passes need: emitting nodes with fake values, aliases, order."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from .roles import KEY, Role

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
UNSHARD = torch.ops.fsdp_compile.unshard.default
REDUCE_GRAD = torch.ops.fsdp_compile.reduce_grad.default
COLLECT = torch.ops.fsdp_compile.collect.default
HELD = torch.ops.fsdp_compile.held.default
WITH_PENDING = torch.ops.fsdp_compile.with_pending.default
FREE = torch.ops.fsdp_compile.free.default

# Ops that return their input, or part of it, when strides allow; their schema does not say so.
_WAIT = {c10d.wait_tensor.default}
_MAY_ALIAS = {
    aten.reshape.default,
    aten.contiguous.default,
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    operator.getitem,
}


def emit(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], role: Role) -> fx.Node:
    """Append a call at the graph's insertion point, with its fake value and its role.

    The fake value is computed from the arguments' fake values, so later passes know shapes and dtypes."""
    node = graph.call_function(target, args)
    node.meta["val"] = _fake(target, fx.map_arg(args, lambda n: n.meta["val"]))
    node.meta[KEY] = role
    return node


def _fake(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The fake result of a call. Those of the collectives are made here: their registered fakes take four times as long."""
    if target is c10d.wait_tensor.default:
        return args[0]
    if target is FREE:
        return None
    if target is operator.getitem:
        return args[0][args[1]]
    x = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    with torch.no_grad(), getattr(x, "fake_mode", contextlib.nullcontext()):
        if target is c10d.all_gather_into_tensor.default:
            return x.new_empty((x.numel() * args[1],))
        if target is c10d.reduce_scatter_tensor.default:
            return x.new_empty((x.numel() // args[2],))
        if target is c10d.all_gather_into_tensor_coalesced.default:
            return [t.new_empty((t.numel() * args[1],)) for t in args[0]]
        if target is c10d.reduce_scatter_tensor_coalesced.default:
            return [t.new_empty((t.numel() // args[2],)) for t in args[0]]
        return target(*args)


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy to try passes on. (``copy.deepcopy`` would copy the code generator's specs, too, and warn about them.)"""
    out = fx.Graph()
    returned = out.graph_copy(graph, {})
    out.output(returned).meta = dict(graph.output_node().meta)
    return out


def is_alias_op(node: fx.Node) -> bool:
    """Whether the node's result may share memory with an input (views, reshape, getitem)."""
    if node.op != "call_function":
        return False
    if node.target in _MAY_ALIAS:
        return True
    schema = getattr(node.target, "_schema", None)
    return node.target in _WAIT or (schema is not None and any(r.alias_info is not None for r in schema.returns))


def alias_closure(roots: Iterable[fx.Node]) -> list[fx.Node]:
    """``roots`` and everything that may share their memory, in discovery order."""
    seen: dict[fx.Node, None] = dict.fromkeys(roots)
    todo = list(seen)
    while todo:
        n = todo.pop()
        for u in n.users:
            if u not in seen and is_alias_op(u):
                seen[u] = None
                todo.append(u)
    return list(seen)


def world_of(launch: fx.Node) -> int:
    """How many ranks a launch is on."""
    world = launch.args[-2]
    return len(world) if isinstance(world, (list, tuple)) else int(world)  # type: ignore[arg-type]


def sources(launch: fx.Node) -> list[fx.Node]:
    """What a collective sends: one node, or the list of a coalesced one."""
    first = launch.args[0]
    return [n for n in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(n, fx.Node)]


def first_use(launch: fx.Node, at: dict[fx.Node, int]) -> int:
    """Position of the first node that really reads what a gather delivers (views of it and our own nodes do not count)."""
    uses = [at[u] for n in alias_closure([launch]) for u in n.users if KEY not in u.meta and not is_alias_op(u)]
    return min(uses, default=len(at))


def written_args(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node writes in place, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    out: list[fx.Node] = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
            out.extend(v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node))
    return out


class Replaced:
    """Nodes to give way to others. The output's arguments are rewritten once, at the end: each rewrite costs as much as they are many."""

    def __init__(self) -> None:
        self._by: dict[fx.Node, fx.Node] = {}

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of ``old`` but the output use ``new``, at once."""
        for u in list(old.users):
            if u.op != "output":
                u.replace_input_with(old, new)
        self._by[old] = new

    def finish(self, graph: fx.Graph) -> None:
        """Let the output follow, and erase the old nodes with whatever of our own only they used."""
        out = output_of(graph)
        out.args = fx.map_arg(out.args, lambda n: self._by.get(n, n))
        for old in self._by:
            launch = old.args[0]
            graph.erase_node(old)
            if isinstance(launch, fx.Node) and not launch.users and KEY in launch.meta:
                graph.erase_node(launch)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Node → place in the graph's order."""
    return {n: i for i, n in enumerate(graph.nodes)}


def output_of(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    return next(iter(reversed(graph.nodes)))


def set_order(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Put the graph's nodes into ``order`` (a permutation of them). Raises ValueError if a node would precede an input."""
    if len(order) != len(graph.nodes):
        raise ValueError(f"an order of {len(order)} nodes for a graph of {len(graph.nodes)}")
    done: set[fx.Node] = set()
    for n in order:
        for a in n.all_input_nodes:
            if a not in done:
                raise ValueError(f"{n.format_node()} would run before its input {a.name}")
        done.add(n)
    anchor = order[0]
    anchor.graph._root.append(anchor)
    for n in order[1:]:
        anchor.append(n)
        anchor = n
