"""ParamSpec: chunks as DTensor cuts them, and a text that reads back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from graphs import shard, spec, unshard_all
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compile.spec import DTYPES, ParamSpec, decode, dtype_name

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)
names = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def specs(draw: st.DrawFn) -> ParamSpec:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    real = [d for d in DTYPES.values() if not d.is_complex]
    compute = dtype if dtype.is_complex else draw(st.sampled_from(real))
    reduce = dtype.to_real() if dtype.is_complex else draw(st.sampled_from(real))
    kind = draw(st.sampled_from(["shard", "replicate"]))
    shape = draw(shapes) if kind == "shard" else ()
    op, reshard = draw(st.sampled_from(["avg", "sum"])), draw(st.booleans())
    group, world = draw(st.sampled_from(["0", "dp", "a x 2 | b"])), draw(st.integers(1, 9))
    return ParamSpec(draw(names), shape, dtype, compute, reduce, group, world, op, kind, reshard)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(specs())
def test_text_reads_back(s: ParamSpec) -> None:
    assert decode(s.encode()) == s and str(s) == s.encode()


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(shapes, st.integers(1, 9))
def test_shards_are_dtensors_chunks_padded_to_equal_length(shape: tuple[int, ...], world: int) -> None:
    s = spec("w", *shape, world=world)
    value = torch.arange(s.numel, dtype=s.dtype).reshape(shape)
    chunks = list(value.chunk(world)) if shape[0] else []
    chunks += [value[:0]] * (world - len(chunks))
    parts = [shard(s, value, r) for r in range(world)]
    for rank, (chunk, part) in enumerate(zip(chunks, parts)):
        assert s.local_shape(rank) == tuple(chunk.shape)
        assert s.local_numel(rank) == chunk.numel() <= s.shard_numel == part.numel()
        assert torch.equal(part[: chunk.numel()].reshape(chunk.shape), chunk) and not part[chunk.numel() :].any()
    assert sum(s.local_numel(r) for r in range(world)) == s.numel <= s.padded_numel == world * s.shard_numel
    assert torch.equal(unshard_all(s, parts), value)
    assert s.gathered_bytes == s.padded_numel * s.dtype.itemsize


def test_the_text_of_the_docstring() -> None:
    s = ParamSpec("emb.weight", (31, 16), torch.float32, torch.bfloat16, torch.float32, "0", 2)
    want = "float32[31, 16] | compute bfloat16 | reduce float32 avg | group 0 x 2 | shard reshard | emb.weight"
    assert s.encode() == want


def test_scalars_are_replicated_and_complex_numbers_travel_as_pairs() -> None:
    s = spec("s", world=3)
    assert (s.shard_numel, s.padded_numel, s.local_shape(2), s.rows_of(2)) == (1, 3, (), (0, 1))
    c = spec("c", 4, 3, world=3, dtype=torch.complex64)
    assert (c.wire_factor, c.real_dtype, c.shard_numel, c.gathered_bytes) == (2, torch.float32, 6, 18 * 8)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"world": 0}, "world size must be at least 1"),
        ({"kind": "row"}, "kind must be one of"),
        ({"reduce_op": "max"}, "reduce op must be one of"),
        ({"shape": ()}, "a scalar cannot be sharded"),
        ({"dtype": torch.int8}, "dtype torch.int8 cannot be sharded"),
        ({"reduce_dtype": torch.float8_e4m3fn}, "dtype torch.float8_e4m3fn cannot be sharded"),
        ({"dtype": torch.complex64}, "a complex parameter is gathered and reduced in its own precision"),
    ],
)
def test_bad_specs_name_the_parameter(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=f"^the.name: {match}"):
        dataclasses.replace(spec("the.name", 4, 4), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "float32[2]", "float32[2] | compute x | reduce", spec("w", 2).encode().replace("reshard", "drop")])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a parameter spec"):
        decode(text)


@pytest.mark.parametrize("part", ["float64[2", "compute float64", "reduce float64"])
def test_an_unknown_dtype_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="float12"):
        decode(spec("w", 2).encode().replace(part, part.replace("float64", "float12")))


def test_dtype_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16" and all(DTYPES[dtype_name(d)] is d for d in DTYPES.values())
