"""What can be seen of the passes from outside: log lines, graphs in the log, structured-trace artifacts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsdp_compile.passes.pipeline import op_difference
from heard import heard
from torch import nn

from fsdp_compile import compat, explain, fully_shard, logs
from fsdp_compile.logs import backend_observer, configure

STEP = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.compile(torch.nn.Linear(4, 4), backend="fsdp", options={"lowering": "fx"})
model(torch.ones(2, 4)).sum().backward()
"""


def step(**environment: str) -> str:
    """stderr of a process that trains one step of a compiled model."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_LOGS", "FSDP_COMPILE", "TORCH_TRACE"))}
    done = subprocess.run([sys.executable, "-c", STEP], env={**env, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_each_pass_logs_name_time_and_operators(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsdp_compile.passes"):
        explain(nn.Linear(8, 8), torch.randn(2, 8), lowering="fx")
    lines = [r.getMessage() for r in caplog.records if r.name == "fsdp_compile.passes"]
    names = ["insert", "bucket", "schedule", "verify", "lower"]
    assert [w for line in lines if (w := line.split()[0]) in names] == names * 2
    assert sum(line.startswith(("forward graph", "backward graph")) for line in lines) == 2
    insert = next(line for line in lines if line.startswith("insert"))
    assert " ms " in insert and "+2 _c10d_functional.all_gather_into_tensor" in insert and "-2 fsdp_compile.unshard" in insert
    bucket = next(line for line in lines if line.startswith("bucket"))
    assert bucket.endswith("-2 _c10d_functional.all_gather_into_tensor")


def test_operator_difference() -> None:
    from collections import Counter

    assert op_difference(Counter(a=1, b=2), Counter(a=3, c=1)) == "+2 a, +1 c, -2 b"
    assert op_difference(Counter(a=1), Counter(a=1)) == "no operator added or removed"


def test_configure_names_valid_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown log 'pases'; valid: passes, graphs"):
        configure("pases")
    monkeypatch.setenv("FSDP_COMPILE_LOGS", "grphs")
    with pytest.raises(ValueError, match="grphs"):
        configure()


def test_environment_switches_logs_on() -> None:
    both = step(FSDP_COMPILE_LOGS="graphs")
    assert "[fsdp_compile.passes] insert" in both
    assert "[fsdp_compile.graphs] frame 0 forward graph, 1 insert:\ndef forward(" in both


def test_torch_logs_names_the_package() -> None:
    loud = step(TORCH_LOGS="fsdp_compile")
    assert "insert" in loud and "def forward(" in loud


def test_structured_trace_holds_every_stage(tmp_path: Path) -> None:
    said = step(TORCH_TRACE=str(tmp_path))
    assert "insert" not in said and "def forward(" not in said
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    found = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '"artifact"' in line and "{" in line]
    names = {a["artifact"]["name"] for a in found}
    assert {"fsdp_joint_0_dynamo", "fsdp_forward_0_markers", "fsdp_forward_1_insert", "fsdp_forward_2_bucket"} <= names
    assert {n.rpartition("_")[2] for n in names if n.startswith("fsdp_backward_")} >= {"insert", "schedule", "verify", "lower"}
    ours = [a for a in found if a["artifact"]["name"].startswith("fsdp_")]
    assert all(a.get("frame_id") == 0 for a in ours)  # tlparse files them under their compilation
    assert "torch.ops.fsdp_compile.unshard" in text


def test_observer_builds_no_text_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.Graph) -> str:
        raise AssertionError("text was built")

    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    monkeypatch.setattr(logs, "readable", fail)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])  # pytest listens to every logger
    backend_observer(0, None)("markers", graph, "forward")
    monkeypatch.setattr(compat, "trace_artifact", lambda name, text: text())
    with pytest.raises(AssertionError, match="text was built"):
        backend_observer(0, None)("markers", graph, "forward")


def test_dump_graphs_still_writes_files(tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    observe = backend_observer(7, str(tmp_path))
    observe("markers", graph, "forward")
    observe("insert", graph, "forward")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["frame7_forward_0_markers.txt", "frame7_forward_1_insert.txt"]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def breaks_twice() -> list[str]:
    logs._breaks.clear()  # the worker has run other tests
    with heard(logs.log.name) as said:
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(fully_shard(Broken()), backend="fsdp", options={"lowering": "fx"})(torch.ones(2, 4))
    return [line for line in said if "graph break" in line]


def test_a_graph_break_is_said_once_with_its_place_and_price(pool) -> None:
    zero, one = pool.run(2, breaks_twice)
    assert one == [] and len(zero) == 1
    assert "test_logging.py:" in zero[0] and "the 1. break so far" in zero[0] and "first bucket (80 B here)" in zero[0]
