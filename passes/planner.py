"""Choose a plan by simulating many: bucket size, prefetch, what to keep for backward, and the limit that the memory allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

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


def order_of_keeping(works: Iterable[Work]) -> list[tuple[str, int]]:
    """What may be kept for backward, FQN and bytes: the last of forward first."""
    return keepable([base_of(w) for w in works])


def keeps(order: Sequence[tuple[str, int]], usual: frozenset[str] = NOTHING, most: float = math.inf) -> list[frozenset[str]]:
    """What to try to keep, of what may be, from nothing to everything: the first of ``order``, up to each share of its bytes; and
    ``usual``, what the default options keep. Sets of more than ``most`` bytes are left out."""
    total = sum(nbytes for _, nbytes in order)
    sets = dict.fromkeys([*(frozenset(first_of(order, share * total)) for share in KEEP), usual])
    return [s for s in sets if sum(nbytes for fqn, nbytes in order if fqn in s) <= most]


def first_of(order: Iterable[tuple[str, int]], nbytes: float = math.inf) -> list[str]:
    """The first of ``order``, as far as they take no more than ``nbytes`` together."""
    taken = []
    for fqn, size in order:
        if size > nbytes:
            break
        taken.append(fqn)
        nbytes -= size
    return taken


def choose(
    build: Build,
    machine: Machine,
    memory_budget: int | None = None,
    buckets: Sequence[int | None] = BUCKETS,
    prefetches: Sequence[int] = PREFETCH,
    keep: Sequence[frozenset[str]] = (NOTHING,),
    usual: tuple[int | None, int, frozenset[str]] | None = None,
    limited: bool = True,
) -> Choice:
    """The fastest plan whose gathered weights never take more than ``memory_budget`` bytes (None: any number). ``keep``: sets of weights
    to try to keep (`keeps`), the smallest first.

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
        choice = _tried(build, machine, bucket_bytes, prefetch, limit, kept)
        if choice is not None and (memory_budget is None or choice.peak_gathered_bytes <= memory_budget):
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
    return best


def spend(build: Build, machine: Machine, memory_budget: int, choice: Choice, order: Sequence[str]) -> Choice:
    """``choice`` with more weights kept for backward, as many of ``order`` as the budget has room for, unless that is predicted to be
    slower: memory that is given is used to send less, which no prediction values fully where sending takes the processor."""
    best, low, high = choice, 0, len(order)
    while low < high:
        n = (low + high + 1) // 2
        more = _tried(build, machine, choice.bucket_bytes, choice.prefetch, choice.limit_all_gathers, {*choice.keep, *order[:n]})
        if more is not None and more.peak_gathered_bytes <= memory_budget and more.seconds <= choice.seconds:
            best, low = more, n
        else:
            high = n - 1
    return best


def _tried(
    build: Build, machine: Machine, bucket_bytes: int | None, prefetch: int, limit: int | None, keep: Collection[str]
) -> Choice | None:
    """What a plan is predicted to do; None if the limit cannot be kept."""
    try:
        works = build(bucket_bytes, prefetch, limit, frozenset(keep))
    except ValueError:
        return None
    t = simulate(works, machine, limit_gathers=limit)
    return Choice(bucket_bytes, prefetch, limit, tuple(sorted(keep)), t.step, t.exposed_seconds, t.peak_gathered_bytes)


def _best(found: Collection[Choice]) -> Choice:
    fastest = min(c.seconds for c in found)
    return min((c for c in found if c.seconds <= fastest * (1 + WORTH)), key=lambda c: c.peak_gathered_bytes)
