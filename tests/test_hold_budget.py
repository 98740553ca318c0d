"""no_sync(keep_bytes=None): as much as the option memory_budget leaves."""

from __future__ import annotations

import models
import pytest
import torch
from test_autoplan import GatheredBytes, calibrated
from torch import nn

import fsdp_compile


def within(folder: str, budget: int) -> tuple[int, int]:
    """(bytes held, most gathered bytes alive beside them) of micro-steps after a planned step."""
    model = fsdp_compile.fully_shard(models.mlp())
    run = torch.compile(model, backend="fsdp", options={"lowering": "fx", "memory_budget": budget})
    x, y = models.vector_batch(0)
    peaks = []
    with calibrated(folder):
        with fsdp_compile.no_sync(run, keep_bytes=None):
            assert not any(held_of(model))  # nothing is planned yet
            models.square_loss(run(x), y).backward()
        with fsdp_compile.no_sync(run, keep_bytes=None):
            held = sum(held_of(model))
            for _ in range(3):
                with GatheredBytes() as seen:
                    models.square_loss(run(x), y).backward()
                peaks.append(seen.peak)
        assert not sum(held_of(model))
    return held, min(peaks)


def too_much(folder: str, budget: int) -> None:
    model = fsdp_compile.fully_shard(models.mlp())
    run = torch.compile(model, backend="fsdp", options={"lowering": "fx", "memory_budget": budget})
    said = r"memory_budget: .* bytes here, beside \d+ that no_sync\(keep_bytes=...\) holds; the least possible is \d+"
    with calibrated(folder), pytest.raises(Exception, match=said), fsdp_compile.no_sync(run, keep_bytes=budget - 8):
        run(models.vector_batch(0)[0])


def held_of(model: nn.Module) -> list[int]:
    """Bytes of each buffer that is held, tied weights once."""
    tables = [m._fsdp_accumulate or {} for m in model.modules()]
    wholes = {r[2].data_ptr(): r[2].untyped_storage().nbytes() for t in tables for r in t.values() if r[2] is not None}
    return list(wholes.values())


def rooms(folder: str) -> list[int]:
    """Bytes held by models with budgets of their own, one after the other."""
    held = []
    for budget in (1000, None, 1 << 20, 1000):
        model = fsdp_compile.fully_shard(models.mlp())
        run = torch.compile(model, backend="fsdp", options={"lowering": "fx", **({"memory_budget": budget} if budget else {})})
        x, y = models.vector_batch(0)
        with calibrated(folder):
            models.square_loss(run(x), y).backward()
            with fsdp_compile.no_sync(run, keep_bytes=None):
                held.append(sum(held_of(model)))
    return held


def test_each_model_has_a_budget_of_its_own(pool, tmp_path):
    for held in pool.run(2, rooms, str(tmp_path)):
        assert held[1] == 0 and held[0] == held[3] < held[2], held


def test_as_much_as_the_memory_budget_leaves(pool, tmp_path):
    total = sum(4 * p.numel() for p in models.mlp().parameters())
    for budget, want in ((int(0.9 * total), "some"), (4 * total, "all")):
        for held, beside in pool.run(2, within, str(tmp_path), budget):
            assert 0 < held and held + beside <= budget
            assert (beside == 0) == (want == "all"), (held, beside, total)


def test_holding_more_than_the_budget_leaves_is_an_error(pool, tmp_path):
    pool.run(2, too_much, str(tmp_path), sum(4 * p.numel() for p in models.mlp().parameters()) // 2)
