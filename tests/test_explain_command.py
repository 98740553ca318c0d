"""`fsdp-compile explain`: what it prints and writes, and what it says about mistakes."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from fsdp_compile.cli import main


def test_command(tmp_path: Path) -> None:
    factory = tmp_path / "tiny.py"
    factory.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(8, 8), (torch.zeros(2, 8),)\n\ndef bad():\n    return 3\n")
    options = '{"lowering": "fx", "mp_policy": "bfloat16"}'
    args = ["explain", f"{factory}:make", "--world-size", "4", "--meta", "--options", options, "--diff", "bucket"]
    done = CliRunner().invoke(main, [*args, "--save", str(tmp_path / "out"), "--json", str(tmp_path / "r.json")])
    assert done.exit_code == 0, done.output
    assert "on each of 4 ranks" in done.output and "+++ backward/bucket" in done.output
    assert json.loads((tmp_path / "r.json").read_text())["world_size"] == 4
    assert (tmp_path / "out" / "summary.txt").read_text().startswith("Linear\n")
    for more, message in (
        ((f"{factory}:bad",), "must return (model, inputs)"),
        ((f"{factory}:gone",), "no function 'gone'"),
        ((f"{factory}:make", "--options", '{"prefetch": -1}'), "prefetch must not be negative"),
        ((f"{factory}:make", "--options", '{"mp_policy": "int3"}'), "name a dtype"),
        ((f"{factory}:make", "--options", '{"lowering": "fx"}', "--diff", "nope"), "no stage 'nope'"),
    ):
        done = CliRunner().invoke(main, ["explain", *more])
        assert done.exit_code == 1 and message in done.output, (more, done.output)
