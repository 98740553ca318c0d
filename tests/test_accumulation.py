"""Gradient accumulation: every micro-step reduced, or collected without communication and reduced once."""

from __future__ import annotations

import contextlib

import models
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_compile

MICRO = 3


class Net(nn.Module):
    """A tied weight, a scalar, an odd-shaped block used twice under checkpoint, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(10, 7, bias=False)
        self.block = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(2):
            h = h + checkpoint(self.block, h, use_reentrant=False)
        h = self.frozen(h) * self.scale
        return F.linear(h, self.embed.weight.t())


def windows(step: int) -> list[tuple[Tensor, Tensor]]:
    return [models.vector_batch(100 * step + i, out=10) for i in range(MICRO)]


def count_reductions(fn) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        fn()
    names = ("_c10d_functional::reduce_scatter", "_c10d_functional::all_to_all", "fsdp_compile::all_to_all")
    return sum(e.count for e in p.key_averages() if e.key.startswith(names))


def beside_one_process(lowering: str, tight: dict):
    """`Net` in one process, sharded, and compiled; an optimizer for either."""
    plain, model = Net(), Net()
    fsdp_compile.fully_shard(model)
    run = torch.compile(model, backend="fsdp", options={"lowering": lowering, **tight})
    options = {"lr": 1e-3, "eps": 1e-6}
    theirs, ours = (torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], **options) for m in (plain, model))
    return plain, model, run, theirs, ours


def accumulate(defer: bool, lowering: str, tight: dict) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model, step_of, theirs, ours = beside_one_process(lowering, tight)
    reductions = []
    for step in range(3):
        for x, y in windows(step):
            models.square_loss(plain(x), y).div(MICRO).backward()
        for i, (x, y) in enumerate(windows(step)):
            n = len(x) // world
            mine = slice(rank * n, (rank + 1) * n)
            model.set_requires_gradient_sync(not defer or i == MICRO - 1)

            def micro(x: Tensor = x[mine], y: Tensor = y[mine]) -> None:
                models.square_loss(step_of(x), y).div(MICRO).backward()

            reductions.append(count_reductions(micro) if step == 2 else micro())
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            if q.requires_grad:
                torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        theirs.step(), ours.step(), theirs.zero_grad(), ours.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parity.full(p), q.detach(), rtol=1e-5, atol=1e-5)
    counts = reductions[-MICRO:]
    if defer:
        assert counts[:-1] == [0] * (MICRO - 1) and counts[-1] > 0, counts
    else:
        assert len(set(counts)) == 1 and counts[0] > 0, counts


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("defer", [False, True])
def test_sum_of_micro_steps(pool, world, defer):
    pool.run(world, accumulate, defer, "fx", {})


@pytest.mark.slow
@pytest.mark.inductor
def test_deferred_on_inductor(pool):
    pool.run(2, accumulate, True, "inductor", {})


def context_and_unreached() -> None:
    """A parameter that the synchronised backward does not reach keeps its part until one does."""
    plain, model = models.mlp(), models.mlp()
    with pytest.raises(ValueError, match="not sharded yet"):
        fsdp_compile.set_requires_gradient_sync(model, False)
    run = torch.compile(fsdp_compile.fully_shard(model), backend="fsdp", options={"lowering": "fx"})
    (x, y), (x2, y2) = models.vector_batch(0), models.vector_batch(1)
    with fsdp_compile.no_sync(run):
        models.square_loss(run(x), y).backward()
        assert all(p.grad is None for p in model.parameters())
    models.square_loss(run(x2), y2).backward()
    for a, b in ((x, y), (x2, y2)):
        models.square_loss(plain(a), b).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6)
    model.zero_grad(), plain.zero_grad()
    for f in (run, plain):  # nothing is left over for the next step
        models.square_loss(f(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6)


def test_context(pool):
    pool.run(2, context_and_unreached)


class Fail(RuntimeError):
    pass


class Twice(nn.Module):
    """One weight, read on both sides of a graph break or of a helper that Dynamo leaves out."""

    def __init__(self, between: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.w = nn.Parameter(0.3 * torch.randn(10, 10))
        self.between = between
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.w)
        if self.between == "break":
            torch._dynamo.graph_break()
        elif self.between == "helper":
            h = self.helper(h)
        return h @ self.w

    @torch._dynamo.disable
    def helper(self, h: Tensor) -> Tensor:
        h = h * 1.5
        if self.fails:
            h.register_hook(self.fail)
        return torch.tanh(h @ self.w) @ self.w

    def fail(self, grad: Tensor) -> None:
        raise Fail


def deferred_and(order: str, between: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = Twice(between), Twice(between)
    run = torch.compile(fsdp_compile.fully_shard(model), backend="fsdp", options={"lowering": "fx"})
    batches = [models.vector_batch(i, out=10) for i in range(4)]

    def loss(fn, i: int, cut: bool) -> Tensor:
        x, y = (parity.part(t, rank, world) if cut else t for t in batches[i])
        return models.square_loss(fn(x), y)

    for _ in range(2):  # the second time with graphs that are known already
        for fn, cut in ((plain, False), (run, True)):
            for i in (0, 1):
                with fsdp_compile.no_sync(run) if cut else contextlib.nullcontext():
                    loss(fn, i, cut).backward()
            if order == "fails" and cut:
                model.fails = True
                with pytest.raises(Fail):
                    loss(fn, 2, cut).backward()
                model.fails = False
            late = [loss(fn, i, cut) for i in (2, 3)]
            for one in reversed(late) if order == "reversed" else late:
                one.backward(retain_graph=order == "retained")
                if order == "retained":
                    one.backward()
        torch.testing.assert_close(parity.full(model.w.grad), plain.w.grad, rtol=1e-5, atol=1e-6)
        model.zero_grad(), plain.zero_grad()


@pytest.mark.parametrize("between", ["nothing", "break", "helper"])
@pytest.mark.parametrize("order", ["in order", "reversed", "retained"])
def test_what_was_collected_is_added_once(pool, order, between):
    """However many graphs read the weight, and however many backwards were built before the first of them ran."""
    pool.run(2, deferred_and, order, between)


def test_a_failed_backward_does_not_lose_what_was_collected(pool):
    pool.run(2, deferred_and, "fails", "helper")
