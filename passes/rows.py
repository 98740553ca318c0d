"""rows: let an embedding exchange the rows that the batch names instead of gathering its whole table.

::

    w = unshard(s, spec); e = embedding(ids, w)    →    e = embed_rows(s, ids, spec)       in backward: ds = embed_rows_grad(de, ids, spec)

On a Dynamo graph, and only where that is all that reads the weight: one that is tied to an output layer is gathered as ever, and so is
one whose gradient `no_sync` collects. Which embeddings, follows from the program and the plan, and from no size of a batch: ranks need
not have equal ones.

A table that is looked up twice in a graph is gathered, too. Each exchange brings a sum over the ranks, and a rank that looks a table up
more often than another (a branch that its data takes) would add its second sum, or the same one twice, to what the other has not.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import fx

from fsdp_compile.spec import ParamSpec, decode

from .markers import is_marker

EMBED = torch.ops.fsdp_compile.embed_rows.default
EMBED_GRAD = torch.ops.fsdp_compile.embed_rows_grad.default


def rows(gm: fx.GraphModule, least: int, planned: Collection[str] = ()) -> tuple[ParamSpec, ...]:
    """Rewrite a Dynamo graph in place; returns the embeddings, in order. Tables of less than ``least`` bytes are left alone, and those
    whose FQN is in ``planned``."""
    out = []
    for marker in [n for n in gm.graph.nodes if is_marker(n)]:
        spec = decode(marker.args[1])
        found = _lookup(next(iter(marker.users)), marker, spec) if len(marker.users) == 1 else None
        if found is None or not _can(spec, least) or spec.fqn in planned:
            continue
        (lookup,) = marker.users
        with gm.graph.inserting_before(lookup):
            new = gm.graph.call_function(EMBED, (marker.args[0], found[0], marker.args[1], found[1]))
        new.meta.update(lookup.meta)
        lookup.replace_all_uses_with(new)
        gm.graph.erase_node(lookup)
        gm.graph.erase_node(marker)
        out.append(spec)
    if out:
        gm.recompile()
    return tuple(out)


def exchanged(graph: fx.Graph) -> tuple[ParamSpec, ...]:
    """The embeddings whose rows a forward or backward graph exchanges, in order."""
    return tuple(decode(n.args[2]) for n in graph.nodes if n.target in (EMBED, EMBED_GRAD))


def _can(spec: ParamSpec, least: int) -> bool:
    a_table = spec.kind == "shard" and len(spec.shape) == 2 and not spec.dtype.is_complex
    return a_table and spec.world > 1 and spec.gathered_bytes >= max(least, 1)


def _lookup(node: fx.Node, weight: fx.Node, spec: ParamSpec) -> tuple[fx.Node, int] | None:
    """Indices and padding of an ordinary embedding into ``weight``; None for anything else."""
    if node.target is not F.embedding:
        return None
    given = inspect.signature(F.embedding).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    found = given.arguments
    plain = found["max_norm"] is None and found["scale_grad_by_freq"] is False and found["sparse"] is False
    indices, padding = found["input"], found["padding_idx"]
    if not plain or found["weight"] is not weight or not isinstance(indices, fx.Node) or indices is weight:
        return None
    if padding is None:
        return indices, -1
    return (indices, padding % spec.shape[0]) if isinstance(padding, int) else None
