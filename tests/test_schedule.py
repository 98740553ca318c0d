"""schedule: where launches, waits, frees and reductions stand, and what a limit does to them."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from fsdp_compile.passes.bucket import bucket
from fsdp_compile.passes.graph_ops import alias_closure, positions
from fsdp_compile.passes.insert import insert
from fsdp_compile.passes.roles import nodes_of, role_of
from fsdp_compile.passes.schedule import SchedulePlan, gather_peak, schedule
from graphs import Captured, Program, Read, capture, chain, plan_of, scheduled, spec, text
from torch import fx

BYTES = 288  # gathered bytes of each 6 x 6 float64 matrix


@functools.cache
def captured(depth: int = 6) -> Captured:
    return capture(chain(depth, width=6))


def graph_of(direction: str, depth: int = 6, **plan: Any) -> fx.Graph:
    gm = getattr(captured(depth), direction)()
    scheduled(gm, direction, plan_of(**plan))
    return gm.graph


def is_compute(n: fx.Node) -> bool:
    return n.op == "call_function" and role_of(n) is None


def first_use(launch: fx.Node, at: dict[fx.Node, int]) -> int:
    aliases = alias_closure([launch])
    return min(at[u] for n in aliases for u in n.users if role_of(u) is None and u not in aliases)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["coalesced", "packed"])
@pytest.mark.parametrize("bucket_bytes", [0, 2 * BYTES])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_positions_of_gathers(direction: str, mode: str, bucket_bytes: int, prefetch: int) -> None:
    graph = graph_of(direction, bucket_bytes=bucket_bytes, mode=mode, prefetch=prefetch)
    at, order = positions(graph), list(graph.nodes)
    launches = [n for n, _ in nodes_of(graph, "gather")]
    uses = [first_use(n, at) for n in launches]
    assert uses == sorted(uses), "gathers are launched in order of first use"
    placeholders = sum(n.op == "placeholder" for n in order)
    for i, launch in enumerate(launches):
        bucket_name = role_of(launch).bucket  # type: ignore[union-attr]
        waits = [at[n] for n, r in nodes_of(graph, "wait_gather") if r.bucket == bucket_name]
        assert not any(is_compute(n) for n in order[min(waits) : uses[i]] if n not in alias_closure(launches)), "waited for too early"
        if i < prefetch:
            assert placeholders <= at[launch] and not any(is_compute(n) for n in order[: at[launch]]), "launched after the entry"
        else:
            assert at[launch] < uses[i - prefetch], "launched too late"
        if i > prefetch:
            assert at[launch] > uses[i - prefetch - 1], "launched too early"
        frees = [(n, r) for n, r in nodes_of(graph, "free") if r.bucket == bucket_name]
        for free, _ in frees:
            last = max(at[u] for a in alias_closure(free.all_input_nodes) for u in a.users if u is not free)
            assert not any(is_compute(n) for n in order[last + 1 : at[free]]), "freed too late"
            assert at[free] > last
        assert sum(r.nbytes for _, r in frees) == role_of(launch).nbytes  # type: ignore[union-attr]


def test_reductions_are_launched_when_ready_and_waited_for_late() -> None:
    graph = graph_of("backward", bucket_bytes=0)
    at, order = positions(graph), list(graph.nodes)
    launches = [n for n, _ in nodes_of(graph, "reduce")]
    assert len(launches) == 6
    for i, launch in enumerate(launches):
        packs = [n for n, r in nodes_of(graph, "pack") if r.bucket == f"rs{i + 1}"]
        ready = max(at[a] for n in (*packs, launch) for a in n.all_input_nodes if a not in packs)
        assert not any(is_compute(n) for n in order[ready + 1 : at[launch]]), "launched late"
        (wait,) = launch.users
        if i + 2 < 6:  # two of them are in flight before the first is waited for
            assert at[launches[i + 1]] < at[wait] < at[launches[i + 2]]
        else:
            assert not any(is_compute(n) for n in order[at[wait] :])


@pytest.mark.parametrize("limit, in_flight", [(1, 1), (BYTES, 1), (3 * BYTES, 3), (100 * BYTES, 6)])
def test_the_limit_on_reductions_in_flight(limit: int, in_flight: int) -> None:
    graph = graph_of("backward", bucket_bytes=0, reduces=limit)
    most = flying = 0
    for n in graph.nodes:
        kind = r.kind if (r := role_of(n)) else ""
        flying += (kind == "reduce") - (kind == "wait_reduce")
        most = max(most, flying)
    assert most == in_flight


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("buckets", [1, 2, 3])
def test_a_limit_on_gathers_is_kept_and_used(direction: str, prefetch: int, buckets: int) -> None:
    graph = graph_of(direction, bucket_bytes=0, prefetch=prefetch, limit=buckets * BYTES)
    assert gather_peak(graph) == min(buckets, prefetch + 1) * BYTES
    alive = most = 0
    for n in graph.nodes:
        kind = r.kind if (r := role_of(n)) else ""
        alive += BYTES * ((kind == "gather") - (kind == "free"))
        most = max(most, alive)
    assert most == gather_peak(graph) and alive == 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_limit_that_suffices_changes_nothing(direction: str) -> None:
    """What is freed counts no more: the last gathers are prefetched like the first."""
    free, tight = (graph_of(direction, bucket_bytes=0, prefetch=1, limit=limit) for limit in (None, 2 * BYTES))
    assert text(tight) == text(free)


def two_at_once(read: Read, x: Any) -> Any:
    a, b = read("a"), read("b")
    return torch.tanh(x @ a) @ b + x @ (a @ b @ read("c"))


def test_a_limit_that_is_too_small_says_the_least_possible() -> None:
    specs = tuple(spec(n, 6, 6) for n in "abc")
    got = capture(Program(two_at_once, specs, (torch.empty(2, 6, dtype=torch.float64),)))
    least = None
    with pytest.raises(ValueError, match=r"limit_all_gathers=300 is too small.*raise it to at least \d+") as e:
        scheduled(got.forward(), "forward", plan_of(0, limit=300))
    found = re.search(r"at least (\d+)", str(e.value))
    assert found is not None
    least = int(found[1])
    gm = got.forward()
    scheduled(gm, "forward", plan_of(0, limit=least))
    assert gather_peak(gm.graph) == least
    with pytest.raises(ValueError, match=f"at least {least}"):
        scheduled(got.forward(), "forward", plan_of(0, limit=least - 1))


def test_schedule_is_deterministic_and_settled() -> None:
    texts = {graph_of("backward", bucket_bytes=2 * BYTES).python_code("self").src for _ in range(3)}
    assert len(texts) == 1
    graph = graph_of("backward", bucket_bytes=2 * BYTES)
    schedule(graph, SchedulePlan(prefetch=1))  # the plan it was made with
    assert graph.python_code("self").src == texts.pop()


def test_the_programs_own_operations_keep_their_order() -> None:
    gm = captured().backward()
    insert(gm.graph, "backward")
    bucket(gm.graph, plan_of(2 * BYTES).bucket)
    views = set(alias_closure(n for n, _ in nodes_of(gm.graph, "wait_gather")))
    before = [n for n in gm.graph.nodes if role_of(n) is None and n not in views]
    schedule(gm.graph, SchedulePlan(2))
    assert [n for n in gm.graph.nodes if role_of(n) is None and n not in views] == before


def test_a_parameter_without_collective_does_not_pull_a_bucket_forward() -> None:
    """The empty parameter's name must not be taken for the second bucket's."""

    def fn(read: Read, x: Any) -> Any:
        x = torch.cat([x, read("empty")])
        for i in range(4):
            x = torch.tanh(x @ read(f"w{i}"))
        return x

    specs = (spec("empty", 0, 6), *(spec(f"w{i}", 6, 6) for i in range(4)))
    gm = capture(Program(fn, specs, (torch.empty(2, 6, dtype=torch.float64),))).forward()
    scheduled(gm, "forward", plan_of(2 * BYTES, prefetch=0))
    at = positions(gm.graph)
    second = nodes_of(gm.graph, "gather")[1][0]
    assert role_of(second).params == ("w2", "w3")  # type: ignore[union-attr]
    assert at[second] > at[next(n for n in gm.graph.nodes if n.target is torch.ops.aten.tanh.default)]


def test_a_gradient_that_exists_from_the_start_is_reduced_behind_the_inputs() -> None:
    def fn(read: Read, x: Any) -> Any:
        return read("w") + x, torch.tanh(x * read("v"))

    gm = capture(Program(fn, (spec("w", 6, 6), spec("v", 6)), (torch.empty(6, 6, dtype=torch.float64),))).backward()
    scheduled(gm, "backward", plan_of(0))
    ops = [n.op for n in gm.graph.nodes]
    assert ops == sorted(ops, key=["placeholder", "call_function", "output"].index)
    assert nodes_of(gm.graph, "reduce")[0][1].params == ("w",)


@pytest.mark.parametrize(
    "bad, option",
    [({"prefetch": -1}, "prefetch"), ({"limit_gathers": 0}, "limit_all_gathers"), ({"limit_reduces": -5}, "limit_reduce_scatters")],
)
def test_bad_plans(bad: dict[str, int], option: str) -> None:
    with pytest.raises(ValueError, match=option):
        SchedulePlan(**bad)


def test_snapshot_forward() -> None:
    assert_expected_inline(text(graph_of("forward", depth=2, bucket_bytes=0)), """\
all_gather_into_tensor_default = all_gather_into_tensor(primals_1)
all_gather_into_tensor_default_1 = all_gather_into_tensor(primals_2)
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
reshape_default = reshape(wait_tensor_default)
mm = mm(primals_3, reshape_default)
free_default = free(wait_tensor_default)
tanh = tanh(mm)
wait_tensor_default_1 = wait_tensor(all_gather_into_tensor_default_1)
reshape_default_1 = reshape(wait_tensor_default_1)
mm_1 = mm(tanh, reshape_default_1)
free_default_1 = free(wait_tensor_default_1)
tanh_1 = tanh(mm_1)
detach_1 = detach(tanh_1)
detach_2 = detach(detach_1)
t_2 = t(primals_3)
return tanh_1, primals_2, tanh, detach_2, t_2
""")


def test_snapshot_backward() -> None:
    assert_expected_inline(text(graph_of("backward", depth=2, bucket_bytes=0)), """\
all_gather_into_tensor_default = all_gather_into_tensor(primals_2)
tanh_backward = tanh_backward(tangents_1, detach_2)
t = t(tanh)
mm_2 = mm(t, tanh_backward)
reshape_default_1 = reshape(mm_2)
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default_1)
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
reshape_default = reshape(wait_tensor_default)
t_1 = t(reshape_default)
mm_3 = mm(tanh_backward, t_1)
free_default = free(wait_tensor_default)
detach = detach(tanh)
detach_3 = detach(detach)
tanh_backward_1 = tanh_backward(mm_3, detach_3)
mm_4 = mm(t_2, tanh_backward_1)
reshape_default_2 = reshape(mm_4)
reduce_scatter_tensor_default_1 = reduce_scatter_tensor(reshape_default_2)
wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default)
wait_tensor_default_2 = wait_tensor(reduce_scatter_tensor_default_1)
return wait_tensor_default_2, wait_tensor_default_1
""")
