"""`fsdp-compile validate`: predictions next to measurements, in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import Tensor

from fsdp_compile.cli import main
from fsdp_compile.launcher import LaunchError, launch
from fsdp_compile.validate import Row, ValidateConfig, show
from fsdp_compile.validate_worker import GatheredBytes

SIZES = ["--layers", "1", "--dim", "32", "--heads", "2", "--ffn", "48", "--vocab", "64", "--seq", "16", "--batch", "2"]
WHOLE = ["--steps", "1", "--rounds", "2", "--threads", "1"]


def test_error_and_table(capsys) -> None:
    row = Row({"prefetch": 1}, 1.1, 0.1, (0.9, 1.0, 1.3), 1 << 20, 1 << 20)
    assert row.error == pytest.approx(0.1)
    show([row], ValidateConfig(), Console(width=160))
    out = capsys.readouterr().out
    for cell in ('{"prefetch": 1}', "1,100.0", "1,000.0", "900.0", "1,300.0", "+10.0%", "100.0", "1.0 MiB"):
        assert cell in out, cell


def test_gathered_bytes_are_counted_while_they_live() -> None:
    lib = torch.library.Library("fsdp_compile_test", "DEF")
    lib.define("all_gather_like(Tensor x) -> Tensor")
    lib.impl("all_gather_like", lambda x: x.repeat(2), "CompositeExplicitAutograd")
    op = torch.ops.fsdp_compile_test.all_gather_like
    x = torch.zeros(256)

    def view_of_one() -> Tensor:
        return op(x)[:1]

    with GatheredBytes() as seen:
        held = view_of_one()
        assert seen.peak == 2048
        op(x)
        op(x)
        assert seen.peak == 4096  # the one held by a view, and one at a time
        del held
        op(x)
    assert seen.peak == 4096


def test_under_torchrun_the_ranks_must_be_as_many_as_said(monkeypatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert launch(lambda x: x + 1, 1, 3, 1) == 2
    with pytest.raises(LaunchError, match="torchrun has started 3 ranks: --nproc must be that number, not 2"):
        launch(lambda x: x, 1, 2, 1)


@pytest.mark.parametrize("args, message", [(["--options", "[1]"], "--options wants a JSON object"), (["--nproc", "1"], "at least 2 ranks")])
def test_bad_input(args: list[str], message: str) -> None:
    got = CliRunner().invoke(main, ["validate", *args])
    assert got.exit_code and message in got.output


@pytest.mark.slow
@pytest.mark.inductor
def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    args = ["--options", "{}", "--options", '{"bucket_bytes": 0, "prefetch": 1}', "--json", str(out)]
    got = CliRunner().invoke(main, ["validate", *SIZES, *WHOLE, *args])
    assert got.exit_code == 0, got.output
    rows = [Row(**row) for row in json.loads(out.read_text())["rows"]]
    assert [row.options for row in rows] == [{}, {"bucket_bytes": 0, "prefetch": 1}]
    for row in rows:
        assert len(row.measured) == 2 and row.predicted > 0
        assert row.measured_peak == row.predicted_peak > 0
    assert rows[0].predicted_peak > rows[1].predicted_peak
