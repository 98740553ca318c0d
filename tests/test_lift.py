"""lift: gathers at a graph's entry become operators that take the shards themselves; nothing else changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_compile.passes.lift import ENTRY
from fsdp_compile.passes.pipeline import Scheduled, run_passes
from graphs import Program, capture, chain, plan_of
from ranks import Ranks
from torch import fx

from fsdp_compile.spec import Entry


def both(program: Program, direction: str = "forward", **plan: Any) -> tuple[fx.GraphModule, fx.GraphModule, Scheduled]:
    """The graph after verify, the graph after lift (both with their frees), and the passes' result."""
    got = capture(program)
    gm = got.forward() if direction == "forward" else got.backward()
    seen: dict[str, fx.Graph] = {}
    watch = lambda stage, g: seen.update({stage: copy.deepcopy(g)}) if stage in ("verify", "lift") else None  # noqa: E731
    done = run_passes(gm.graph, direction, replace(plan_of(**plan), lift=True), got.escaping, watch)
    return fx.GraphModule(gm, seen["verify"]), fx.GraphModule(gm, seen["lift"]), done


def lifted(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is ENTRY]


def params(done: Scheduled) -> list[tuple[str, ...]]:
    return [e.params for e in done.entries]


@pytest.mark.parametrize("transport", ["native", "all_to_all", "own"])
@pytest.mark.parametrize(("bucket_bytes", "prefetch"), [(0, 0), (0, 1), (0, 3), (200, 1), (1 << 20, 1)])
@pytest.mark.parametrize("dtypes", [{}, {"dtype": torch.float32, "compute_dtype": torch.bfloat16}])
def test_the_same_is_computed(transport: str, bucket_bytes: int, prefetch: int, dtypes: dict[str, Any]) -> None:
    program = chain(5, **dtypes)
    before, after, done = both(program, bucket_bytes=bucket_bytes, prefetch=prefetch, transport=transport)
    assert len(lifted(after)) == len(done.entries) > 0 == len(lifted(before))
    args = [program.shards(r) + program.inputs_of(r) for r in range(2)]
    for got, want in zip(Ranks(after, 2).run(args), Ranks(before, 2).run(args)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_only_what_is_launched_before_the_first_operation() -> None:
    assert params(both(chain(5), bucket_bytes=0, prefetch=0)[2]) == [("layer0.w0",)]
    assert params(both(chain(5), bucket_bytes=0, prefetch=1)[2]) == [("layer0.w0",), ("layer1.w0",)]
    assert params(both(chain(5), bucket_bytes=200, prefetch=1)[2]) == [("layer0.w0", "layer1.w0"), ("layer2.w0", "layer3.w0")]
    assert params(both(chain(5), "backward", bucket_bytes=0, prefetch=1)[2]) == [("layer4.w0",)]


def test_inputs_are_the_shards_and_casts_are_taken_in() -> None:
    program = chain(3, dtype=torch.float32, compute_dtype=torch.bfloat16)
    before, after, done = both(program, bucket_bytes=200, prefetch=0, transport="own")
    (entry,) = done.entries
    assert (entry.dtype, entry.own, entry.world, entry.group) == ("bfloat16", True, 2, "g")
    assert [[n for n in after.graph.nodes if n.op == "placeholder"][i].name for i in entry.inputs] == [
        a.name for a in lifted(after)[0].all_input_nodes
    ]
    casts = lambda gm: sum(n.target is torch.ops.prims.convert_element_type.default for n in gm.graph.nodes)  # noqa: E731
    assert casts(before) - casts(after) == len(entry.params)
    assert entry.text == "bfloat16 group g: layer0.w0, layer1.w0, layer2.w0"


def test_packed_and_complex_stay() -> None:
    assert not both(chain(4), bucket_bytes=200, mode="packed")[2].entries
    program = chain(2, dtype=torch.complex128)
    assert not both(program, bucket_bytes=0)[2].entries


def test_an_entry_checks_itself() -> None:
    with pytest.raises(ValueError, match="2 parameters of 1 inputs"):
        Entry(("a", "b"), (0,), 2, "g", "float32", False)
