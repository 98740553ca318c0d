"""make_plan and `fsdp-compile plan`: the plan keeps its budget, is predicted to be no slower than the default, and trains right."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner
from fsdp_compile.passes.machine import Link, Machine, Rates
from parity import Case, check
from torch import Tensor, nn

from fsdp_compile import explain, make_plan
from fsdp_compile.bench_model import example_file, load_file
from fsdp_compile.cli import main
from fsdp_compile.devices import device
from fsdp_compile.plan import Planned

MACHINE = Machine("cpu", Rates({"float32": 6e10}, 1e10, 3e-6), {"any": Link(5e-4, 1.2e8)}, backend="gloo", interference=0.3)
LEAST = 4 * 256 * 688  # bytes of the example decoder's largest weight, of a feed-forward layer in float32


def example() -> tuple[nn.Module, Tensor]:
    file = load_file(example_file("decoder.py"))
    return file.Decoder(file.DecoderConfig(layers=2)), torch.zeros(2, 64, dtype=torch.long)


@functools.cache
def planned(budget: int | None) -> Planned:
    model, x = example()
    return make_plan(model, x, machine=MACHINE, world_size=2, memory_budget=budget, lowering="fx")


def test_never_more_memory_nor_time_than_the_default() -> None:
    got = planned(None)
    assert got.predicted.peak_gathered_bytes <= got.memory_budget == got.default.peak_gathered_bytes
    assert got.predicted.step <= got.default.step


@pytest.mark.parametrize("share", [0.8, 2.5, 100.0])
def test_a_budget_is_kept_and_more_of_it_is_faster(share: float) -> None:
    budget = int(share * planned(None).memory_budget)
    got = planned(budget)
    assert got.predicted.peak_gathered_bytes <= budget
    assert got.report.peak_gathered_bytes <= budget
    kept, all_kept = got.report.kept, planned(int(100 * planned(None).memory_budget)).report.kept
    assert kept <= all_kept
    if share > 1:
        assert kept and got.predicted.step < planned(None).predicted.step
        assert got.report.bytes_per_step < planned(None).report.bytes_per_step


def test_too_small_a_budget_says_the_least() -> None:
    with pytest.raises(ValueError, match=f"within 1000 bytes; the least possible is {LEAST}"):
        planned(1000)
    assert planned(LEAST).predicted.peak_gathered_bytes == LEAST


def test_the_plan_is_what_was_predicted() -> None:
    """Honoured as a file: the same collectives in the same places."""
    got = planned(int(2.5 * planned(None).memory_budget))
    model, x = example()
    again = explain(model, x, world_size=2, lowering="fx", transport="own", plan=json.loads(json.dumps(got.plan)))
    assert [(b.kind, b.parameters, b.launch, b.wait) for b in again.buckets] == [
        (b.kind, b.parameters, b.launch, b.wait) for b in got.report.buckets
    ]


class Broken(nn.Module):
    """Two graphs, of which the first ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h)


@pytest.mark.parametrize("make", [models.mlp, Broken])
@pytest.mark.parametrize("collective", ["coalesced", "packed"])
def test_never_slower_than_the_default_where_that_fits(make: Any, collective: str) -> None:
    x = torch.zeros(4, 10 if make is models.mlp else 40)
    args: dict[str, Any] = {"machine": device("H100"), "world_size": 2, "lowering": "fx", "collective": collective}
    got = make_plan(make(), x, **args)
    assert got.predicted.step <= got.default.step
    least = explain(make(), x, world_size=2, lowering="fx", collective=collective, bucket_bytes=0, prefetch=0).peak_gathered_bytes
    assert make_plan(make(), x, memory_budget=least, **args).predicted.peak_gathered_bytes <= least


def test_one_rank_gathers_nothing() -> None:
    got = make_plan(models.mlp(), torch.zeros(2, 10), machine=MACHINE, world_size=1, lowering="fx")
    assert got.predicted.peak_gathered_bytes == 0 and got.plan["forward"]["gather"] == []


@pytest.mark.parametrize(
    "args, message",
    [
        ({"machine": "H100"}, r"machine must be a Machine, such as .*device\('H100'\)"),
        ({"machine": MACHINE, "memory_budget": "6MB"}, r"memory_budget must be a whole number of bytes, got '6MB' \(write 6291456\)"),
        ({"machine": MACHINE, "memory_budget": 1e6}, "memory_budget must be a whole number"),
        ({"machine": MACHINE, "world_size": 2.0}, "world_size must be a whole number"),
    ],
)
def test_wrong_types_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_plan(models.mlp(), torch.zeros(2, 10), **args)


@pytest.mark.parametrize("name", ["bucket_bytes", "prefetch", "keep_bytes", "plan"])
def test_what_it_decides_cannot_be_given(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is what make_plan decides"):
        make_plan(models.mlp(), torch.zeros(2, 10), machine=MACHINE, **{name: 1})


def test_a_planned_training(pool) -> None:
    case = Case(models.decoder, models.token_batch, models.token_loss)
    plan = make_plan(models.decoder(), models.token_batch(0)[0], machine=MACHINE, world_size=2, memory_budget=1 << 30, lowering="fx").plan
    assert plan["keep"]
    check(pool, case, 2, options={"plan": plan})


FACTORY = """
from torch import nn, zeros

def make():
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False)), (zeros(2, 16),)
"""


def run(folder: Path, *args: str) -> Any:
    (folder / "tiny.py").write_text(FACTORY)
    where = [f"{folder / 'tiny.py'}:make", "--world-size", "2", "--machine", "A100", "--out", str(folder / "plan.json")]
    return CliRunner().invoke(main, ["plan", *where, *args])


def test_command(tmp_path) -> None:
    got = run(tmp_path, "--memory-budget", "2048", "--options", '{"lowering": "fx"}')
    assert got.exit_code == 0, got.output
    out = tmp_path / "plan.json"
    assert "within 2.0 KiB of gathered weights" in got.output and f'options={{"plan": "{out}"}}' in got.output
    assert set(json.loads(out.read_text())) == {"forward", "backward", "keep", "limit_all_gathers"}


@pytest.mark.parametrize(
    "args, message",
    [
        (("--memory-budget", "10"), "the least possible is 1024"),
        (("--machine", "abacus"), "no published figures for 'abacus'"),
        (("--options", '{"prefetch": 1}'), "prefetch is what make_plan decides"),
        (("--options", '{"prefetsch": 1}'), "unknown option 'prefetsch'"),
        (("--out", "/no/folder/plan.json"), "--out: there is no folder /no/folder"),
    ],
)
def test_command_says_what_is_wrong(args: tuple[str, ...], message: str, tmp_path) -> None:
    got = run(tmp_path, *args)
    assert got.exit_code == 1 and message in got.output and "Traceback" not in got.output
    assert not (tmp_path / "plan.json").exists()
