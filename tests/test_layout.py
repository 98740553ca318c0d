"""FlatLayout: slots in order, aligned, without overlap; bad layouts cannot be built."""

from __future__ import annotations

import pytest
import torch
from fsdp_compile.runtime.layout import ALIGN_BYTES, FlatLayout, Slot, make_layout
from graphs import spec
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.complex128]),
)
def test_slots(shapes: list[list[int]], world: int, dtype: torch.dtype) -> None:
    specs = [spec(f"p{i}", *shape, world=world, dtype=dtype) for i, shape in enumerate(shapes)]
    layout = make_layout(specs)
    assert [s.spec for s in layout.slots] == specs
    end = 0
    for slot in layout.slots:
        assert slot.offset * dtype.itemsize % ALIGN_BYTES == 0
        assert 0 <= slot.offset - end < ALIGN_BYTES // min(dtype.itemsize, ALIGN_BYTES) or slot.offset == end
        end = slot.offset + slot.spec.shard_numel
    assert layout.numel == end and layout.nbytes == end * dtype.itemsize
    least = sum(s.local_numel(0) for s in specs) * dtype.itemsize
    assert layout.nbytes >= least
    exact = sum(s.numel / (world if s.kind == "shard" else 1) for s in specs) * dtype.itemsize
    assert abs(layout.padding_bytes - (layout.nbytes - exact)) < 1


def test_the_same_on_every_rank_and_for_equal_specs() -> None:
    specs = [spec("a", 5, 3), spec("b"), spec("c", 2)]
    assert make_layout(specs) == make_layout(list(specs))
    assert [s.offset for s in make_layout(specs).slots] == [0, 10, 12]  # 9, then 1 element, in steps of two float64


@pytest.mark.parametrize(
    "slots, numel, match",
    [
        ([("a", 0), ("b", 2)], 99, "b: slot at 2 overlaps the one before it, which ends at 4"),
        ([("a", 1)], 99, "a: slot at element 1 is not aligned to 16 bytes"),
        ([("a", 0), ("b", 4)], 7, "slots end at 8, beyond the buffer of 7 elements"),
        ([("b", 4), ("a", 0)], 99, "a: slot at 0 overlaps"),
    ],
)
def test_bad_layouts(slots: list[tuple[str, int]], numel: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FlatLayout(torch.float64, tuple(Slot(spec(n, 8), at) for n, at in slots), numel)


def test_mixed_dtypes_and_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"b: dtype torch.float32 in a buffer of torch.float64"):
        make_layout([spec("a", 2), spec("b", 2, dtype=torch.float32)])
    with pytest.raises(ValueError, match="at least one parameter"):
        make_layout([])
