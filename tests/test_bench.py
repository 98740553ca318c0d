"""The bench: what it accepts, its statistics, and one small run with two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from fsdp_compile import bench
from fsdp_compile.bench_model import Sizes, make_batches, model_factory, storage_bytes
from fsdp_compile.bench_modes import Setting, Trainer, reference_losses
from fsdp_compile.bench_worker import deviation, interface_bytes, merge_errors, slowest
from fsdp_compile.cli import main

TINY = Sizes(layers=1, dim=16, heads=2, ffn=24, vocab=32, seq=8, batch=2)


def test_modes_keep_their_order():
    assert bench.parse_modes(" fsdp, ddp ,single") == ("fsdp", "ddp", "single")


@pytest.mark.parametrize("text", ["fsdp3", "fsdp,zero", "", ","])
def test_bad_modes_list_the_valid_ones(text):
    with pytest.raises(bench.BenchError) as error:
        bench.parse_modes(text)
    assert all(mode in str(error.value) for mode in bench.MODES)


def test_a_mode_named_twice_is_refused():
    with pytest.raises(bench.BenchError, match="twice"):
        bench.parse_modes("ddp,ddp")


def test_options_are_a_json_object():
    assert bench.parse_options(None) == {}
    assert bench.parse_options('{"prefetch": 2}') == {"prefetch": 2}
    for bad in ("{prefetch: 2}", "[1]", "3"):
        with pytest.raises(bench.BenchError, match="--options wants a JSON object"):
            bench.parse_options(bad)


def test_lowering_joins_the_options():
    config = bench.BenchConfig(options={"prefetch": 2, "lowering": "fx"}, lowering="inductor")
    assert config.backend_options() == {"prefetch": 2, "lowering": "inductor"}
    assert replace(config, lowering=None).backend_options() == {"prefetch": 2, "lowering": "fx"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"warmup": 0}, "first step compiles"),
        ({"timeout": 0}, "must be positive"),
        ({"check_steps": -1}, "not negative"),
        ({"sizes": replace(TINY, batch=0)}, "--batch"),
        ({"sizes": replace(TINY, heads=3)}, "multiple of 2"),
        ({"model": "nowhere.py:build"}, "no such Python file"),
        ({"model": "build"}, "path/to/file.py:function"),
    ],
)
def test_impossible_configs_are_refused_before_any_rank_starts(change, message):
    with pytest.raises(bench.BenchError, match=message):
        replace(bench.BenchConfig(sizes=TINY), **change).validate()


def test_the_command_says_what_is_wrong_without_a_traceback():
    result = CliRunner().invoke(main, ["bench", "--modes", "nope"])
    assert result.exit_code == 1 and "unknown mode: nope" in result.output and "fsdp2_compile" in result.output


def test_another_model_by_path(tmp_path):
    (tmp_path / "mine.py").write_text("def make(**sizes):\n    return sizes\n")
    assert model_factory(f"{tmp_path}/mine.py:make")(dim=3) == {"dim": 3}
    with pytest.raises(ValueError, match="no function 'made'"):
        model_factory(f"{tmp_path}/mine.py:made")


def test_summary():
    assert bench.summarize([[3.0, 1.0], [2.0, 10.0]]) == bench.Summary(median=2.5, min=1.0, max=10.0, n=4)


def test_ratio_is_taken_within_each_round():
    mine, other = [[1.0, 1.0], [2.0, 2.0], [30.0, 30.0]], [[2.0, 2.0], [4.0, 4.0], [40.0, 40.0]]
    assert bench.ratio(mine, other) == bench.Ratio(median=0.5, min=0.5, max=0.75)  # drift of 30x leaves it alone
    assert str(bench.ratio(mine, other)) == "0.50 (0.50-0.75)"


def test_a_step_is_as_long_as_its_slowest_rank():
    assert slowest([[[1.0, 5.0], [2.0, 2.0]], [[3.0, 4.0], [1.0, 2.0]]]) == [[3.0, 5.0], [2.0, 2.0]]


def test_deviation_covers_the_common_steps():
    assert deviation([1.0, 2.5, 9.0], [1.0, 2.0]) == 0.5


def test_errors_of_ranks():
    assert merge_errors(["boom", "boom"]) == "on every rank: boom"
    assert merge_errors(["", "boom"]) == "on rank 1: boom"
    assert merge_errors(["timeout", "boom"]) == "on rank 0: timeout; on rank 1: boom"


def test_interface_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    table = tmp_path / "dev"
    table.write_text("Inter-| Receive\n eth0: 1 2 3 4 5 6 7 8 9 0\n    lo: 10 2 3 4 5 6 7 8 4321 0 0 0 0 0 0 0\n")
    assert interface_bytes(table) == 4321
    assert interface_bytes(tmp_path / "none") is None
    table.write_text("nothing of the kind\n")
    assert interface_bytes(table) is None


def test_storage_is_counted_once():
    flat = torch.zeros(10)
    assert storage_bytes({"a": flat[:4], "b": flat[4:], "c": torch.zeros(3, dtype=torch.bfloat16), "d": 1}) == 46


def test_ranks_get_different_data_and_runs_the_same():
    first, again, other = (make_batches(TINY, rank, torch.device("cpu")) for rank in (0, 0, 1))
    assert torch.equal(first[0][0], again[0][0]) and not torch.equal(first[0][0], other[0][0])
    assert first[0][0].shape == (2, 8) and torch.equal(first[0][0][:, 1:], first[0][1][:, :-1])


def test_reference_on_one_rank_is_plain_training():
    factory = model_factory(None)
    setting = Setting(lambda: factory(**TINY.model_arguments()), torch.device("cpu"))
    batches = make_batches(TINY, 0, torch.device("cpu"))
    trainer = Trainer("single", setting)
    losses = [trainer.step(*batches[step % len(batches)]).item() for step in range(6)]
    assert reference_losses(setting, [batches], 6) == pytest.approx(losses, abs=1e-6)
    assert losses[4] < losses[0]  # the first batch again
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert 3 * 4 * parameters <= trainer.state_bytes() < 3 * 4 * parameters + 1000  # two moments, and step counters


def fake_report(**overrides) -> dict:
    rounds = [[0.1, 0.2], [0.1, 0.3]]
    mode = {
        "max_loss_deviation": 1e-7,
        "state_bytes": 1000,
        "peak_extra_bytes": 10,
        "sent_bytes_per_step": None,
        "tokens_per_second": 10.0,
        "summary_seconds": {"median": 0.15, "min": 0.1, "max": 0.3, "n": 4},
        "round_seconds": rounds,
    }
    ratio = {"median": 1.0, "min": 0.9, "max": 1.1}
    names = ("single", "fsdp2", "fsdp")
    modes = {name: mode | {"ratio_to": {other: ratio for other in names if other != name}} for name in names}
    config = {"nproc": 2, "device": "cpu", "bf16": False, "steps": 2, "rounds": 2, "check_steps": 6}
    config |= {"sizes": vars(TINY)} | overrides
    return {"config": config, "modes": modes, "errors": {"ddp": "on rank 1: [boom]"}}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_tables_show_every_mode_and_every_failure(device):
    console = Console(width=150, record=True, quiet=False, file=open(os.devnull, "w"))
    bench.show(fake_report(device=device), console)
    text = console.export_text()
    for part in ("single", "fsdp2", "1.00 (0.90-1.10)", "ddp was dropped: on rank 1: [boom]", "1.0e-07", "150.0"):
        assert part in text
    assert ("loopback" in text) == (device == "cpu") and ("peak MB" in text) == (device == "cuda")


def test_nothing_measured_is_said():
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    bench.show(fake_report() | {"modes": {}}, console)
    assert "no mode could be measured" in console.export_text()


def run_bench(*arguments: str, tmp_path) -> tuple[subprocess.CompletedProcess, dict]:
    file = tmp_path / "bench.json"
    sizes = [part for name, value in vars(TINY).items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "fsdp_compile.cli", "bench", "--device", "cpu", "--json", str(file), *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, env=environment)
    return done, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.slow
def test_two_ranks_from_end_to_end(tmp_path):
    shape = ("--steps", "2", "--rounds", "2", "--warmup", "1")
    done, report = run_bench("--modes", "single,ddp,fsdp2", "--nproc", "2", *shape, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert report["modes"].keys() == {"single", "ddp", "fsdp2"} and not report["errors"]
    for name, mode in report["modes"].items():
        assert name in done.stdout
        assert [len(turn) for turn in mode["round_seconds"]] == [2, 2] and mode["summary_seconds"]["n"] == 4
        assert mode["ratio_to"].keys() == report["modes"].keys() - {name}
    assert report["modes"]["single"]["max_loss_deviation"] is None
    assert report["modes"]["ddp"]["max_loss_deviation"] < 1e-5
    assert report["modes"]["fsdp2"]["max_loss_deviation"] < 1e-5
    assert report["modes"]["fsdp2"]["state_bytes"] < 0.75 * report["modes"]["ddp"]["state_bytes"]
    if sys.platform == "linux":  # other processes may use the loopback too, so no upper bound
        assert report["modes"]["fsdp2"]["sent_bytes_per_step"] > 1000


@pytest.mark.slow
def test_a_mode_failing_on_one_rank_is_dropped_and_the_others_go_on(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(
        "import os\nfrom fsdp_compile.bench_model import model_factory\nbuilt = 0\n"
        "def build(**sizes):\n    global built\n    built += 1\n"
        "    if built == 1 and os.environ.get('RANK') == '1':\n        raise RuntimeError('only here')\n"
        "    return model_factory(None)(**sizes)\n"
    )
    shape = ("--steps", "1", "--rounds", "1", "--warmup", "1", "--timeout", "5")
    done, report = run_bench("--modes", "ddp,fsdp2", "--model", f"{model}:build", *shape, tmp_path=tmp_path)
    assert done.returncode == 1
    assert report["modes"].keys() == {"fsdp2"} and "on rank 1: RuntimeError: only here" in report["errors"]["ddp"]
    assert "ddp was dropped" in done.stdout
