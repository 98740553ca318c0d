"""lower: take the last of our own operators out of a verified graph.

``free`` becomes liveness: both Inductor's generated code and FX's own drop a buffer after its last use, and `verify` has proved
that the last use is where ``free`` stood. No node moves any more: the order of this graph is the schedule.
"""

from __future__ import annotations

from torch import fx

from .roles import nodes_of


def lower(graph: fx.Graph) -> int:
    """Erase the ``free`` nodes; returns how many there were."""
    frees = nodes_of(graph, "free")
    for n, _ in frees:
        graph.erase_node(n)
    graph.lint()
    return len(frees)
