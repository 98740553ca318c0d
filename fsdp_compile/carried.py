"""What the graphs of one model carry from forward to backward together: a limit on gathered weights holds for all of them.

::

    forward    graph 1 ─── graph 2 ─── graph 3  │  graph 3 ─── graph 2 ─── graph 1   backward
    carried    k1          k1 + k2     k1 + k2 + k3            k1 + k2     k1

A model that is compiled block by block, or with graph breaks, is several graphs. What comes later is not known when the first one is
compiled; so each may carry the part of what is left that its weights are of all weights which no graph has read before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from fsdp_compile import compat
from fsdp_compile.runtime.sharding import FSDPState, state_behind


@dataclass(frozen=True)
class Share:
    """Of one graph. ``carried``: bytes that earlier graphs carry; ``part``: which part (0 to 1) of what they leave it may carry itself;
    ``ahead``: bytes of the largest weight that is still unread, which a later graph has to gather beside all that is carried."""

    carried: int = 0
    part: float = 1.0
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.carried < 0 or self.ahead < 0 or not 0 <= self.part <= 1:
            raise ValueError(f"not a share: {self}")


WHOLE = Share()  # of the only graph of a model


@dataclass
class Ledger:
    """Of one model, whose weights have these ``sizes`` (FQN → gathered bytes). A graph is known by the weights that it reads, so that
    one compiled again has the share it had; graphs are told apart further by ``mode`` (with gradients or not, what `no_sync` holds):
    those of another mode do not run in between."""

    sizes: Mapping[str, int]
    _kept: dict[tuple[object, frozenset[str]], set[str]] = field(default_factory=dict)  # in the order of first compilations

    def share(self, fqns: Iterable[str], mode: object = None) -> Share:
        """The share of the graph that reads ``fqns``: the same on every rank, if their first compilations come in one order."""
        mine = frozenset(fqns)
        read: set[str] = set()
        carried: set[str] = set()
        for (other, theirs), kept in self._kept.items():
            if (other, theirs) == (mode, mine):
                break
            if other == mode:
                read |= theirs
                carried |= kept
        self._kept.setdefault((mode, mine), set())
        unread = [nbytes for fqn, nbytes in self.sizes.items() if fqn not in read | mine]
        own = self._bytes(mine)
        return Share(self._bytes(carried - mine), own / (own + sum(unread)) if any(unread) else 1.0, max(unread, default=0))

    def carry(self, fqns: Iterable[str], kept: Iterable[str], mode: object = None) -> None:
        """Note that the graph that reads ``fqns`` carries ``kept``."""
        self._kept.setdefault((mode, frozenset(fqns)), set()).update(kept)

    def _bytes(self, fqns: Iterable[str]) -> int:
        return sum(self.sizes.get(fqn, 0) for fqn in fqns)


_ledgers: weakref.WeakKeyDictionary[FSDPState, Ledger] = weakref.WeakKeyDictionary()


def ledger_of(gm: fx.GraphModule) -> Ledger:
    """The one `Ledger` of the sharded model whose weights a Dynamo graph reads (of the first one's, if it reads several models); an empty
    one if there is no such model."""
    state = state_behind(compat.placeholder_values(gm).values())
    return Ledger({}) if state is None else _ledgers.setdefault(state, Ledger(state.sizes))
