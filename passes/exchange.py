"""exchange: build reduce-scatters on all-to-all where the backend's own sends more bytes than it must.

::

    y = wait(reduce_scatter(x))    →    y = mean(view(wait(all_to_all(x)), [world, -1]), 0)

gloo's reduce-scatter sends twice the least possible; its all-to-all sends (world-1)/world of the input once. The sum over ranks then runs
as ordinary compute, in rank order on every rank. Coalesced reductions stay as they are: there is no coalesced all-to-all.
"""

from __future__ import annotations

from torch import fx

from .graph_ops import aten, c10d, emit
from .roles import nodes_of, role_of


def exchange(graph: fx.Graph) -> int:
    """Replace every plain reduce-scatter in place; returns how many."""
    count = 0
    for launch, role in nodes_of(graph, "reduce"):
        if launch.target is not c10d.reduce_scatter_tensor.default:
            continue
        x, op, world, group = launch.args
        assert isinstance(x, fx.Node) and isinstance(world, int)
        (wait,) = (u for u in launch.users if role_of(u) is not None)
        part = x.meta["val"].numel() // world
        combine = aten.mean.dim if op == "avg" else aten.sum.dim_IntList
        with graph.inserting_before(launch):
            send = emit(graph, c10d.all_to_all_single.default, (x, [part] * world, [part] * world, group), role)
        with graph.inserting_before(wait):
            got = emit(graph, c10d.wait_tensor.default, (send,), role.of("wait_reduce"))
            table = emit(graph, aten.reshape.default, (got, [world, part]), role.of("grad"))
            total = emit(graph, combine, (table, [0]), role.of("grad"))
        wait.replace_all_uses_with(total)
        graph.erase_node(wait)
        graph.erase_node(launch)
        count += 1
    return count
