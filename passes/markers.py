"""Markers before partitioning: one per parameter in the Dynamo graph, and recompute tags in the joint graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from fsdp_compile.spec import ParamSpec, decode

from .graph_ops import COLLECT, HELD, REDUCE_GRAD, UNSHARD, WITH_PENDING, alias_closure, aten, is_alias_op
from .roles import Held, Kept

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_UNARY = {aten._to_copy.default, aten.clone.default, torch.ops.prims.convert_element_type.default}
_DYNAMO_PENDING = (WITH_PENDING, torch.ops.fsdp_compile.with_pending)
# A Dynamo graph holds the op either as torch.ops.x.y or as its default overload.
_DYNAMO_UNSHARD = (UNSHARD, torch.ops.fsdp_compile.unshard)


def is_marker(node: fx.Node) -> bool:
    """Whether the node is an ``unshard`` marker, in a Dynamo or an AOT graph."""
    return node.op == "call_function" and node.target in _DYNAMO_UNSHARD


def frozen(marker: fx.Node) -> bool:
    """Whether a Dynamo graph reads a parameter that does not require gradients: such a read is detached at once."""
    return [u.target for u in marker.users] == ["detach"]


def marker_specs(gm: fx.GraphModule) -> list[ParamSpec]:
    """The spec of each marker of a graph, in order."""
    return [decode(n.args[1]) for n in gm.graph.nodes if is_marker(n)]


def refuse_writes(gm: fx.GraphModule) -> None:
    """Raise RuntimeError, by name, if the program writes into a parameter that it has read: a gathered weight is a copy, which is
    dropped after use, and the write would be lost.

    Dynamo has run every operation on the example values, so that a write shows in their version counters."""
    for graph in (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)):
        values = [v for n in graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)]
        written = {v.untyped_storage()._cdata for v in values if v._version > 0}
        for node in graph.nodes:
            value = node.meta.get("example_value")
            if is_marker(node) and isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in written:
                raise RuntimeError(
                    f"parameter {decode(node.args[1]).fqn!r} is written in place inside the compiled model, but what code reads there is "
                    "a gathered copy, dropped after use. Write between steps, under torch.no_grad(), where the parameter is a DTensor; "
                    "or keep the value in a buffer"
                )


def dedupe(gm: fx.GraphModule) -> int:
    """One marker for each shard in a Dynamo graph; returns how many were merged or moved.

    ::

        w1 = unshard(s); a = f(w1); w2 = unshard(s); b = g(w2)   →   w = unshard(s); a = f(w); b = g(w)

    so that gradients of several reads are summed before the one reduction. A marker inside an activation-checkpoint body moves
    out of it (the body then takes the whole weight as an argument): the joint tags decide about its recomputation.
    """
    moved = 0
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is _CHECKPOINT:
            moved += _hoist(gm, node)
    first: dict[tuple[fx.Node, str], fx.Node] = {}
    grad_mode: fx.Node | None = None  # the first change of it
    changed: set[fx.Node] = set()  # first reads after it
    for node in list(gm.graph.nodes):
        if node.target is torch._C._set_grad_enabled and grad_mode is None:
            grad_mode = node
        if not is_marker(node):
            continue
        key = (node.args[0], node.args[1])
        if key in first:
            if grad_mode is not None and first[key] in changed:
                # The first read may stand under no_grad: merged there, it would cut the gradients of the others.
                grad_mode.prepend(first[key])
                changed.discard(first[key])
            node.replace_all_uses_with(first[key])
            gm.graph.erase_node(node)
            moved += 1
        else:
            first[key] = node
            if grad_mode is not None and getattr(node.args[0], "op", "") == "placeholder":
                changed.add(node)
    seen: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for node in [n for n in gm.graph.nodes if n.target in _DYNAMO_PENDING]:  # what was collected is added once, however often w is read
        first_add = seen.setdefault((node.args[0], node.args[1]), node)
        if first_add is not node:
            node.replace_all_uses_with(first_add)
            gm.graph.erase_node(node)
            moved += 1
    if moved + _distinguish(gm):
        gm.recompile()
    return moved


def _distinguish(gm: fx.GraphModule) -> int:
    """Give parameters of different models that share an FQN in one graph (teacher and student, a copy for EMA) names of their own:
    ``l1.weight``, ``l1.weight@2``. Returns how many."""
    owners: dict[str, list[fx.Node]] = {}
    renamed = 0
    for node in [n for n in gm.graph.nodes if is_marker(n)]:
        spec, shard = decode(node.args[1]), node.args[0]
        mine = owners.setdefault(spec.fqn, [])
        if shard not in mine:
            mine.append(shard)
        if k := mine.index(shard):
            node.update_arg(1, replace(spec, fqn=f"{spec.fqn}@{k + 1}").encode())
            renamed += 1
    return renamed


def _hoist(gm: fx.GraphModule, call: fx.Node) -> int:
    """Move the markers of one checkpoint body in front of its call. A body called twice is left alone."""
    attr = call.args[0]
    if not isinstance(attr, fx.Node) or attr.op != "get_attr":
        return 0
    sharers = [n for n in gm.graph.nodes if n.op == "get_attr" and n.target == attr.target]
    if len(sharers) > 1 or len(attr.users) > 1:
        return 0
    body = gm.get_submodule(str(attr.target))
    assert isinstance(body, fx.GraphModule)
    dedupe(body)
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    moved = 0
    for marker in [n for n in body.graph.nodes if is_marker(n)]:
        ph = marker.args[0]
        if ph not in inputs or len(ph.users) != 1:
            continue
        i = 1 + inputs.index(ph)
        with gm.graph.inserting_before(call):
            outer = gm.graph.call_function(marker.target, (call.args[i], marker.args[1]))
        outer.meta.update(marker.meta)
        call.update_arg(i, outer)
        marker.replace_all_uses_with(ph)
        ph.meta["example_value"] = marker.meta.get("example_value")
        body.graph.erase_node(marker)
        moved += 1
    for add in [n for n in body.graph.nodes if n.target in _DYNAMO_PENDING and all(a in inputs for a in n.args)]:
        w = add.args[0]
        if len(w.users) == 1:
            with gm.graph.inserting_before(call):
                outer = gm.graph.call_function(add.target, tuple(call.args[1 + inputs.index(a)] for a in add.args))
            outer.meta.update(add.meta)
            call.update_arg(1 + inputs.index(w), outer)
            add.replace_all_uses_with(w)
            body.graph.erase_node(add)
            moved += 1
    if moved:
        body.recompile()
    return moved


def erase_identities(graph: fx.Graph) -> int:
    """Take ``collect``, ``with_pending`` and ``held`` out of a graph whose derivatives are taken; all are their first argument, which
    in the last case is noted to be in flight (`arrive`)."""
    found = [n for n in graph.nodes if n.op == "call_function" and n.target in (COLLECT, WITH_PENDING, HELD)]
    for n in found:
        if n.target is HELD:
            n.args[0].meta[Held.KEY] = Held(decode(n.args[1]).fqn)
        n.replace_all_uses_with(n.args[0])
        graph.erase_node(n)
    return len(found)


def unary_chain(marker: fx.Node) -> list[fx.Node]:
    """The marker and all that is only a view, cast or copy of it."""
    chain = {marker: None}
    todo = [marker]
    while todo:
        for u in todo.pop().users:
            if u not in chain and (is_alias_op(u) or u.target in _UNARY or _pointwise(u)):
                if all(a in chain for a in u.all_input_nodes):
                    chain[u] = None
                    todo.append(u)
    return list(chain)


def _pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def tag_joint(graph: fx.Graph, set_recompute: Callable[[fx.Node, bool], None], is_saved: Callable[[ParamSpec], bool]) -> None:
    """Tag each marker, with its whole chain of views and casts, to be recomputed in backward, or saved where the plan keeps it.

    Without the tags a partitioner saves the transposed gathered weight: ZeRO-2 memory in silence. ``set_recompute(node, keep)``
    writes the partitioner's tags; ``is_saved(spec)`` says which parameters stay gathered between forward and backward.
    """
    for node in graph.nodes:
        if is_marker(node):
            spec = decode(node.args[1])
            keep = is_saved(spec)
            set_recompute(node, keep)
            for n in alias_closure([node]):  # whichever of them the partitioner saves
                n.meta.pop(Kept.KEY, None)
                if keep:
                    n.meta[Kept.KEY] = Kept(spec.fqn, spec.gathered_bytes)
            if not keep:
                for n in unary_chain(node)[1:]:
                    set_recompute(n, False)


def escaping(graph: fx.Graph) -> frozenset[str]:
    """FQNs of parameters whose gathered value, or a view of it, is an output of a joint graph: the program returned it."""
    out = set()
    for node in graph.nodes:
        if is_marker(node) and any(u.op == "output" for n in alias_closure([node]) for u in n.users):
            out.add(decode(node.args[1]).fqn)
    return frozenset(out)


def reduced_fqns(graph: fx.Graph) -> list[str]:
    """FQN of each ``reduce_grad`` marker of a backward graph, in order."""
    return [decode(n.args[1]).fqn for n in graph.nodes if n.op == "call_function" and n.target is REDUCE_GRAD]
