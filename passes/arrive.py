"""arrive: wait for whole weights whose gathers were started before the graph, each before its first use.

::

    x: placeholder; y = mm(a, x); return y, x    →    v = wait(x); y = mm(a, v); return y, x

They are held for several micro-steps (`runtime/hold.py`). Waiting again costs nothing, so that every forward graph does; a backward
graph follows a forward graph that has read the same. What the graph returns (for backward) stays the placeholder: a weight that seemed
to be made here would be given to backward to write on.
"""

from __future__ import annotations

from torch import fx

from .graph_ops import c10d, emit, output_of
from .roles import Held, Role


def holds(graph: fx.Graph) -> list[fx.Node]:
    """Placeholders of weights that are held."""
    return [n for n in graph.nodes if n.op == "placeholder" and Held.KEY in n.meta]


def arrive(graph: fx.Graph) -> int:
    """Insert the waits of a forward graph in place; returns how many."""
    out, count = output_of(graph), 0
    for x in holds(graph):
        users = list(x.users)
        if not users:
            continue
        with graph.inserting_before(min(users)):
            role = Role("arrive", "held", (x.meta[Held.KEY].fqn,), "forward")
            wait = emit(graph, c10d.wait_tensor.default, (x,), role)
        for u in users:
            if u is not out:
                u.replace_input_with(x, wait)
        count += 1
    return count
