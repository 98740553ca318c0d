"""exchange: build collectives on what moves their bytes faster than the backend's own.

::

    "all_to_all"   y = wait(reduce_scatter(x))    →    y = mean(view(wait(all_to_all(x)), [world, -1]), 0)
    "own"          the same by our own operators: the all-to-all and every all-gather by `runtime/wire.py`, which suits the link;
                   packing and summing by `runtime/local.py`, for which Inductor compiles no kernel of each bucket's own size

gloo's reduce-scatter sends twice the least possible; an all-to-all sends (world-1)/world of the input once. The sum over ranks then runs
as ordinary compute, in rank order on every rank. Coalesced reductions stay as they are: there is no coalesced all-to-all.
"""

from __future__ import annotations

import torch
from torch import fx

from .graph_ops import aten, c10d, emit
from .roles import nodes_of, role_of

TRANSPORTS = ("native", "all_to_all", "own")
_ours = torch.ops.fsdp_compile
ALL_TO_ALLS = (c10d.all_to_all_single.default, _ours.all_to_all.default)
_GATHERS = {
    c10d.all_gather_into_tensor.default: _ours.all_gather.default,
    c10d.all_gather_into_tensor_coalesced.default: _ours.all_gather_coalesced.default,
}
SENT_GATHERS = tuple(_GATHERS.values())
ALL_GATHERS = (*_GATHERS, *SENT_GATHERS)


def exchange(graph: fx.Graph, transport: str) -> int:
    """Rebuild collectives in place for ``transport``; returns how many."""
    count = 0
    if transport == "own":
        for launch, _ in nodes_of(graph, "gather"):
            launch.target = _GATHERS[launch.target]  # type: ignore[index]
            count += 1
    for launch, role in nodes_of(graph, "reduce"):
        if launch.target is not c10d.reduce_scatter_tensor.default:
            continue
        x, op, world, group = launch.args
        assert isinstance(x, fx.Node) and isinstance(world, int)
        (wait,) = (u for u in launch.users if role_of(u) is not None)
        part = x.meta["val"].numel() // world
        scale = 1.0 / world if op == "avg" else 1.0
        if transport == "own":
            for cat in [n for n, r in nodes_of(graph, "pack") if r.bucket == role.bucket and n.target is aten.cat.default]:
                with graph.inserting_before(cat):  # dividing costs nothing where everything is copied anyway
                    cat.replace_all_uses_with(emit(graph, _ours.pack.default, (cat.args[0], scale), role.of("pack")))
                graph.erase_node(cat)
                scale = 1.0
        with graph.inserting_before(launch):
            if transport == "own":
                send = emit(graph, _ours.all_to_all.default, (x, world, group), role)
            else:
                send = emit(graph, c10d.all_to_all_single.default, (x, [part] * world, [part] * world, group), role)
        with graph.inserting_before(wait):
            got = emit(graph, c10d.wait_tensor.default, (send,), role.of("wait_reduce"))
            table = emit(graph, aten.reshape.default, (got, [world, part]), role.of("grad"))
            if transport == "own":
                total = emit(graph, _ours.total.default, (table, scale), role.of("grad"))
            else:
                total = emit(graph, aten.mean.dim if op == "avg" else aten.sum.dim_IntList, (table, [0]), role.of("grad"))
        wait.replace_all_uses_with(total)
        graph.erase_node(wait)
        graph.erase_node(launch)
        count += 1
    return count
