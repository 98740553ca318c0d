"""Regions within a forward: autocast, activation checkpointing, dropout. Gradients are those of one process for the same rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_memory import HIDDEN, ROWS, WIDTH, saved_sizes, whole_sizes
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fully_shard

INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])
BATCHES = [models.vector_batch(i) for i in range(4)]


Loss = Callable[[Any, Tensor, Tensor], Tensor]


def grads_like_slices(model: nn.Module, plain: nn.Module, loss: Loss, fast: Any, tol: float = 1e-5) -> None:
    """Assert that gradients are the mean over ranks of those that one process finds for each rank's rows.

    To the bit of the arithmetic: rounding in low precision depends on the rows, so the whole batch in one piece would differ."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = BATCHES[0]
    mine = loss(fast, parity.part(x, rank, world), parity.part(y, rank, world))
    mine.backward()
    for r in range(world):
        want = loss(plain, parity.part(x, r, world), parity.part(y, r, world))
        (want / world).backward()
        if r == rank:
            torch.testing.assert_close(mine, want, rtol=tol, atol=tol / 10)
    for n, p in plain.named_parameters():
        got = model.get_parameter(n).grad.full_tensor()
        torch.testing.assert_close(got, p.grad, rtol=tol, atol=tol / 10, msg=lambda m, n=n: f"{n}: {m}")


# --- autocast -------------------------------------------------------------------------------------------------------------


class Inside(models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = F.gelu(self.b(F.gelu(self.a(x))))
        return self.c(h.float())


def autocast(where: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return (Inside if where == "inside" else models.MLP)(10, 14, 3)

    def loss(run: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if where == "outside" else contextlib.nullcontext():
            out = run(x)
        assert out.dtype == (torch.float32 if where == "inside" else torch.bfloat16)
        return models.square_loss(out, y)

    model = build()
    grads_like_slices(model, build(), loss, torch.compile(model, backend="fsdp", options={"lowering": "fx"}))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast(pool, where):
    pool.run(2, autocast, where)


# --- activation checkpointing -----------------------------------------------------------------------------------------------

KEEP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return KEEP[op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]


def keep_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return KEEP[0]


def selective(policy: Any) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, policy)


class Blocks(nn.Module):
    """Two blocks, each under a checkpoint of the named form."""

    def __init__(self, form: str, width: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.blocks = nn.ModuleList(models.MLP(width, hidden, width) for _ in range(2))

    def block(self, i: int, x: Tensor) -> Tensor:
        return x + self.blocks[i](x)

    def pair(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = checkpoint(self.block, i, x, use_reentrant=False)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "nested":
            return checkpoint(self.pair, x, use_reentrant=False)
        if self.form == "each":
            return self.pair(x)
        if self.form == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.pair(x).float()
        policy = {"matmuls saved": keep_matmuls, "all saved": keep_all}[self.form]
        for i in range(2):
            x = checkpoint(self.block, i, x, use_reentrant=False, context_fn=selective(policy))
        return x


FORMS = ["each", "nested", "autocast", "matmuls saved", "all saved"]


def checkpointed(form: str, lowering: str) -> tuple[list[int], set[int]]:
    model = Blocks(form, 10, 14)
    fast = torch.compile(model, backend="fsdp", options={"lowering": lowering})
    plain = Blocks(form, 10, 14)
    tol = 2e-2 if (form, lowering) == ("autocast", "inductor") else 1e-5  # Inductor rounds to bfloat16 less often than eager
    grads_like_slices(model, plain, lambda run, x, y: models.square_loss(run(x)[:, :3], y), fast, tol)
    wide = fully_shard(Blocks(form, WIDTH, HIDDEN), reshard_after_forward=True)
    out = torch.compile(wide, backend="fsdp", options={"lowering": lowering})(torch.randn(ROWS, WIDTH))
    alive = saved_sizes(out)
    out.sum().backward()
    return alive, whole_sizes(wide)


@pytest.mark.parametrize(
    "form, lowering",
    [(f, "fx") for f in FORMS]
    + [pytest.param(f, "inductor", marks=[*INDUCTOR.marks, *[pytest.mark.extra] * (f != "each")]) for f in FORMS],
)
def test_activation_checkpointing(pool, form, lowering):
    """Gradients are right, and nothing gathered is among the tensors saved for backward."""
    for alive, whole in pool.run(2, checkpointed, form, lowering):
        assert alive and not whole & set(alive), f"saved for backward: {sorted(alive)}; weights have {sorted(whole)}"


# --- dropout ----------------------------------------------------------------------------------------------------------------


class Drops(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.form = nn.Linear(10, 64), form

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.drop, x, use_reentrant=False) if self.form == "checkpoint" else self.drop(x)


def dropout(form: str, lowering: str) -> Tensor:
    """The gradient is that of the mask which forward drew; returns the mask."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fully_shard(Drops(form))
    weight, bias = parity.full(model.a.weight), parity.full(model.a.bias)
    torch.manual_seed(100 + rank)
    fast = torch.compile(model, backend="fsdp", options={"lowering": lowering})
    x = parity.part(BATCHES[0][0], rank, world)
    masks = []
    for _ in range(2):
        model.zero_grad()
        out = fast(x)
        out.sum().backward()
        masks.append(out.detach() / F.linear(x, weight, bias))
        assert 0.2 < (masks[-1] == 0).float().mean() < 0.6
        for got, mine in ((model.a.bias.grad, masks[-1].sum(0)), (model.a.weight.grad, masks[-1].t() @ x)):
            dist.all_reduce(mine)
            torch.testing.assert_close(got.full_tensor(), mine / world, rtol=1e-4, atol=1e-4)
    assert not torch.equal(masks[0] == 0, masks[1] == 0), "each step draws its own mask"
    return masks[0] == 0


@pytest.mark.parametrize("lowering", ["fx", INDUCTOR])
@pytest.mark.parametrize("form", ["plain", "checkpoint"])
def test_dropout_masks_agree_in_forward_and_backward(pool, form, lowering):
    masks = pool.run(2, dropout, form, lowering)
    assert not torch.equal(*masks), "ranks seeded apart draw apart"
