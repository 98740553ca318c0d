"""lift: let gathers that stand at a graph's entry start before the graph does.

::

    c = cast(s); g = all_gather(c); v = wait(g)    →    g = entry_gather([s], …); v = wait(g[0])

What is launched before a graph's first operation needs nothing but the graph's inputs. As one operator that takes the shards
themselves it can be started by whoever knows these shards, in the graph before or after the optimizer's step; the operator then only
takes over what is in flight (`runtime/early.py`). No node moves, and what `verify` has proved of the order stays true.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fsdp_compile.spec import Entry

from .exchange import SENT_GATHERS
from .graph_ops import emit, sources
from .roles import Role, nodes_of, role_of

ENTRY = torch.ops.fsdp_compile.entry_gather.default
_CAST = torch.ops.prims.convert_element_type.default


def lift(graph: fx.Graph) -> tuple[Entry, ...]:
    """Rewrite the gathers at the graph's entry in place; returns them in launch order. Those of packed buckets and of complex numbers
    stay as they are: they send what the graph computes."""
    place = {n: i for i, n in enumerate(m for m in graph.nodes if m.op == "placeholder")}
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr") and role_of(n) is None)
    lifted = []
    for launch, role in nodes_of(graph, "gather"):
        if not launch < first:
            break
        shards = [_shard(x) for x in sources(launch)]
        if all(s in place for s in shards):
            lifted.append(_lift(graph, launch, role, shards, place))
    return tuple(lifted)


def _shard(sent: fx.Node) -> fx.Node:
    role = role_of(sent)
    source = sent.args[0] if role is not None and role.kind == "cast" and sent.target is _CAST else sent
    assert isinstance(source, fx.Node)
    return source


def _lift(graph: fx.Graph, launch: fx.Node, role: Role, shards: list[fx.Node], place: dict[fx.Node, int]) -> Entry:
    sent = sources(launch)
    world, group = launch.args[1:]
    dtype = str(sent[0].meta["val"].dtype).removeprefix("torch.")
    entry = Entry(role.params, tuple(place[s] for s in shards), world, group, dtype, launch.target in SENT_GATHERS)  # type: ignore[arg-type]
    with graph.inserting_before(launch):
        new = emit(graph, ENTRY, (shards, world, group, dtype, entry.own), role)
        if not isinstance(launch.meta["val"], (list, tuple)):
            new = emit(graph, operator.getitem, (new, 0), role.of("item"))
    launch.replace_all_uses_with(new)
    graph.erase_node(launch)
    for x, s in zip(sent, shards):
        if x is not s and not x.users:
            graph.erase_node(x)
    return entry
