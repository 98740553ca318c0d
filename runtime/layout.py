"""FlatLayout: where each parameter's shard lies in a flat buffer. Pure arithmetic, the same on every rank.

One buffer for each (group, dtype, requires_grad), in registration order, so that parameters that are used together are
neighbours in memory::

    rank r:  | a.shard (padded to equal length) | b.shard | . | c.shard |
             0                                  a.end     ^ alignment

The padding that DTensor's chunks need is inside each shard; between shards there is only alignment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fsdp_compile.spec import ParamSpec

ALIGN_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """One shard: ``buffer[offset : offset + spec.shard_numel]`` (elements)."""

    spec: ParamSpec
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one buffer of ``numel`` elements of ``dtype``; validates order, overlap, alignment and bounds."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int

    def __post_init__(self) -> None:
        end = 0
        for s in self.slots:
            if s.spec.dtype != self.dtype:
                raise ValueError(f"{s.spec.fqn}: dtype {s.spec.dtype} in a buffer of {self.dtype}")
            if s.offset < end:
                raise ValueError(f"{s.spec.fqn}: slot at {s.offset} overlaps the one before it, which ends at {end}")
            if s.offset * self.dtype.itemsize % ALIGN_BYTES:
                raise ValueError(f"{s.spec.fqn}: slot at element {s.offset} is not aligned to {ALIGN_BYTES} bytes")
            end = s.offset + s.spec.shard_numel
        if end > self.numel:
            raise ValueError(f"slots end at {end}, beyond the buffer of {self.numel} elements")

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer takes on each rank."""
        return self.numel * self.dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of the buffer on each rank beyond an exact 1/world share of every parameter (negative parts excluded)."""
        exact = sum(s.spec.numel / (s.spec.world if s.spec.kind == "shard" else 1) for s in self.slots)
        return math.ceil(self.nbytes - exact * self.dtype.itemsize)


def make_layout(specs: list[ParamSpec]) -> FlatLayout:
    """Lay ``specs`` (all of one dtype) one behind the other. Raises ValueError on an empty list or mixed dtypes."""
    if not specs:
        raise ValueError("a flat buffer needs at least one parameter")
    dtype = specs[0].dtype
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    slots, end = [], 0
    for s in specs:
        start = -(-end // step) * step
        slots.append(Slot(s, start))
        end = start + s.shard_numel
    return FlatLayout(dtype, tuple(slots), end)
