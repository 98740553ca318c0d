"""Choose a plan by simulating many: bucket size, prefetch, what to keep for backward, and the limit that the memory allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .cost import Work
from .machine import Machine
from .replan import base_of, keepable, replan
from .simulate import simulate

# build(bucket_bytes, prefetch, limit_gathers, keep) → the step's works, forward first; ValueError if the limit cannot be kept.
Build = Callable[[int | None, int, int | None, frozenset[str]], Sequence[Work]]

BUCKETS: tuple[int | None, ...] = (None, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 25 << 20, 50 << 20, 100 << 20, 200 << 20, 0)
PREFETCH = (0, 1, 2, 3)
KEEP = (0.0, 0.125, 0.25, 0.5, 1.0)  # shares of all weights' bytes
NOTHING: frozenset[str] = frozenset()
WORTH = 0.005  # a plan that is slower by less than this share of the step, but needs less memory, is preferred
SURE = 0.02  # share of the step by which a plan must be faster than the usual one: predictions err by more


@dataclass(frozen=True)
class Choice:
    """A plan and what it is predicted to do. ``seconds``: of a step without its optimizer."""

    bucket_bytes: int | None
    prefetch: int
    limit_all_gathers: int | None
    keep: tuple[str, ...]
    seconds: float
    exposed_seconds: float
    peak_gathered_bytes: int

    def __post_init__(self) -> None:
        if self.prefetch < 0 or self.seconds < 0 or self.peak_gathered_bytes < 0:
            raise ValueError(f"a choice cannot be negative: {self}")


def replanner(works: Iterable[Work], mode: str = "coalesced", exchange: bool = False) -> Build:
    """A fast ``build`` from works made with the plan `replan.BASE`."""
    bases = [base_of(w) for w in works]

    def build(bucket_bytes: int | None, prefetch: int, limit: int | None, keep: frozenset[str]) -> list[Work]:
        return [replan(b, bucket_bytes, prefetch, limit, mode, exchange, keep) for b in bases]

    return build


def keeps(works: Iterable[Work], usual: frozenset[str] = NOTHING, shares: Sequence[float] = KEEP) -> list[frozenset[str]]:
    """What may be kept for backward, from nothing to everything: the last of forward, up to each share of the bytes that can be; and
    ``usual``, what the default options keep."""
    order = keepable([base_of(w) for w in works])
    total = sum(nbytes for _, nbytes in order)
    out: dict[frozenset[str], None] = {}
    for share in shares:
        kept, left = set(), share * total
        for fqn, nbytes in order:
            if nbytes > left:
                break
            kept.add(fqn)
            left -= nbytes
        out[frozenset(kept)] = None
    return list(out | {usual: None})


def choose(
    build: Build,
    machine: Machine,
    memory_budget: int | None = None,
    buckets: Sequence[int | None] = BUCKETS,
    prefetches: Sequence[int] = PREFETCH,
    keep: Sequence[frozenset[str]] = (NOTHING,),
    usual: tuple[int | None, int, frozenset[str]] | None = None,
    limited: bool = True,
) -> dict[str, Any]:
    """The fastest plan whose gathered weights never take more than ``memory_budget`` bytes (None: any number), as a dict of
    `Choice`'s fields; those named like options can be given to the backend. ``keep``: sets of weights to try to keep (`keeps`), the
    smallest first.

    Buckets and prefetch are tried together with the first of ``keep``, then every ``keep`` with the best of them, then buckets and prefetch
    again with the best ``keep``: all combinations would take several times as long. Among plans within half a percent of the fastest,
    the one with the smallest peak; then the one tried first: equal input gives an equal choice on every rank. ``usual``: bucket size,
    prefetch and what is kept of a plan that is taken if it fits and none is faster by two percent. ``limited``: whether the budget may
    also delay gathers; else only plans are taken that fit without. Raises ValueError if no plan fits the budget."""
    if memory_budget is not None and memory_budget <= 0:
        raise ValueError(f"memory_budget must be positive, got {memory_budget}")
    limit = memory_budget if limited else None
    found: dict[tuple[frozenset[str], int | None, int], Choice] = {}

    def attempt(kept: frozenset[str], bucket_bytes: int | None, prefetch: int) -> None:
        if (kept, bucket_bytes, prefetch) in found:
            return
        try:
            works = build(bucket_bytes, prefetch, limit, kept)
        except ValueError:
            return
        t = simulate(works, machine, limit_gathers=limit)
        peak = t.peak_gathered_bytes
        if memory_budget is None or peak <= memory_budget:
            choice = Choice(bucket_bytes, prefetch, limit, tuple(sorted(kept)), t.step, t.exposed_seconds, peak)
            found[kept, bucket_bytes, prefetch] = choice

    def sweep(kept: frozenset[str]) -> None:
        for bucket_bytes, prefetch in itertools.product(buckets, prefetches):
            attempt(kept, bucket_bytes, prefetch)

    sweep(keep[0])
    if not found:
        raise ValueError(f"no plan keeps gathered weights within {memory_budget} bytes")
    best = _best(found.values())
    for kept in keep[1:]:
        attempt(kept, best.bucket_bytes, best.prefetch)
    sweep(frozenset(_best(found.values()).keep))
    best = _best(found.values())
    if usual is not None:
        bucket_bytes, prefetch, kept = usual
        attempt(kept, bucket_bytes, prefetch)
        same = found.get((kept, bucket_bytes, prefetch))
        best = same if same is not None and same.seconds * (1 - SURE) <= best.seconds else best
    return asdict(best)


def _best(found: Collection[Choice]) -> Choice:
    fastest = min(c.seconds for c in found)
    return min((c for c in found if c.seconds <= fastest * (1 + WORTH)), key=lambda c: c.peak_gathered_bytes)
