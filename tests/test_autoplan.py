"""Option plan="auto": decided in the backend, right, within its memory budget, and alike on all ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import parity
import pytest
import torch
import torch.distributed as dist
from fsdp_compile.passes.machine import Link, Machine, Rates
from fsdp_compile.passes.pipeline import Plan, run_passes
from fsdp_compile.runtime.communicator import communicator
from graphs import capture, chain
from parity import Case, check
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import explain, fully_shard, make_plan
from fsdp_compile.autoplan import Automatic, decide
from fsdp_compile.calibrate import CalibrateConfig, cache_file
from fsdp_compile.lead import _measured as measured
from fsdp_compile.options import parse
from fsdp_compile.validate_worker import GatheredBytes

SLOW = Machine("slow net", Rates({"float32": 6e10}, 1e10, 3e-6), {"any": Link(5e-4, 1.2e7)}, backend="gloo")
SLOWER = Machine("slow net", Rates({"float64": 144.0}, 1e9), {"any": Link(1.0, 144.0)})
WIDTH = 288  # bytes of each of the chain's weights


def decided(budget: int | None, may_keep: bool = True, carried: int = 0, machine: Machine = SLOWER) -> Any:
    captured = capture(chain(6, width=6, per_layer=2), keep_bytes=carried)
    graphs = [("forward", captured.forward().graph), ("backward", captured.backward().graph)]
    return decide(graphs, Plan(), Automatic(machine, budget), captured.escaping, frozenset() if may_keep else None)


def test_memory_buys_kept_weights() -> None:
    rich, poor = decided(1 << 30), decided(4 * WIDTH)
    assert rich.keep and rich.limit == 1 << 30
    assert poor.limit == 4 * WIDTH and len(poor.keep) < len(rich.keep)
    assert not decided(1 << 30, may_keep=False).keep
    assert decided(1 << 30) == rich


def predicted(found: Any, carried: int) -> int:
    captured = capture(chain(6, width=6, per_layer=2), keep_bytes=carried)
    graphs = {"forward": captured.forward().graph, "backward": captured.backward().graph}
    done = [run_passes(graph, direction, found.applied(Plan()), captured.escaping) for direction, graph in graphs.items()]
    return max(d.peak_gathered_bytes for d in done)


@pytest.mark.parametrize("carried", [0, 4 * WIDTH], ids=["nothing", "four"])
def test_without_a_budget_no_more_memory_than_by_default(carried: int) -> None:
    captured = capture(chain(6, width=6, per_layer=2), keep_bytes=carried)
    graphs = {"forward": captured.forward().graph, "backward": captured.backward().graph}
    default = max(run_passes(graph, direction, Plan(), captured.escaping).peak_gathered_bytes for direction, graph in graphs.items())
    prompt = replace(SLOWER, links={"any": Link(1e-3, 144.0)})  # small buckets hide better, and cost nothing
    found = decided(None, may_keep=False, carried=carried, machine=prompt)
    assert found.bucket_bytes == 0 and not found.keep, "what these graphs carry, they carry"
    assert found.limit is None, "which a graph that reads alike and needs more could not keep"
    assert found.left >= 0 and predicted(found, carried) <= default


def test_too_small_a_budget_says_the_least() -> None:
    with pytest.raises(ValueError, match=r"option memory_budget: .* within 100 bytes here; the least possible is 288"):
        decided(100)
    assert decided(WIDTH).limit == WIDTH


@pytest.mark.parametrize("name, value", [("bucket_bytes", 1), ("prefetch", 1), ("keep_bytes", 1), ("bucket_modules", "Linear")])
def test_what_it_decides_cannot_be_given(name: str, value: Any) -> None:
    for options in ({"plan": "auto"}, {"memory_budget": 1 << 20}):
        with pytest.raises(ValueError, match=rf"options {name} and .*plan='auto'.* both decide this: leave {name} out"):
            parse({**options, name: value})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory_budget": 0}, "option memory_budget must be positive, got 0"),
        ({"memory_budget": "6MB"}, r"option memory_budget must be a whole number, got '6MB' \(write 6291456\)"),
        ({"memory_budget": 1 << 20, "plan": {}}, "option memory_budget is for plan='auto'"),
        ({"memory_budget": 1 << 20, "plan": "fixed"}, "option memory_budget is for plan='auto', not .* fixed"),
        ({"plan": "autoo"}, "option plan: 'autoo' is not 'auto', 'fixed' or a file that can be read"),
        ({"plan": 3}, "option plan must be 'auto', 'fixed', a dict or"),
        ({"memory_budget": 1 << 20, "collective": "packed"}, "option memory_budget: while a packed bucket"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        parse(options)


def test_what_needs_a_machine_says_so() -> None:
    with pytest.raises(ValueError, match=r"explain knows no machine to plan for: make a plan with make_plan"):
        explain(models.mlp(), torch.zeros(2, 10), plan="auto")
    with pytest.raises(ValueError, match="plan is what make_plan decides"):
        make_plan(models.mlp(), torch.zeros(2, 10), machine=SLOW, plan="auto")


# --- On ranks ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def calibrated(folder: str, machine: Machine = SLOW) -> Iterator[None]:
    """In it, rank 0 finds a calibration of this machine; only its word counts."""
    before = os.environ["FSDP_COMPILE_CACHE"]
    if dist.get_rank() == 0:
        os.environ["FSDP_COMPILE_CACHE"] = folder
        config = CalibrateConfig()
        cache_file(config.device, dist.get_world_size(), config.backend).write_text(machine.to_json())
    try:
        yield
    finally:
        os.environ["FSDP_COMPILE_CACHE"] = before


def train(folder: str, case: Case, options: dict[str, Any]) -> parity.Run:
    with calibrated(folder):
        return parity.sharded(case, "oneliner", {"lowering": "fx", **options})


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{"plan": "auto"}, {"memory_budget": 40_000}], ids=["auto", "budget"])
def test_parity(pool, tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    case = Case(models.decoder, models.token_batch, models.token_loss)
    for got in pool.run(world, train, str(tmp_path), case, options):
        parity.assert_close(got, parity.one_process(case))


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["fx", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.extra])])
def test_parity_measured_here(pool, lowering) -> None:
    """Without a calibration: measured when it is first needed, on a number of ranks, too, that divides no power of two."""
    check(pool, Case(models.mlp, models.vector_batch, models.square_loss), 3, lowering=lowering, options={"plan": "auto"})


def grown() -> float:
    """MB by which this process is larger after measuring."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    group = communicator(init_device_mesh("cpu", (dist.get_world_size(),)), 60.0)  # one-threaded: docs/known-issues.md
    before = resident()
    measured(group, "cpu")
    return resident() - before


@pytest.mark.extra
def test_measuring_leaves_no_memory_behind(pool) -> None:
    assert max(pool.run(2, grown)) < 200


def peaks(folder: str, budget: int | None) -> int:
    model = fully_shard(models.decoder())
    options: dict[str, Any] = {"lowering": "fx"} if budget is None else {"lowering": "fx", "memory_budget": budget}
    fast = torch.compile(model, backend="fsdp", options=options)
    x, y = models.token_batch(0)
    found = []
    with calibrated(folder):
        models.token_loss(fast(x), y).backward()
    for _ in range(4):
        with GatheredBytes() as seen:
            models.token_loss(fast(x), y).backward()
        found.append(seen.peak)
    return min(found)


def test_eighty_percent_of_the_default_s_peak(pool, tmp_path: Path) -> None:
    default = max(pool.run(2, peaks, str(tmp_path), None))
    budget = int(0.8 * default)
    assert 0 < max(pool.run(2, peaks, str(tmp_path), budget)) <= budget


def refused(folder: str) -> str:
    fast = torch.compile(models.mlp(), backend="fsdp", options={"lowering": "fx", "memory_budget": 8})
    with calibrated(folder), pytest.raises(Exception, match="least possible") as error:
        fast(torch.zeros(2, 10))
    return str(error.value)


def test_every_rank_refuses_what_cannot_be(pool, tmp_path: Path) -> None:
    for said in pool.run(2, refused, str(tmp_path)):
        assert "option memory_budget: no plan keeps gathered weights within 8 bytes here" in said
