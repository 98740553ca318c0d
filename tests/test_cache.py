"""Inductor's and AOTAutograd's caches: a second process finds what the first compiled; with other options it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from fsdp_compile.passes.machine import Link, Machine, Rates
from pool import Pool
from torch import Tensor

import fsdp_compile.guarded
from fsdp_compile.calibrate import cache_file

pytestmark = [pytest.mark.slow, pytest.mark.inductor]


def compile_once(options: dict[str, Any], hidden: int = 14) -> tuple[int, int, int, list[Tensor]]:
    """Inductor's cache hits and misses, AOTAutograd's hits, and gradients of one step."""
    compared: list[str] = []
    own = fsdp_compile.guarded.same_on_all_ranks
    fsdp_compile.guarded.same_on_all_ranks = lambda group, title, *rest: (compared.append(title), own(group, title, *rest))[1]
    model = models.mlp(hidden=hidden)
    fast = torch.compile(model, backend="fsdp", options=options)
    x, y = models.vector_batch(0)
    models.square_loss(fast(x), y).backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    assert [title.split()[0] for title in compared] == ["forward", "backward"], "ranks compare each graph, from a cache or not"
    counts, aot = (torch._dynamo.utils.counters[of] for of in ("inductor", "aot_autograd"))
    return counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"], aot["autograd_cache_hit"], grads


def in_new_processes(folder: Path, *args: Any) -> list[tuple[int, int, int, list[Tensor]]]:
    pool = Pool({"TORCHINDUCTOR_CACHE_DIR": str(folder)})
    try:
        return pool.run(2, compile_once, *args, timeout_s=200)
    finally:
        pool.close()


def test_second_start_hits_and_other_options_miss(tmp_path):
    plain = models.mlp()
    x, y = models.vector_batch(0)
    models.square_loss(plain(x), y).backward()

    def check(results, hits: int, misses: int) -> None:
        assert sum(h for h, *_ in results) >= hits
        missed = sum(m for _, m, *_ in results)
        assert missed == 0 if misses == 0 else missed >= misses
        assert sum(a for _, _, a, _ in results) == (2 if misses == 0 else 0)
        for *_, grads in results:
            for g, p in zip(grads, plain.parameters(), strict=True):
                torch.testing.assert_close(g, p.grad, rtol=1e-4, atol=1e-6)

    check(in_new_processes(tmp_path, {}), 0, 2)
    check(in_new_processes(tmp_path, {}), 4, 0)  # forward and backward on both ranks, and no pass ran
    check(in_new_processes(tmp_path, {"bucket_bytes": 0}), 0, 2)
    check(in_new_processes(tmp_path, {"bucket_bytes": 0, "prefetch": 3}), 0, 1)


def test_an_automatic_plan_is_found_again(tmp_path, monkeypatch):
    """The machine is part of the key: as long as it is the same, nothing is planned again."""
    monkeypatch.setenv("FSDP_COMPILE_CACHE", str(tmp_path))
    machine = Machine("net", Rates({"float32": 6e10}, 1e10), {"any": Link(5e-4, 1.2e7)}, backend="gloo")
    cache_file("cpu", 2, "gloo").write_text(machine.to_json())
    first, second = (in_new_processes(tmp_path, {"plan": "auto"}) for _ in range(2))
    assert sum(a for _, _, a, _ in first) == 0 and sum(a for _, _, a, _ in second) == 2
    assert sum(m for _, m, *_ in second) == 0
