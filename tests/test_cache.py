"""Inductor's and AOTAutograd's caches: a second process finds what the first compiled; with other options it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from fsdp_compile.passes.machine import Link, Machine, Rates
from fsdp_compile.passes.pipeline import Decision
from pool import Pool
from torch import Tensor

import fsdp_compile.guarded
import fsdp_compile.lead
from fsdp_compile.calibrate import cache_file
from fsdp_compile.lead import Lead

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


def in_new_processes(folder: Path, *args: Any, run: Callable[..., Any] = compile_once) -> list[tuple[int, int, int, list[Tensor]]]:
    pool = Pool({"TORCHINDUCTOR_CACHE_DIR": str(folder)})
    try:
        return pool.run(2, run, *args, timeout_s=200)
    finally:
        pool.close()


def check_gradients(results: list[tuple[int, int, int, list[Tensor]]]) -> None:
    plain = models.mlp()
    x, y = models.vector_batch(0)
    models.square_loss(plain(x), y).backward()
    for *_, grads in results:
        for g, p in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad, rtol=1e-4, atol=1e-6)


def test_second_start_hits_and_other_options_miss(tmp_path):
    def check(results, hits: int, misses: int) -> None:
        assert sum(h for h, *_ in results) >= hits
        missed = sum(m for _, m, *_ in results)
        assert missed == 0 if misses == 0 else missed >= misses
        assert sum(a for _, _, a, _ in results) == (2 if misses == 0 else 0)
        check_gradients(results)

    check(in_new_processes(tmp_path, {}), 0, 2)
    check(in_new_processes(tmp_path, {}), 4, 0)  # forward and backward on both ranks, and no pass ran
    check(in_new_processes(tmp_path, {"bucket_bytes": 0}), 0, 2)
    check(in_new_processes(tmp_path, {"bucket_bytes": 0, "prefetch": 3}), 0, 1)


def compile_by(decision: Decision) -> tuple[int, int, int, list[Tensor]]:
    """`compile_once`; whatever the cache holds, rank 0 has decided ``decision``."""
    Lead.cached = lambda self, topic, found: self._settled(topic, lambda: decision, False)  # type: ignore[method-assign]
    return compile_once({"plan": "auto"})


def never(*_: Any) -> Machine:
    raise AssertionError("measured again")


def compile_unmeasured() -> tuple[int, int, int, list[Tensor]]:
    fsdp_compile.lead._measured = never
    return compile_once({"plan": "auto"})


def hits(results: list[tuple[int, int, int, list[Tensor]]]) -> int:
    return sum(aot for _, _, aot, _ in results)


def test_an_automatic_plan_is_found_again(tmp_path, monkeypatch):
    """The machine is part of the key: as long as it is the same, nothing is planned again, unless rank 0 says otherwise."""
    monkeypatch.setenv("FSDP_COMPILE_CACHE", str(tmp_path))
    machine = Machine("net", Rates({"float32": 6e10}, 1e10), {"any": Link(5e-4, 1.2e7)}, backend="gloo")
    cache_file("cpu", 2, "gloo").write_text(machine.to_json())
    first, second = (in_new_processes(tmp_path, {"plan": "auto"}) for _ in range(2))
    assert hits(first) == 0 and hits(second) == 2
    assert sum(m for _, m, *_ in second) == 0
    other = in_new_processes(tmp_path, Decision(0, 0, frozenset(), None, 0), run=compile_by)
    assert hits(other) == 0, "what another decision came to is of no use"
    check_gradients(other)


def test_a_second_start_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_COMPILE_CACHE", str(tmp_path))
    assert hits(in_new_processes(tmp_path, {"plan": "auto"})) == 0
    again = in_new_processes(tmp_path, run=compile_unmeasured)
    assert hits(again) == 2
    check_gradients(again)
