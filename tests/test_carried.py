"""carried: several graphs of one model keep within one budget together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_autoplan import GatheredBytes, calibrated
from torch import nn

from fsdp_compile import fully_shard
from fsdp_compile.carried import Ledger, Share

SIZES = {"a": 40, "b": 30, "c": 20, "d": 10}


def test_each_graph_has_a_part_of_what_is_left() -> None:
    ledger = Ledger(SIZES)
    assert ledger.share("a") == Share(0, 0.4, 30)
    ledger.carry("a", "a")
    assert ledger.share("bc") == Share(40, 50 / 60, 10)
    ledger.carry("bc", "c")
    assert ledger.share("d") == Share(60, 1.0, 0)
    assert ledger.share("a") == Share(0, 0.4, 30), "compiled again: what comes after it is not before it"
    assert ledger.share("bc") == Share(40, 50 / 60, 10)


def test_a_graph_that_reads_all_has_everything() -> None:
    ledger = Ledger(SIZES)
    assert ledger.share(SIZES).part == 1
    ledger.carry(SIZES, "abc")
    assert ledger.share("abc") == Share(0, 1.0, 0), "another way through the same weights: theirs are not alive beside these"
    assert ledger.share("bcd") == Share(40, 1.0, 0)


def test_graphs_of_another_mode_do_not_run_in_between() -> None:
    ledger = Ledger(SIZES)
    ledger.carry(SIZES, "abcd", mode="evaluation")
    assert ledger.share("a", mode="training") == Share(0, 0.4, 30)


def test_nothing_is_known() -> None:
    assert Ledger({}).share("a") == Ledger({"b": 0}).share("a") == Share(0, 1.0, 0)


@pytest.mark.parametrize("bad", [{"carried": -1}, {"part": 1.1}, {"ahead": -1}])
def test_a_share_checks_itself(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a share"):
        Share(**bad)


# --- On ranks ---------------------------------------------------------------------------------------------------------------


class Trunk(nn.Module):
    """Blocks, each to be compiled on its own, of the sizes given."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.MLP(10, w, 10) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            x = b(x)
        return x


def trunk(widths: tuple[int, ...], frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Trunk(widths)
    for b in list(model.blocks)[1:-1] if frozen else ():
        b.requires_grad_(False)
    return model


def block_by_block(
    folder: str, widths: tuple[int, ...], options: dict[str, Any], frozen: bool = False
) -> tuple[list[int], list[torch.Tensor]]:
    """(most gathered bytes alive in steps of 12 rows and of 6, gradients) of a model whose blocks are compiled one by one, and once more
    for 6 rows."""
    model = fully_shard(trunk(widths, frozen))
    for b in model.blocks:  # type: ignore[union-attr]
        b.compile(backend="fsdp", options={"lowering": "fx", **options})
    peaks, grads = [], []
    with calibrated(folder):
        for rows in (12, 6):
            x, _ = models.vector_batch(0, rows)
            found = []
            for _ in range(5):  # the first traces; in some, a thread of gloo's lets go of a weight late
                model.zero_grad()
                with GatheredBytes() as seen:
                    model(x).square().mean().backward()
                found.append(seen.peak)
                grads += [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]  # type: ignore[union-attr]
            peaks.append(min(found[1:]))
    return peaks, grads


def bytes_of(widths: tuple[int, ...]) -> int:
    return sum(4 * p.numel() for p in trunk(widths).parameters())


ALIKE, LAST_LARGEST = (14, 14, 14, 14), (10, 12, 14, 40)


SHARES = [(ALIKE, 0.8, False), (LAST_LARGEST, 0.5, False), (LAST_LARGEST, 2.0, False), (ALIKE, 0.7, True)]


@pytest.mark.parametrize("widths, share, frozen", SHARES, ids=["alike", "last largest, little", "last largest, all", "middle frozen"])
def test_one_budget_for_all_blocks(pool, tmp_path: Path, widths: tuple[int, ...], share: float, frozen: bool) -> None:
    budget = int(share * bytes_of(widths))
    want = pool.run(2, block_by_block, str(tmp_path), widths, {"plan": "fixed", "keep_bytes": 0}, frozen)
    got = pool.run(2, block_by_block, str(tmp_path), widths, {"memory_budget": budget}, frozen)
    for (peaks, grads), (_, expected) in zip(got, want):
        assert 0.7 * min(budget, bytes_of(widths)) < max(peaks) <= budget
        assert all(map(torch.equal, grads, expected))


def test_keep_bytes_holds_for_all_blocks(pool, tmp_path: Path) -> None:
    widths = ALIKE
    peaks = {}
    for kept in (0, bytes_of(widths) // 2, bytes_of(widths)):
        peaks[kept] = max(max(p) for p, _ in pool.run(2, block_by_block, str(tmp_path), widths, {"keep_bytes": kept}))
    none, half, full = peaks.values()
    assert none < half < full
    assert half <= none + bytes_of(widths) // 2
