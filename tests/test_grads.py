"""Gradients on their way from leaves to parameters: what a user sees on ``p.grad``, when, and whose it is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

FX = {"lowering": "fx"}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Two(nn.Module):
    """Two graphs, between which backward may fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.fail = False

    @torch._dynamo.disable
    def between(self, x: Tensor) -> Tensor:
        return models.Boom.apply(x) if self.fail else x

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def backward(fast: nn.Module, step: int) -> None:
    x, y = models.vector_batch(step)
    models.square_loss(fast(x), y).backward()


def want(step: int) -> list[Tensor]:
    plain = models.mlp()
    backward(plain, step)
    return [p.grad for p in plain.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("holder", ["variable", "another's grad"])
def test_a_gradient_that_somebody_keeps_stays_as_it_is(holder: str) -> None:
    model = models.mlp()
    fast = torch.compile(model, backend="fsdp", options=FX)
    kept: Any = []
    for step in range(3):
        backward(fast, step)
        if holder == "variable":
            kept.append([p.grad for p in model.parameters()])
        else:
            others = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
            for p, q in zip(model.parameters(), others):
                q.grad = p.grad
            kept.append(others)
        model.zero_grad()
    for step, each in enumerate(kept):
        for held, g in zip(each, want(step), strict=True):
            torch.testing.assert_close((held if holder == "variable" else held.grad).full_tensor(), g)


def test_zero_grad_frees_gradients() -> None:
    model = models.mlp()
    fast = torch.compile(model, backend="fsdp", options=FX)
    backward(fast, 0)
    refs = [weakref.ref(p.grad._local_tensor) for p in model.parameters()]
    assert all(ref() is not None for ref in refs)
    model.zero_grad()
    assert all(ref() is None for ref in refs)


def test_what_arrived_before_a_failure_is_there() -> None:
    model = Two()
    fast = torch.compile(model, backend="fsdp", options=FX)
    fast(torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    model.fail = True
    with pytest.raises(ArithmeticError):
        fast(torch.ones(2, 6)).sum().backward()
    assert model.b.bias._fsdp_shard.grad is None and model.b.bias.grad.full_tensor().tolist() == [2.0] * 6
    assert model.a.weight.grad is None
    model.zero_grad()
    model.fail = False
    fast(torch.ones(2, 6)).sum().backward()
    assert model.b.bias.grad.full_tensor().tolist() == [2.0] * 6


def test_other_gradients_alone_touch_no_parameter() -> None:
    model = models.mlp()
    fast = torch.compile(model, backend="fsdp", options=FX)
    x, y = models.vector_batch(0)
    x.requires_grad_()
    (g,) = torch.autograd.grad(models.square_loss(fast(x), y), x)
    assert g.abs().sum() > 0 and all(p.grad is None for p in model.parameters())


def test_hooks_of_the_user_come_when_they_are_registered() -> None:
    model = models.mlp()
    fast = torch.compile(model, backend="fsdp", options=FX)
    backward(fast, 0)
    model.zero_grad()
    said: list[str] = []
    model.a.weight.register_post_accumulate_grad_hook(lambda p: said.append(f"post {tuple(p.grad.shape)}"))
    handle = model.b.weight.register_hook(lambda g: said.append("hook"))
    backward(fast, 0)
    assert sorted(said) == ["hook", "post (14, 10)"]
    handle.remove()
    model.zero_grad()
    backward(fast, 1)
    assert said[2:] == ["post (14, 10)"]
    for p, g in zip(model.parameters(), want(1), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), g)


def test_compiled_autograd_is_refused() -> None:
    model = models.mlp()
    fast = torch.compile(model, backend="fsdp", options=FX)
    x, y = models.vector_batch(0)
    loss = models.square_loss(fast(x), y)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'a.weight' has been computed but not delivered.* compiled autograd"):
        opt.step()
