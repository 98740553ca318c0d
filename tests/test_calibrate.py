"""calibrate: the fit, the cache, one tiny real measurement; devices; predict on them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fsdp_compile.passes.machine import Link, Machine, Rates, wire_bytes
from rich.console import Console

from fsdp_compile import devices
from fsdp_compile.calibrate import CalibrateConfig, Point, at_steady, cache_file, fit, load_machine, machine_of, run, save, show
from fsdp_compile.cli import main

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MACHINE = Machine("m", Rates({"float32": 1e9}, 1e9, 1e-6), {"all_gather/packed/float32": Link(1e-4, 1e9, 0.05)}, "gloo", 2, 0.25, "here")
SIZES = np.geomspace(2**12, 2**24, 20)


def test_the_fit_of_exact_points_is_exact() -> None:
    link = fit(SIZES, 3e-4 + SIZES / 2e9)
    assert link.latency == pytest.approx(3e-4, rel=1e-6)
    assert link.bandwidth == pytest.approx(2e9, rel=1e-6)
    assert link.residual == pytest.approx(0, abs=1e-9)


def test_the_fit_of_noisy_points_shows_the_noise() -> None:
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(SIZES))
    link = fit(SIZES, (3e-4 + SIZES / 2e9) * noise)
    assert link.latency == pytest.approx(3e-4, rel=0.1)
    assert link.bandwidth == pytest.approx(2e9, rel=0.1)
    assert link.residual is not None and 0.02 < link.residual < 0.08


def test_no_negative_latency_and_no_negative_bandwidth() -> None:
    assert fit([1e3, 1e6], [1e-7, 2e-3]).latency == 0
    flat = fit([1e3, 1e6], [2e-3, 1e-3])
    assert flat.latency > 0 and flat.bandwidth > 1e9
    for wire, seconds in (([1e3], [1.0]), ([1e3, 1e3], [1.0, 1.0]), ([1, 2], [1.0, 0.0])):
        with pytest.raises(ValueError):
            fit(wire, seconds)


def test_a_machine_from_points() -> None:
    config = CalibrateConfig()
    points = [
        Point("reduce_scatter", "packed", "float32", n, 1e-4 + wire_bytes("reduce_scatter", n, 2, "gloo") / 1e9) for n in config.nbytes()
    ]
    points += [Point("all_gather", "packed", "float32", n, 2e-4 + wire_bytes("all_gather", n, 2, "gloo") / 3e9) for n in config.nbytes()]
    measured = {"device": "d", "flops": {"float32": 1e9}, "memory": 1e9, "launch": 1e-6, "interference": 0.5, "posting": 1e-3}
    measured["steady"] = [Point("all_gather", "packed", "float32", 2 * n, 1e-4 + n / 2e9) for n in (1 << 19, 1 << 22)]
    machine = machine_of(config, points, measured)
    assert machine.links["reduce_scatter/packed/float32"].bandwidth == pytest.approx(1e9)
    assert machine.links["all_gather/packed/float32"].bandwidth == pytest.approx(2e9)
    assert machine.links["all_gather/packed/float32"].latency == pytest.approx(1e-4)
    assert machine.collective_seconds("reduce_scatter", "packed", "float32", 1 << 20, 2) == pytest.approx(1e-4 + (1 << 20) / 1e9)


def test_links_are_brought_to_traffic_without_pauses() -> None:
    alone = {"a/packed/float32": Link(1e-4, 2e9, 0.1), "a/packed/bfloat16": Link(2e-4, 3e9), "a/coalesced/float32": Link(3e-4, 4e9)}
    got = at_steady(alone, {"a/packed/float32": Link(5e-4, 1e9)})
    assert got["a/packed/float32"] == Link(5e-4, 1e9, 0.1)
    assert got["a/packed/bfloat16"] == Link(5e-4, 1.5e9)
    assert got["a/coalesced/float32"] == alone["a/coalesced/float32"]
    assert at_steady({}, {"a/packed/float32": Link(5e-4, 1e9)}) == {}


def test_sizes_are_whole_parts_for_each_rank() -> None:
    sizes = CalibrateConfig(nproc=3).nbytes()
    assert 15 <= len(sizes) <= 20
    assert all(n % (3 * 1024) == 0 for n in sizes)
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("bad", [{"nproc": 1}, {"device": "tpu"}, {"repeats": 0}, {"largest": 10}, {"sizes": 1}])
def test_bad_configurations(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        CalibrateConfig(**bad)  # type: ignore[arg-type]


def test_the_cache_gives_back_what_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_COMPILE_CACHE", str(tmp_path))
    path = save(MACHINE, CalibrateConfig())
    assert path.parent == tmp_path
    assert load_machine(2, "cpu") == MACHINE
    with pytest.raises(FileNotFoundError, match="run: fsdp-compile calibrate --nproc 4 --device cpu"):
        load_machine(4, "cpu")
    path.write_text("{")
    with pytest.raises(ValueError, match="run again: fsdp-compile calibrate"):
        load_machine(2, "cpu")


@pytest.mark.parametrize("arguments", [("cpu", 2), ("2",), (2.0, "cpu"), (True,), (2, "cpu", 1)])
def test_a_machine_is_asked_for_by_ranks_then_device(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r'give the number of ranks, then the device, as in load_machine\(2, "cpu"\)'):
        load_machine(*arguments)


def test_the_cache_is_keyed_by_topology_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache_file("cpu", 2, "gloo")
    assert here != cache_file("cpu", 3, "gloo") and here != cache_file("cpu", 2, "mpi")
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert here != cache_file("cpu", 2, "gloo")
    monkeypatch.delenv("FSDP_COMPILE_CACHE", raising=False)
    assert cache_file("cpu", 2, "gloo").parent == Path.home() / ".cache" / "fsdp_compile"


def test_the_table_shows_the_fit_and_its_error() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    show(MACHINE, console)
    text = console.export_text()
    row = next(line for line in text.splitlines() if "all_gather packed" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["all_gather packed", "float32", "100", "1.000", "5%"]
    assert "float32 1.0" in text and "25% of compute" in text


def test_one_rank_has_nobody_to_measure_with() -> None:
    result = CliRunner().invoke(main, ["calibrate", "--nproc", "1"])
    assert result.exit_code == 1 and "at least 2 ranks" in result.output


# --- Devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", devices.names())
def test_devices(name: str) -> None:
    m = devices.device(name.lower())
    assert m.name == name and m.source.startswith("https://")
    assert m.rates.flops["bfloat16"] > m.rates.flops["float32"]
    assert devices.device(name, tf32=True).rates.flops["float32"] > m.rates.flops["float32"]
    half = devices.device(name, efficiency=0.5)
    assert half.rates.seconds(1e15, 0, "bfloat16") > 1.9 * m.rates.seconds(1e15, 0, "bfloat16")
    assert m.collective_seconds("all_gather", "coalesced", "bfloat16", 1 << 30, 8) < 0.1


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="A100, H100, H200, B200, MI300X"):
        devices.device("V100")
    with pytest.raises(ValueError, match="efficiency"):
        devices.device("A100", efficiency=0)
    with pytest.raises(ValueError, match="source"):
        replace(devices.PUBLISHED[0], source="hearsay")


# --- predict --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("predict") / "mlp.py"
    file.write_text(
        "import torch\ndef make():\n"
        "    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), (torch.zeros(8, 64),)\n"
    )
    return f"{file}:make"


def predict(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["predict", *args])
    return result.exit_code, result.output


def test_predict_on_a_device(factory: str, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    options = '{"lowering": "fx", "bucket_bytes": 20000}'
    code, text = predict(factory, "--machine", "h100", "--world-size", "4", "--options", options, "--json", str(out))
    assert code == 0, text
    assert "on H100" in text and "gathered" in text and "head" in text and "https://" in text
    data = json.loads(out.read_text())
    assert data["step"] == pytest.approx(data["forward"] + data["backward"] + data["optimizer"])
    assert data["peak_gathered_bytes"] > 0


def test_predict_on_a_file_and_what_it_refuses(factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_COMPILE_CACHE", str(tmp_path / "cache"))
    assert "fsdp-compile calibrate --nproc 8" in predict(factory)[1]
    assert "MI300X" in predict(factory, "--machine", "V100")[1]
    assert predict(factory, "--machine", str(tmp_path / "none.json"))[0] == 1
    file = tmp_path / "m.json"
    file.write_text(MACHINE.to_json())
    code, text = predict(factory, "--machine", str(file), "--options", '{"lowering": "fx"}')
    assert code == 1 and "no link for reduce_scatter" in text


# --- For real -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_calibration() -> None:
    config = CalibrateConfig(repeats=2, largest=1 << 18, sizes=3, dtypes=("float32",))
    machine = run(config)
    assert set(machine.links) == {
        f"{variant}/float32"
        for variant in (
            "all_gather/coalesced", "all_gather/packed", "reduce_scatter/coalesced", "reduce_scatter/packed", "all_to_all/packed"
        )
    }
    assert 0 <= machine.interference <= 1
    assert machine.rates.flops["float32"] > 1e8 and machine.rates.memory > 1e7
    assert machine.world == 2 and machine.backend == "gloo"
