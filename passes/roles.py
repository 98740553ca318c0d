"""Role: what one of our own nodes is for. Every node that a pass inserts carries one in ``node.meta``; no pass matches patterns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

KEY = "fsdp_role"
GATHER_KINDS = ("cast", "gather", "item", "wait_gather", "unpack", "free")
REDUCE_KINDS = ("pack", "reduce", "reduce_item", "wait_reduce", "grad")
KINDS = (*GATHER_KINDS, *REDUCE_KINDS, "arrive")


@dataclass(frozen=True)
class Role:
    """``kind`` of an inserted node, its bucket and parameters.

    gather side::   cast (shard → wire) → gather (launch) → item → wait_gather → unpack (views, copy-out) … free
    reduce side::   pack (grad → wire) → reduce (launch) → reduce_item → wait_reduce → grad (shard of the gradient)
    neither::       arrive (waits for a gather that was started before the graph)

    ``nbytes``: for gather and free, bytes of the gathered buffers; for reduce, bytes of its input; else 0.
    """

    kind: str
    bucket: str
    params: tuple[str, ...]
    direction: str
    nbytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown role {self.kind!r}; one of {KINDS}")
        if self.direction not in ("forward", "backward"):
            raise ValueError(f"direction must be 'forward' or 'backward', got {self.direction!r}")
        if not self.params:
            raise ValueError(f"role {self.kind} of bucket {self.bucket} names no parameter")
        if self.nbytes < 0:
            raise ValueError(f"bucket {self.bucket}: negative size {self.nbytes}")

    def of(self, kind: str, **changes: Any) -> Role:
        """The same bucket's role of another kind."""
        return replace(self, kind=kind, **{"nbytes": 0, **changes})


@dataclass(frozen=True)
class Kept:
    """In ``meta`` of a marker that stays gathered for backward, and so of the placeholder by which it comes there. ``nbytes``: of the
    gathered buffer."""

    KEY = "fsdp_kept"

    fqn: str
    nbytes: int


@dataclass(frozen=True)
class Held:
    """In ``meta`` of the placeholder of a whole weight whose gather was started before the graph."""

    KEY = "fsdp_held"

    fqn: str


def role_of(node: fx.Node) -> Role | None:
    """The role of one of our nodes; None for everybody else's."""
    return node.meta.get(KEY)


def nodes_of(graph: fx.Graph, *kinds: str) -> list[tuple[fx.Node, Role]]:
    """Our nodes of these kinds, in graph order."""
    return list(_nodes_of(graph, kinds))


def _nodes_of(graph: fx.Graph, kinds: tuple[str, ...]) -> Iterator[tuple[fx.Node, Role]]:
    for n in graph.nodes:
        r = role_of(n)
        if r is not None and r.kind in kinds:
            yield n, r
