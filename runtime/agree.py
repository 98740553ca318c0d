"""Agreement between ranks through the store: no collective, bounded time, and the first difference shown on every rank.

Each (group, topic) has a counter, so that the n-th thing that one rank compiles is compared with the n-th on the others.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import weakref
from collections import Counter

import torch.distributed as dist

from fsdp_compile import compat

# By process group; a group made anew starts from nothing. (A ProcessGroup takes no attributes of its own.)
_counters: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


class RankMismatch(RuntimeError):
    """Ranks hold different models, plans or options. Raised on every rank, with the first differing line."""


def digest(lines: list[str]) -> str:
    """A short hash of ``lines``."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def agree(group: dist.ProcessGroup, topic: str, lines: list[str], timeout_s: float) -> None:
    """Compare ``lines`` with every other rank of ``group``.

    Raises `RankMismatch` if they differ, or if a rank does not come to the same point within ``timeout_s`` seconds: on that rank, too,
    when it comes."""
    size, rank = group.size(), group.rank()
    if size == 1 or dist.get_backend(group) == "fake":  # a fake group has no peers to ask
        return
    counter = _counters.setdefault(group, Counter())
    counter[topic] += 1
    store = dist.PrefixStore(f"fsdp_compile/{group.group_name}/{topic}/{counter[topic]}", compat.default_store())
    store.set(f"text{rank}", "\n".join(lines))
    store.set(f"digest{rank}", digest(lines))
    missing: int | None = None
    cause: Exception | None = None
    for r in range(size):
        try:
            store.wait([f"digest{r}"], datetime.timedelta(seconds=timeout_s))
        except (dist.DistStoreError, RuntimeError) as e:
            missing, cause = r, e
            break
    # Whatever is said first holds for all: who comes after another has given up must not go on into a collective alone.
    said = "all" if missing is None else f"{rank} {missing}"
    with contextlib.suppress(dist.DistStoreError, RuntimeError):  # the store is gone, too
        said = store.compare_set("outcome", "", said).decode()
    if said != "all":
        gone, missing = map(int, said.split())
        late = "" if gone == rank else f"Rank {gone} has given up waiting for it. "
        raise RankMismatch(
            f"{topic} {counter[topic]}: rank {missing} of group {group.group_name!r} did not come to this point within {timeout_s:g} s. "
            f"{late}It has failed, runs another model, or is still compiling (option timeout_s).\nThis is rank {rank}, at:\n{_head(lines)}"
        ) from cause
    digests = [store.get(f"digest{r}").decode() for r in range(size)]
    odd = [r for r in range(1, size) if digests[r] != digests[0]]
    if odd:
        zero = store.get("text0").decode().split("\n")
        other = store.get(f"text{odd[0]}").decode().split("\n")
        raise RankMismatch(f"{topic} {counter[topic]}: rank {odd[0]} differs from rank 0. {_first_difference(zero, other, odd[0])}")


def _first_difference(zero: list[str], other: list[str], rank: int) -> str:
    for i in range(max(len(zero), len(other))):
        a = zero[i] if i < len(zero) else "(nothing)"
        b = other[i] if i < len(other) else "(nothing)"
        if a != b:
            return f"First difference, line {i + 1}:\n  rank 0: {a}\n  rank {rank}: {b}"
    return "The texts are equal but their digests are not."


def _head(lines: list[str]) -> str:
    return "\n".join(lines[:3] + (["…"] if len(lines) > 3 else []))
