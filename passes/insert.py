"""insert: markers → collectives, one bucket for each parameter.

::

    w = unshard(s, spec)          →   c = cast(s); g = all_gather(c); v = wait(g); w = view(v[:numel]) … free(v)
    r = reduce_grad(dw, spec)     →   p = pack(dw); x = reduce_scatter(p); y = wait(x); r = cast(y)

After it no marker is left, and every new node carries a `Role`. World 1 and empty parameters need no collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fsdp_compile.spec import ParamSpec, decode

from .graph_ops import FREE, REDUCE_GRAD, UNSHARD, Replaced, alias_closure, aten, c10d, emit, output_of, positions
from .roles import Role, nodes_of, role_of

_cast = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Inserted:
    """What `insert` did: the specs it expanded, in graph order."""

    gathered: tuple[ParamSpec, ...]
    reduced: tuple[ParamSpec, ...]


def insert(graph: fx.Graph, direction: str) -> Inserted:
    """Expand every marker of ``graph`` in place. ``direction``: "forward" or "backward"."""
    gathered: list[ParamSpec] = []
    reduced: list[ParamSpec] = []
    replaced = Replaced()
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (UNSHARD, REDUCE_GRAD):
            continue
        spec = decode(node.args[1])
        if node.target is UNSHARD and not node.users:
            graph.erase_node(node)
            continue
        with graph.inserting_before(node):
            if node.target is UNSHARD:
                gathered.append(spec)
                new = _expand_gather(graph, node.args[0], spec, Role("gather", _name(spec, "ag", gathered), (spec.fqn,), direction))
            else:
                reduced.append(spec)
                new = _expand_reduce(graph, node.args[0], spec, Role("reduce", _name(spec, "rs", reduced), (spec.fqn,), direction))
        replaced.replace(node, new)
    replaced.finish(graph)
    _detach_gradients(graph)
    _insert_frees(graph)
    return Inserted(tuple(gathered), tuple(reduced))


def _travels(spec: ParamSpec) -> bool:
    return spec.world > 1 and spec.numel > 0


def _name(spec: ParamSpec, prefix: str, before: list[ParamSpec]) -> str:
    """A bucket's name; what needs no collective must not share one with a bucket that `bucket` numbers."""
    return f"{prefix if _travels(spec) else 'local_' + prefix}{len(before)}"


def _to(graph: fx.Graph, x: fx.Node, dtype: torch.dtype, role: Role) -> fx.Node:
    return x if x.meta["val"].dtype == dtype else emit(graph, _cast, (x, dtype), role)


def _expand_gather(graph: fx.Graph, shard: fx.Node, spec: ParamSpec, role: Role) -> fx.Node:
    x = _to(graph, shard, spec.compute_dtype, role.of("cast"))
    if spec.compute_dtype.is_complex:
        x = emit(graph, aten.view_as_real.default, (x,), role.of("cast"))
        x = emit(graph, aten.reshape.default, (x, [-1]), role.of("cast"))
    if _travels(spec):
        launch = role.of("gather", nbytes=spec.gathered_bytes)
        x = emit(graph, c10d.all_gather_into_tensor.default, (x, spec.world, spec.group), launch)
        x = emit(graph, c10d.wait_tensor.default, (x,), role.of("wait_gather"))
    if spec.compute_dtype.is_complex:
        x = emit(graph, aten.reshape.default, (x, [-1, 2]), role.of("unpack"))
        x = emit(graph, aten.view_as_complex.default, (x,), role.of("unpack"))
    if spec.padded_numel != spec.numel:
        x = emit(graph, aten.slice.Tensor, (x, 0, 0, spec.numel), role.of("unpack"))
    return emit(graph, aten.reshape.default, (x, list(spec.shape)), role.of("unpack"))


def _expand_reduce(graph: fx.Graph, grad: fx.Node, spec: ParamSpec, role: Role) -> fx.Node:
    pack = role.of("pack")
    x = grad
    if spec.compute_dtype.is_complex:
        x = emit(graph, aten.clone.default, (x,), pack)  # resolves a conjugate view
        x = emit(graph, aten.view_as_real.default, (x,), pack)
    x = _to(graph, x, spec.reduce_dtype, pack)
    if _travels(spec):
        x = emit(graph, aten.reshape.default, (x, [-1]), pack)
        pad = spec.padded_numel * spec.wire_factor - x.meta["val"].numel()
        if spec.kind == "replicate":
            x = emit(graph, aten.repeat.default, (x, [spec.world]), pack)
        elif pad:
            x = emit(graph, aten.constant_pad_nd.default, (x, [0, pad]), pack)
        nbytes = spec.padded_numel * spec.wire_factor * spec.reduce_dtype.itemsize
        args = (x, spec.reduce_op, spec.world, spec.group)
        x = emit(graph, c10d.reduce_scatter_tensor.default, args, role.of("reduce", nbytes=nbytes))
        x = emit(graph, c10d.wait_tensor.default, (x,), role.of("wait_reduce"))
    else:
        x = emit(graph, aten.reshape.default, (x, [-1]), pack)
    if spec.compute_dtype.is_complex:
        x = emit(graph, aten.reshape.default, (x, [-1, 2]), role.of("grad"))
        x = emit(graph, aten.view_as_complex.default, (x,), role.of("grad"))
    return _to(graph, x, spec.dtype, role.of("grad"))


def _detach_gradients(graph: fx.Graph) -> None:
    """Copy a gradient that is nothing but a view of a gathered parameter: it is packed after that parameter may be freed."""
    gathered = set(alias_closure(n for n, _ in nodes_of(graph, "wait_gather")))
    for pack, role in nodes_of(graph, "pack", "reduce"):
        grad = pack.args[0]
        if not isinstance(grad, fx.Node) or grad not in gathered:
            continue
        theirs = role_of(grad)
        if theirs is None or theirs.bucket != role.bucket:
            with graph.inserting_before(pack):
                copy = graph.call_function(aten.clone.default, (grad,))
            copy.meta["val"] = grad.meta["val"]
            pack.replace_input_with(grad, copy)


def _insert_frees(graph: fx.Graph) -> None:
    """``free`` after the last use of each gathered buffer, unless an alias of it leaves the graph."""
    out = output_of(graph)
    at = positions(graph)
    for wait, role in nodes_of(graph, "wait_gather"):
        launch = wait.args[0]
        assert isinstance(launch, fx.Node)
        users = {u for n in alias_closure([wait]) for u in (n, *n.users)}
        if out in users:
            continue
        with graph.inserting_after(max(users, key=at.__getitem__)):
            emit(graph, FREE, (wait,), role.of("free", nbytes=launch.meta["fsdp_role"].nbytes))
