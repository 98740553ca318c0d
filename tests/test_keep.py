"""keep: gathered weights that forward uses last are carried to backward, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_compile.passes.keep import kept as keep_of
from fsdp_compile.passes.pipeline import collective_table
from graphs import Captured, Program, Read, assert_same, capture, chain, plan_of, reference, scheduled, spec, train

from fsdp_compile.options import parse

ONE = 4 * 3 * 8  # bytes of a gathered 3 x 3 weight in float64 on two ranks, with its row of padding


def gathers(got: Captured, direction: str) -> list[str]:
    gm = got.forward() if direction == "forward" else got.backward()
    scheduled(gm, direction, plan_of(0))
    return [p for row in collective_table(gm.graph) if row.kind == "all_gather" for p in row.params]


@pytest.mark.parametrize("style", ["fx", "inductor"])
@pytest.mark.parametrize(("nbytes", "kept"), [(0, 0), (ONE - 1, 0), (ONE, 1), (3 * ONE - 1, 2), (3 * ONE, 3), (1 << 20, 5)])
def test_the_last_used_stay_gathered(style: str, nbytes: int, kept: int) -> None:
    program = chain(5)
    got = capture(program, style, keep_bytes=nbytes)
    names = [f"layer{i}.w0" for i in range(5)]
    assert gathers(got, "forward") == names
    # The first layer's weight is not needed for the gradient of an input that wants none.
    assert gathers(got, "backward") == [n for n in reversed(names[1 : 5 - kept])]
    assert_same(train(program, plan_of(0), got), reference(program))


@pytest.mark.parametrize(("world", "count"), [(2, 3), (3, 2), (8, 0), (1, 0)])
def test_by_default_one_rank_s_shards(world: int, count: int) -> None:
    """Of six equal weights: a half, a third; none on eight ranks, whose shards are smaller than any weight; on one rank nothing is
    gathered."""
    program = chain(6, width=8)
    program = replace(program, specs=tuple(replace(s, world=world) for s in program.specs))
    joint = capture(program).joint
    assert joint is not None
    assert keep_of(joint, None) == {f"layer{i}.w0" for i in range(6 - count, 6)}


def test_never_by_default_where_reshard_says_true() -> None:
    program = chain(4)
    specs = tuple(replace(s, reshard=True if i == 3 else None) for i, s in enumerate(program.specs))
    joint = capture(replace(program, specs=specs)).joint
    assert joint is not None
    assert keep_of(joint, None) == {"layer1.w0", "layer2.w0"}
    assert "layer3.w0" in keep_of(joint, 1 << 20)


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ({}, None),
        ({"keep_bytes": 5}, 5),
        ({"reshard_after_forward": True}, 0),
        ({"reshard_after_forward": True, "keep_bytes": 5}, 5),
        ({"limit_all_gathers": 100}, 0),
        ({"collective": "packed"}, 0),
        ({"plan": {}}, 0),
        ({"plan": "auto"}, None),
        ({"plan": "auto", "memory_budget": 100}, 0),
        ({"plan": "fixed"}, None),
    ],
)
def test_what_the_options_ask_for(given: dict[str, Any], nbytes: int | None) -> None:
    assert parse(given).kept_bytes == nbytes


def big_head(read: Read, x: Any) -> Any:
    x = torch.tanh(x @ read("first"))
    x = torch.tanh(x @ read("second"))
    return x @ read("head")


def test_one_too_large_is_passed_over() -> None:
    program = Program(big_head, (spec("first", 3, 3), spec("second", 3, 3), spec("head", 3, 90)), (torch.empty(2, 3, dtype=torch.float64),))
    got = capture(program, keep_bytes=ONE)
    assert got.joint is not None and keep_of(got.joint, ONE) == {"second"}
    assert gathers(got, "backward") == ["head"]


def reused(read: Read, x: Any) -> Any:
    x = torch.tanh(x @ read("tied"))
    x = torch.tanh(x @ read("middle"))
    return x @ read("tied").t()


def test_a_tied_weight_counts_where_it_is_keep_of() -> None:
    program = Program(reused, (spec("tied", 3, 3), spec("middle", 3, 3)), (torch.empty(2, 3, dtype=torch.float64),))
    got = capture(program, keep_bytes=ONE)
    assert got.joint is not None and keep_of(got.joint, ONE) == {"tied"}
    assert gathers(got, "backward") == ["middle"]
    assert_same(train(program, plan_of(0), got), reference(program))


def test_nothing_to_keep_without_a_backward() -> None:
    got = capture(chain(2), grad=False, keep_bytes=1 << 20)
    assert got.joint is None or keep_of(got.joint, 1 << 20) == frozenset()
    assert gathers(got, "forward") == ["layer0.w0", "layer1.w0"]
