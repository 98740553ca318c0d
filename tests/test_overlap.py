"""The schedule survives Inductor: launches, waits and compute stand in the generated code where the passes put them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import run_fw_bw_and_get_code

pytestmark = [pytest.mark.inductor]


class Layers(nn.Module):
    """Equal layers, each two matrices and a norm: one bucket for each layer."""

    def __init__(self, dim: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norm, self.up, self.down):
            x = x + down(torch.relu(up(norm(x))))
        return x


@dataclass(frozen=True)
class Event:
    """One line of generated code that matters: "launch", "wait" or "compute"; ``buffer`` as named there."""

    kind: str
    buffer: str
    op: str


def events(code: str) -> list[Event]:
    """The collectives, waits and matrix multiplications of a generated module, in order. Items of a coalesced launch are
    counted under the launch's name."""
    out, owner = [], {}
    for line in code.splitlines():
        if m := re.match(r"\s+(\w+) = torch\.ops\.(?:_c10d_functional|fsdp_compile)\.(\w+)\.default\(", line):
            out.append(Event("launch", m[1], m[2]))
        elif m := re.match(r"\s+torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)", line):
            out.append(Event("wait", owner.get(m[1], m[1]), "wait_tensor"))
        elif m := re.match(r"\s+(\w+) = (\w+)\[\d+\]", line):
            owner[m[1]] = m[2]
        elif "extern_kernels." in line:
            out.append(Event("compute", "", "mm"))
    return out


def in_flight(found: list[Event], prefix: str) -> list[int]:
    """For each collective whose name starts with ``prefix``: how many matrix multiplications run between its launch and its first wait."""
    result = []
    for i, e in enumerate(found):
        if e.kind == "launch" and e.op.startswith(prefix):
            end = next(j for j in range(i, len(found)) if found[j].kind == "wait" and found[j].buffer == e.buffer)
            result.append(sum(1 for x in found[i:end] if x.kind == "compute"))
    return result


@pytest.fixture
def fake_group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def generated(**options: object) -> tuple[list[Event], list[Event]]:
    """Events of the forward and the backward graph's generated code."""
    inductor = {"force_disable_caches": True, **options.pop("inductor", {})}  # type: ignore[dict-item]
    buckets = ["norm.*", "up.*", "down.*"]
    model = torch.compile(Layers(), backend="fsdp", options={"bucket_modules": buckets, "inductor": inductor, **options})
    _, codes = run_fw_bw_and_get_code(lambda: model(torch.randn(8, 64)))
    assert len(codes) == 2
    return events(codes[0]), events(codes[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "collective, transport",
    [pytest.param("coalesced", "native", marks=pytest.mark.extra), ("packed", "native"), ("coalesced", "own")],
)
def test_each_gather_is_launched_one_bucket_ahead(fake_group: None, collective: str, transport: str) -> None:
    forward, backward = generated(collective=collective, transport=transport, prefetch=2, keep_bytes=0)
    # 12 buckets (norm, up, down of 4 layers); compute stands only in up and down.
    lead = in_flight(forward, "all_gather")
    assert len(lead) == 12
    assert all(n >= 1 for n in lead[3:]), lead
    assert max(lead) <= 3, lead  # and not further ahead than asked: memory
    back = in_flight(backward, "all_gather")
    assert len(back) >= 8 and all(n >= 1 for n in back[3:]), back


@pytest.mark.slow
@pytest.mark.parametrize("transport", [pytest.param("native", marks=pytest.mark.extra), "own"])
def test_reductions_fly_during_later_compute(fake_group: None, transport: str) -> None:
    _, backward = generated(transport=transport)
    lead = in_flight(backward, {"native": "reduce_scatter", "own": "all_to_all"}[transport])
    assert len(lead) == 12
    assert all(n >= 1 for n in lead[:-3]), lead


@pytest.mark.slow
def test_the_check_sees_what_inductor_would_undo(fake_group: None) -> None:
    """With Inductor's own memory reorder on, the prefetch is gone: the checks above can fail."""
    forward, _ = generated(inductor={"reorder_for_peak_memory": True})
    assert sum(1 for n in in_flight(forward, "all_gather")[3:] if n == 0) > 3
