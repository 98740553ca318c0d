"""keep: gathered weights that forward uses last are carried to backward, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_compile.passes.keep import kept as keep_of
from fsdp_compile.passes.pipeline import collective_table
from graphs import Captured, Program, Read, assert_same, capture, chain, plan_of, reference, scheduled, spec, train

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
