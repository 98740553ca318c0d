"""lower: frees disappear, nothing moves, and the graph runs alone."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp_compile.passes.graph_ops import FREE, set_order
from fsdp_compile.passes.lower import lower
from graphs import capture, chain, plan_of, scheduled
from ranks import Ranks
from torch import fx


@pytest.mark.parametrize("mode", ["coalesced", "packed"])
def test_frees_disappear_and_nothing_moves(mode: str) -> None:
    program = chain(3)
    gm = capture(program).forward()
    scheduled(gm, "forward", plan_of(200, mode))
    args = [program.shards(r) + program.inputs_of(r) for r in range(2)]
    want = Ranks(fx.GraphModule(gm, copy.deepcopy(gm.graph)), 2).run(args)
    kept = [n for n in gm.graph.nodes if n.target is not FREE]
    count = len(gm.graph.nodes) - len(kept)
    assert count and lower(gm.graph) == count
    assert list(gm.graph.nodes) == kept
    for got, w in zip(Ranks(gm, 2).run(args), want):
        torch.testing.assert_close(got, w, rtol=0, atol=0)
    assert lower(gm.graph) == 0


def test_an_order_is_a_permutation_that_respects_dependencies() -> None:
    gm = capture(chain(2)).forward()
    order = list(gm.graph.nodes)
    with pytest.raises(ValueError, match="an order of"):
        set_order(gm.graph, order[:-1])
    with pytest.raises(ValueError, match="would run before its input"):
        set_order(gm.graph, order[::-1])
    set_order(gm.graph, order)
    assert list(gm.graph.nodes) == order


def test_simulated_ranks_notice_what_they_must() -> None:
    """The judge of all numerical tests: it must be able to fail."""
    program = chain(2)
    args = [program.shards(r) + program.inputs_of(r) for r in range(2)]
    gm = capture(program).forward()
    scheduled(gm, "forward", plan_of(0))
    launch = next(n for n in gm.graph.nodes if "all_gather" in str(n.target))
    (wait,) = launch.users
    broken = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    free = next(n for n in broken.graph.nodes if n.target is FREE)
    next(n for n in broken.graph.nodes if n.target is torch.ops.aten.mm.default).prepend(free)
    assert Ranks(broken, 2).run(args)[0][0].isnan().all(), "a freed buffer was read"
    with gm.graph.inserting_after(launch):
        gm.graph.call_function(torch.ops.aten.zero_.default, (launch.args[0],))
    with pytest.raises(AssertionError, match="changed while"):
        Ranks(gm, 2).run(args)
    wait.replace_all_uses_with(launch)
    gm.graph.erase_node(wait)
    with pytest.raises(AssertionError, match="never waited for"):
        Ranks(gm, 2).run(args)
