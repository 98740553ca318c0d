"""Gathers that start before their graph: the same numbers, bit for bit, whatever happens in between."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
import torch.distributed as dist
from fsdp_compile.runtime import early
from torch import Tensor, nn

from fsdp_compile import fully_shard
from fsdp_compile.options import parse

Taken = list[tuple[bool, int]]
Script = Callable[[nn.Module, Any], None]


def run(script: Script, on: bool, lowering: str = "fx", **shard: Any) -> tuple[list[Tensor], Taken]:
    """Whole parameters after ``script``; for each graph that found gathers started, whether it took them over, and how many."""
    taken: Taken = []
    settle = early.Early.settle

    def watched(self: early.Early, take: bool) -> None:
        if self.flights:
            taken.append((take, len(self.flights)))
        settle(self, take)

    early.Early.settle = watched  # type: ignore[method-assign]
    try:
        model = fully_shard(models.mlp(), **shard)
        options = {"lowering": lowering, "bucket_bytes": 0, "keep_bytes": 0, "early_gathers": on}
        script(model, torch.compile(model, backend="fsdp", options=options))
        return [parity.full(p) for p in model.parameters()], taken
    finally:
        early.Early.settle = settle  # type: ignore[method-assign]
        early.drop_all()
        torch.compiler.reset()


def batch(step: int) -> tuple[Tensor, ...]:
    return tuple(parity.part(t, dist.get_rank(), dist.get_world_size()) for t in models.vector_batch(step))


def step(fast: Any, opt: torch.optim.Optimizer, n: int) -> None:
    x, y = batch(n)
    models.square_loss(fast(x), y).backward()
    opt.step()
    opt.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


# --- loops --------------------------------------------------------------------------------------------------------------


def plain(model: nn.Module, fast: Any) -> None:
    opt = adam(model)
    for n in range(4):
        step(fast, opt, n)


def evaluating(model: nn.Module, fast: Any) -> None:
    opt = adam(model)
    for n in range(4):
        step(fast, opt, n)
        with torch.no_grad():
            fast(batch(n)[0])


def accumulating(model: nn.Module, fast: Any) -> None:
    opt = adam(model)
    for n in range(4):
        x, y = batch(n)
        models.square_loss(fast(x), y).backward()
        step(fast, opt, n + 10)


def without_backward(model: nn.Module, fast: Any) -> None:
    opt = adam(model)
    for n in range(4):
        fast(batch(n)[0])
        step(fast, opt, n)


def two_then_two(model: nn.Module, fast: Any) -> None:
    opt = adam(model)
    for n in range(4):
        losses = [models.square_loss(fast(x), y) for x, y in (batch(n), batch(n + 10))]
        for loss in losses:
            loss.backward()
        opt.step()
        opt.zero_grad()


def two_optimizers(model: nn.Module, fast: Any) -> None:
    params = list(model.parameters())
    one, two = torch.optim.SGD(params[::2], lr=0.1), adam(model)
    for n in range(4):
        step(fast, two, n)
        step(fast, one, n)
        two.zero_grad()


def failing(model: nn.Module, fast: Any) -> None:
    opt = adam(model)
    for n in range(4):
        step(fast, opt, n)
        x, _ = batch(n)
        with pytest.raises(ArithmeticError):
            models.Boom.apply(fast(x)).sum().backward()
        opt.zero_grad()


LOOPS: dict[str, tuple[Script, Any]] = {
    "plain": (plain, lambda took: took == [(True, 4), (True, 2)] * 2),
    "evaluating": (evaluating, lambda took: sum(t for t, _ in took) >= 5),
    "accumulating": (accumulating, lambda took: sum(t for t, _ in took) >= 5),
    "without_backward": (without_backward, lambda took: sum(t for t, _ in took) >= 5),
    "two_then_two": (two_then_two, lambda took: sum(t for t, _ in took) >= 5),
    "two_optimizers": (two_optimizers, lambda took: sum(t for t, _ in took) >= 5),
    "failing": (failing, lambda took: any(t for t, _ in took)),
}


def loop(name: str, lowering: str = "fx", **shard: Any) -> Taken:
    script, enough = LOOPS[name]
    (want, none), (got, took) = run(script, False, lowering, **shard), run(script, True, lowering, **shard)
    assert none == [] and enough(took), took
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)
    return took


@pytest.mark.parametrize(("world", "name"), [(2, name) for name in LOOPS] + [(3, "evaluating"), (3, "two_then_two")])
def test_loops_give_the_same_bits(pool, world, name):
    took = pool.run(world, loop, name)
    assert all(t == took[0] for t in took), "what is taken over is the same on every rank"


def test_cast_weights(pool):
    pool.run(2, loop, "plain", mp_policy=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.inductor
def test_through_inductor(pool):
    pool.run(2, loop, "plain", "inductor", timeout_s=200)


# --- never stale ----------------------------------------------------------------------------------------------------------


def foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.9)


def data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.9)


def local(model: nn.Module) -> None:
    for p in model.parameters():
        p.to_local().mul_(0.9)


def one_element(model: nn.Module) -> None:
    next(iter(model.parameters())).to_local().view(-1)[-1] += 1.0


def on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        one_element(model)


def rows_swapped(model: nn.Module) -> None:
    w = next(iter(model.parameters())).to_local()
    w.copy_(w.flip(0))


def loaded(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})


def assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}, assign=True)


def broadcast(model: nn.Module) -> None:
    for p in model.parameters():
        if p.shape[0] % dist.get_world_size() == 0:
            dist.broadcast(p.to_local(), 0)


WRITES = {w.__name__: w for w in (foreach, data, local, one_element, on_one_rank, rows_swapped, loaded, assigned, broadcast)}


def written(name: str) -> None:
    def script(where: str, model: nn.Module, fast: Any) -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for n in range(4):
            if n == 2 and where == "after the step":
                with torch.no_grad():
                    WRITES[name](model)
            x, y = batch(n)
            loss = models.square_loss(fast(x), y)
            if n == 2 and where == "before backward":
                with torch.no_grad():
                    WRITES[name](model)
            loss.backward()
            opt.step()
            opt.zero_grad()

    for where in ("after the step", "before backward"):
        of = functools.partial(script, where)
        (want, _), (got, took) = run(of, False), run(of, True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=0)
        assert any(t for t, _ in took)
        if where == "after the step":
            assert not all(t for t, _ in took), "what was started before the write was taken over"


@pytest.mark.parametrize("name", WRITES)
def test_what_was_started_before_a_write_is_dropped(pool, name):
    pool.run(2, written, name)


# --- ranks that disagree, options -------------------------------------------------------------------------------------------


def steps_alone() -> str:
    def script(model: nn.Module, fast: Any) -> None:
        opt = adam(model)
        for n in range(3):
            step(fast, opt, n)
        x, y = batch(3)
        models.square_loss(fast(x), y).backward()
        if dist.get_rank() == 0:
            opt.step()
        start = time.monotonic()
        try:
            fast(x)
        finally:
            assert time.monotonic() - start < 20

    try:
        run(script, True)
    except RuntimeError as e:
        return f"{type(e).__name__}: {e}"
    raise AssertionError("rank 1 has not stepped its optimizer, and nobody noticed")


def test_an_optimizer_that_steps_on_one_rank_only(pool):
    for text in pool.run(2, steps_alone):
        assert "RankMismatch" in text and "rank 0: optimizer" in text and "rank 1: forward" in text, text


def test_the_option_is_a_bool():
    with pytest.raises(TypeError, match="early_gathers must be True or False, got 'yes'"):
        parse({"early_gathers": "yes"})
