"""A plan that is written down: by hand, by `Report.plan`, or by the planner. JSON, every part optional::

    {"forward":  {"gather": [["emb.weight"], ["l0.w", "l0.b"]], "prefetch": 2},
     "backward": {"gather": [["l0.w", "l0.b"]], "reduce": [["l0.w", "l0.b"], ["emb.weight"]], "prefetch": [2, 1]},
     "keep": ["head.weight"],
     "limit_all_gathers": 1000000}

``gather`` and ``reduce``: buckets, as FQNs; what no bucket names is bucketed by size. Members of a bucket that are not neighbours in the
graph (of one group and dtype) still travel apart. ``prefetch``: how many buckets ahead a gather is launched; a list has one number for
each bucket, and its last one for all others. ``keep``: weights that stay gathered from forward to backward. ``limit_all_gathers``: as the
option.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .pipeline import Plan

Buckets = tuple[tuple[str, ...], ...]
Row = tuple[str, str, Sequence[str]]

_PARTS = {"forward": ("gather", "prefetch"), "backward": ("gather", "reduce", "prefetch")}


@dataclass(frozen=True)
class Written:
    """A written plan, read and checked. ``buckets``: ``"forward gather"``, ``"backward gather"`` or ``"backward reduce"`` → buckets;
    ``prefetch``: direction → numbers."""

    buckets: Mapping[str, Buckets] = field(default_factory=dict)
    prefetch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keep: frozenset[str] = frozenset()
    limit_all_gathers: int | None = None

    def __post_init__(self) -> None:
        for where, buckets in self.buckets.items():
            seen: dict[str, int] = {}
            for i, members in enumerate(buckets, 1):
                if not members:
                    raise ValueError(f"option plan, {where}: bucket {i} is empty")
                for fqn in members:
                    if fqn in seen:
                        again = "twice in one bucket" if seen[fqn] == i else "in two buckets"
                        raise ValueError(f"option plan, {where}: {fqn!r} is {again}, number {seen[fqn]} and number {i}")
                    seen[fqn] = i
        for direction, numbers in self.prefetch.items():
            if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
                raise ValueError(f"option plan, {direction} prefetch: whole numbers from 0 on, at least one; got {list(numbers)}")

    @property
    def fqns(self) -> frozenset[str]:
        """Every parameter that it names."""
        return self.keep.union(*(members for buckets in self.buckets.values() for members in buckets))

    def applied(self, plan: Plan, direction: str) -> Plan:
        """``plan`` with what is written for this direction."""
        gather, reduce = (_labels(self.buckets.get(f"{direction} {kind}", ())) for kind in ("gather", "reduce"))
        bucket = replace(plan.bucket, label_of={**plan.bucket.label_of, **gather}, reduce_label_of={**plan.bucket.label_of, **reduce})
        schedule = plan.schedule
        if direction in self.prefetch:
            schedule = replace(schedule, prefetch=self.prefetch[direction])
        if self.limit_all_gathers is not None:
            schedule, bucket = replace(schedule, limit_gathers=self.limit_all_gathers), replace(bucket, limit=self.limit_all_gathers)
        return replace(plan, bucket=bucket, schedule=schedule)


def _labels(buckets: Buckets) -> dict[str, str]:
    return {fqn: f"written {i}" for i, members in enumerate(buckets) for fqn in members}


def read(plan: Mapping[str, Any] | str | os.PathLike[str]) -> Written:
    """A dict, or the name of a JSON file, → `Written`. Raises ValueError that says what is wrong."""
    if not isinstance(plan, Mapping):
        try:
            plan = json.loads(Path(plan).read_text())
        except OSError as error:
            raise ValueError(f"option plan: {str(plan)!r} is not 'auto', 'fixed' or a file that can be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"option plan: {plan} is not JSON: {error}") from error
        if not isinstance(plan, Mapping):
            raise ValueError(f"option plan: a JSON object is expected, not {type(plan).__name__}")
    _refuse_unknown("", plan, (*_PARTS, "keep", "limit_all_gathers"))
    limit = plan.get("limit_all_gathers")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
        raise ValueError(f"option plan, limit_all_gathers: a number of bytes is expected, got {limit!r}")
    buckets: dict[str, Buckets] = {}
    prefetch: dict[str, tuple[int, ...]] = {}
    for direction, parts in _PARTS.items():
        given = plan.get(direction, {})
        if not isinstance(given, Mapping):
            raise ValueError(f"option plan, {direction}: an object with {', '.join(parts)} is expected, got {given!r}")
        _refuse_unknown(f", {direction}", given, parts)
        for kind in ("gather", "reduce"):
            if kind in given:
                buckets[f"{direction} {kind}"] = _buckets(f"{direction} {kind}", given[kind])
        if "prefetch" in given:
            numbers = given["prefetch"]
            prefetch[direction] = tuple(numbers) if isinstance(numbers, (list, tuple)) else (numbers,)
    return Written(buckets, prefetch, frozenset(_names("keep", plan.get("keep", ()))), limit)


def _refuse_unknown(where: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"option plan{where}: unknown part {name!r}; there are: {', '.join(known)}")


def _buckets(where: str, given: Any) -> Buckets:
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"option plan, {where}: a list of buckets is expected, each a list of FQNs; got {given!r}")
    return tuple(_names(f"{where}, bucket {i}", members) for i, members in enumerate(given, 1))


def _names(where: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(x, str) for x in given):
        raise ValueError(f"option plan, {where}: a list of FQNs is expected, got {given!r}")
    return tuple(given)


def write(rows: Iterable[Row], prefetch: Mapping[str, Sequence[int]], keep: Iterable[str], limit: int | None = None) -> dict[str, Any]:
    """The plan that gives these collectives, each (direction, kind, FQNs) in launch order, with ``prefetch`` by direction; `read` takes it
    back. A parameter that several graphs gather stands where it comes first."""
    out: dict[str, Any] = {"forward": {"gather": []}, "backward": {"gather": [], "reduce": []}}
    seen: set[tuple[str, str, str]] = set()
    for direction, kind, fqns in rows:
        part = "gather" if kind == "all_gather" else "reduce"
        new = [f for f in fqns if (direction, part, f) not in seen]
        seen.update((direction, part, f) for f in new)
        if new:
            out[direction][part].append(new)
    for direction in _PARTS:
        numbers = list(prefetch[direction])
        out[direction]["prefetch"] = numbers if len(numbers) > 1 else numbers[0]
    out["keep"] = sorted(keep)
    if limit is not None:
        out["limit_all_gathers"] = limit
    return out
