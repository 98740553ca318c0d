"""What users do with forward and backward: evaluation between steps, lengths, several backwards, errors, memory."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from census import least
from parity import Cut, alike
from test_rank_agnostic import Graphs
from torch import Tensor, nn

from fsdp_compile import fully_shard

FX = {"lowering": "fx"}
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])
BATCHES = [models.vector_batch(i) for i in range(4)]


def compiled(model: nn.Module, **kwargs: Any) -> nn.Module:
    return torch.compile(model, backend="fsdp", options=FX, **kwargs)


# --- evaluation between steps -------------------------------------------------------------------------------------------------


def train_and_evaluate(explicit: bool) -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[Tensor]:
        opt = torch.optim.SGD(module.parameters(), lr=0.3)
        seen = []
        for x, y in BATCHES:
            models.square_loss(run(cut(x)), cut(y)).backward()
            opt.step()
            opt.zero_grad()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    seen.append(run(BATCHES[0][0]).clone())
        assert len({float(s.sum()) for s in seen}) == len(BATCHES), "stale weights: each step changes them, the mode does not"
        return [s.detach().clone() for s in seen]

    alike(script, models.mlp, explicit=explicit)


@pytest.mark.parametrize("explicit", [False, True])
def test_evaluation_between_steps_sees_the_newest_weights(pool, explicit):
    pool.run(2, train_and_evaluate, explicit)


# --- lengths ----------------------------------------------------------------------------------------------------------------


def lengths(mark: bool) -> int:
    """Steps of many lengths; returns how many graphs Dynamo handed over."""
    graphs = Graphs("fx")
    plain, model = models.decoder(layers=1), fully_shard(models.decoder(layers=1))
    fast = torch.compile(model, backend=graphs)
    for step, length in enumerate((8, 12, 5, 16, 9)):
        x, y = models.token_batch(step, rows=2, length=length)
        if mark:
            torch._dynamo.mark_dynamic(x, 1)
        for run in (plain, fast):
            models.token_loss(run(x), y).backward()
        for n, p in plain.named_parameters():
            torch.testing.assert_close(parity.full(model.get_parameter(n).grad), p.grad, rtol=1e-4, atol=1e-6)
        plain.zero_grad(), model.zero_grad()
    return sum(stage == "dynamo" for stage, *_ in graphs.texts)


@pytest.mark.parametrize("mark, compiles", [(False, 2), (True, 1)])
def test_lengths_of_each_step(pool, mark, compiles):
    """Unmarked: one static graph and one dynamic; marked with mark_dynamic: the dynamic one alone."""
    assert pool.run(2, lengths, mark) == [compiles] * 2


# --- backward ---------------------------------------------------------------------------------------------------------------


def several_backwards(order: str) -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[Tensor]:
        opt = torch.optim.SGD(module.parameters(), lr=0.3)
        for step in range(2):
            losses = [models.square_loss(run(cut(x)), cut(y)) for x, y in BATCHES[2 * step : 2 * step + 2]]
            if order == "joined":
                torch.stack(losses).sum().backward()
            elif order == "retained":
                losses[0].backward(retain_graph=True)
                losses[1].backward()
                losses[0].backward()
            else:
                for loss in losses if order == "same" else reversed(losses):
                    loss.backward()
            opt.step()
            opt.zero_grad()
        return []

    alike(script, models.mlp)


@pytest.mark.parametrize("order", ["same", "reversed", "joined", "retained"])
def test_two_forwards_then_backwards(pool, order):
    pool.run(2, several_backwards, order)


class Fails(nn.Module):
    """Two compiled graphs with an eager helper between, which fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = models.mlp()
        self.fail = ""

    @torch._dynamo.disable
    def between(self, x: Tensor) -> Tensor:
        if self.fail == "forward":
            raise ArithmeticError("boom")
        return models.Boom.apply(x) if self.fail == "backward" else x

    def forward(self, x: Tensor) -> Tensor:
        return self.net.c(F.gelu(self.net.b(self.between(F.gelu(self.net.a(x))))))


def fail_in_the_middle(where: str) -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[Tensor]:
        opt = torch.optim.SGD(module.parameters(), lr=0.3)
        for step, (x, y) in enumerate(BATCHES):
            module.fail = where if step in (0, 2) else ""  # at the first call too, when nothing is compiled or sharded yet
            try:
                models.square_loss(run(cut(x)), cut(y)).backward()
            except ArithmeticError:
                assert module.fail
            else:
                assert not module.fail
                opt.step()
            opt.zero_grad()
        return []

    alike(script, Fails)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_step_after_an_exception_is_right(pool, where):
    pool.run(2, fail_in_the_middle, where)


# --- memory -----------------------------------------------------------------------------------------------------------------


def census() -> tuple[int, int, int]:
    """Tensors, their bytes and all objects that are alive."""
    objects = gc.get_objects()
    tensors = [o for o in objects if issubclass(type(o), Tensor)]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if type(t) in (Tensor, nn.Parameter)}
    return len(tensors), sum(sizes.values()), len(objects)


def many_steps(kind: str) -> list[tuple[int, int, int]]:
    model = models.mlp()
    fast = compiled(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counts = []
    for step in range(45):
        x, y = models.vector_batch(step)
        with torch.no_grad() if kind == "no_grad" else contextlib.nullcontext():
            loss = models.square_loss(fast(x), y)
        if kind == "train":
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        if step in (14, 29, 44):
            del loss
            counts.append(least(census))
    return counts


@pytest.mark.parametrize("kind", ["train", "no_grad", "forward only"])
def test_memory_is_flat_over_many_steps(pool, kind):
    for counts in pool.run(2, many_steps, kind):
        # The worker may still be losing tensors of earlier tests: what must not happen is growth.
        assert counts[0][0] >= counts[1][0] >= counts[2][0], f"tensors, bytes, objects: {counts}"
        assert counts[0][1] >= counts[1][1] >= counts[2][1], f"tensors, bytes, objects: {counts}"
        assert counts[2][2] - counts[1][2] < 15, f"an object is left over by each step: {counts}"


# --- a layer before the first graph -----------------------------------------------------------------------------------


class BreaksInLoop(nn.Module):
    """A graph break in a loop leaves the frame to eager, and Dynamo skips torch's own `nn.Linear.forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rest = nn.Linear(10, 10), models.mlp()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.rest):
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def layer_before_first_graph(explicit: bool) -> None:
    model = BreaksInLoop()
    if explicit:
        fully_shard(model)
    parity.train_alike(BreaksInLoop(), compiled(model), BATCHES[:2], models.square_loss)


def test_oneliner_when_a_layer_ran_before_the_first_graph(pool):
    pool.run(2, layer_before_first_graph, False)


def test_fully_shard_when_a_layer_ran_before_the_first_graph(pool):
    pool.run(2, layer_before_first_graph, True)
