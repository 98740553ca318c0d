"""keep: which gathered weights to carry from forward to backward instead of gathering them again.

::

    forward   w1  w2  w3  w4 │ w4  w3  w2  w1   backward      w4 is freed and gathered again within moments: keep it, if it fits

Decided on the joint graph and by the parameters' sizes alone, so that all ranks decide alike.

Where nobody says how much, it is what one rank's shards of the graph's weights take, in the dtype in which they are gathered. The
gradients' shards take as much when backward has ended. In a chain of layers backward frees each kept weight before its gradient's shard
is made, so that kept weights and new gradients together take no more than the gradients alone at the end::

    N bytes of weights on d ranks      begin of backward: kept N/d, gradients 0      end: kept 0, gradients N/d
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fsdp_compile.spec import ParamSpec, decode

from .graph_ops import alias_closure, positions
from .markers import is_marker, unary_chain
from .roles import Kept


def kept(graph: fx.Graph, nbytes: int | None, names: frozenset[str] = frozenset()) -> frozenset[str]:
    """FQNs of the parameters to keep: those of ``names`` that the backward part of a joint graph reads, and of the others those that the
    forward part uses last, as long as these take no more than ``nbytes`` together when gathered (None: than one rank's shards of what
    is gathered, and none whose ``reshard`` is True). One that alone is larger is passed over. Empty for a graph without a backward part."""
    at = positions(graph)
    end = _backward_begins(graph, at)
    freely = nbytes is not None
    if nbytes is None:
        specs = {s.fqn: s for s in (decode(m.args[1]) for m in filter(is_marker, graph.nodes))}
        nbytes = sum(s.gathered_bytes // s.world for s in specs.values() if s.world > 1)
    if end is None or not (nbytes > 0 or names):
        return frozenset()
    found: list[tuple[int, int, ParamSpec]] = []
    for marker in filter(is_marker, graph.nodes):
        chain = set(unary_chain(marker))
        uses = [at[u] for n in chain for u in n.users if u not in chain]
        spec = decode(marker.args[1])
        if any(i >= end for i in uses) and (freely or spec.fqn in names or spec.reshard is not True):  # backward reads it
            found.append((max((i for i in uses if i < end), default=-1), at[marker], spec))
    out = {spec.fqn for _, _, spec in found if spec.fqn in names}
    left = nbytes
    for _, _, spec in sorted(found, key=lambda f: f[:2], reverse=True):
        if spec.gathered_bytes > nbytes or spec.fqn in out:
            continue
        if spec.gathered_bytes > left:
            break
        out.add(spec.fqn)
        left -= spec.gathered_bytes
    return frozenset(out)


def deaths(graph: fx.Graph, place: Callable[[fx.Node], int]) -> dict[Kept, int]:
    """What forward has kept, each with the ``place`` of its last use in this backward graph."""
    dies: dict[Kept, int] = {}
    for n in graph.nodes:
        kept = n.meta.get(Kept.KEY) if n.op == "placeholder" else None
        if kept is not None:
            dies[kept] = max(dies.get(kept, 0), *(place(u) for a in alias_closure([n]) for u in (a, *a.users)))
    return dies


def _backward_begins(graph: fx.Graph, at: dict[fx.Node, int]) -> int | None:
    """Position of the first operation on a tangent."""
    tangents = [n for n in graph.nodes if n.op == "placeholder" and str(n.target).startswith("tangents")]
    return min((at[u] for t in tangents for u in t.users if u.op != "output"), default=None)
