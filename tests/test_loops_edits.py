"""Parameters that users change between steps: edits, initialisers, moving averages; several models with an optimizer each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
from parity import Cut, alike, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard

EDITS: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: p.copy_(p * 0.25 + 0.1),
    "data.clamp_": lambda p: p.data.clamp_(-0.05, 0.05),
    "constant_": lambda p: nn.init.constant_(p, 0.125),
    "masked_fill_": lambda p: p.masked_fill_(p > 0.1, 0.0),
}


def edit(name: str) -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[Tensor]:
        opt = torch.optim.SGD(module.parameters(), lr=0.1)
        train(module, run, cut, opt, steps=1)
        with torch.no_grad():
            EDITS[name](module.c.weight)
            EDITS[name](module.a.bias)
        x, _ = models.vector_batch(7)
        with torch.no_grad():  # what the edited model says about the same rows on every rank
            seen = run(x)
        train(module, run, cut, opt, steps=2)
        return [seen]

    alike(script, models.mlp)


@pytest.mark.parametrize("name", EDITS)
def test_in_place_edit_is_seen_by_the_next_forward(pool, name):
    pool.run(2, edit, name)


def initialise() -> None:
    """Fans are those of the whole weight, ranks draw their own numbers, and the next forward sees them."""
    model = fully_shard(models.mlp(hidden=64))
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx"})
    x, _ = models.vector_batch(0)
    fast(x).sum().backward()
    torch.manual_seed(torch.distributed.get_rank())  # on CPU, DTensor's random operators draw alike on ranks with one seed
    weight = model.b.weight
    bound = math.sqrt(6 / 128)
    nn.init.xavier_uniform_(weight)
    whole = parity.full(weight)
    assert 0.95 * bound < whole.abs().max() <= bound, "the fan of a shard was used"
    halves = whole.chunk(2)
    assert not torch.equal(*halves), "both ranks drew the same numbers"
    nn.init.kaiming_normal_(weight)
    assert abs(parity.full(weight).std() - math.sqrt(2 / 64)) < 0.01
    nn.init.trunc_normal_(model.c.weight, std=0.3, a=-0.6, b=0.6)
    assert 0.2 < parity.full(model.c.weight).std() < 0.35
    nn.init.ones_(model.a.bias)
    plain = models.mlp(hidden=64)
    plain.load_state_dict({k: parity.full(v) for k, v in model.state_dict().items()})
    torch.testing.assert_close(fast(x), plain(x))


def test_initialisers_on_sharded_parameters(pool):
    pool.run(2, initialise)


def moving_average() -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[Tensor]:
        opt = torch.optim.SGD(module.parameters(), lr=0.3)
        train(module, run, cut, opt, steps=1)
        slow = copy.deepcopy(module).requires_grad_(False)
        held = [p.detach().clone() for p in module.parameters()]
        for _ in range(3):
            train(module, run, cut, opt, steps=1)
            with torch.no_grad():
                for a, b, p in zip(slow.parameters(), held, module.parameters()):
                    a.lerp_(p, 0.3)
                    b.lerp_(p, 0.3)
        asked = torch.compile(slow, backend="fsdp", options={"lowering": "fx"}) if cut.sharded else slow
        return [asked(models.vector_batch(0)[0]), *slow.parameters(), *held]

    alike(script, models.mlp)


def test_moving_average_of_the_weights(pool):
    pool.run(2, moving_average)


def swa_model() -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[Tensor]:
        opt = torch.optim.SGD(module.parameters(), lr=0.3)
        train(module, run, cut, opt, steps=1)
        slow = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
        for _ in range(3):
            train(module, run, cut, opt, steps=1)
            slow.update_parameters(module)
        return list(slow.module.parameters())

    alike(script, models.mlp)


def test_averaged_model_of_torch(pool):
    pool.run(2, swa_model)


# --- several models -------------------------------------------------------------------------------------------------------


def generator_and_critic() -> None:
    """Each has its optimizer; the critic judges real and made rows, its gradient flows through to the generator."""

    def play(make: nn.Module, judge: nn.Module, owners: tuple[nn.Module, nn.Module], cut: Cut) -> None:
        opts = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-6, betas=(0.5, 0.9)) for m in owners]
        for i in range(3):
            noise, _ = models.vector_batch(i)
            real, _ = models.vector_batch(50 + i)
            noise, real = cut(noise), cut(real)
            opts[1].zero_grad()
            (judge(make(noise).detach()).sigmoid().mean() - judge(real).sigmoid().mean()).backward()
            opts[1].step()
            opts[0].zero_grad()
            (-judge(make(noise)).sigmoid().mean()).backward()
            opts[0].step()

    def pair() -> tuple[nn.Module, nn.Module]:
        return models.mlp(out=10), models.mlp(hidden=9, out=1)

    plain, ours = pair(), pair()
    play(*plain, plain, Cut(False))
    compiled = [torch.compile(m, backend="fsdp", options={"lowering": "fx"}) for m in ours]
    play(*compiled, ours, Cut(True))
    for m, p in zip(ours, plain):
        assert len({x for x in m.parameters() if isinstance(x, DTensor)}) == 6
        for (n, a), b in zip(m.named_parameters(), p.parameters()):
            torch.testing.assert_close(parity.full(a), b.detach(), rtol=1e-5, atol=1e-5, msg=lambda t, n=n: f"{n}: {t}")


def test_generator_and_critic(pool):
    pool.run(2, generator_and_critic)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def converted_through_one() -> None:
    model, plain = Tied(), Tied()
    fast = torch.compile(fully_shard(model), backend="fsdp", options={"lowering": "fx"})
    x = torch.ones(3, 5)
    fast(x).sum().backward()
    model.zero_grad()
    for m in (model, plain):
        m.last.double().float()
        with torch.no_grad():
            m.first.weight.fill_(0.25)
    out, want = fast(x), plain(x)
    out.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(parity.full(model.last.weight.grad), plain.last.weight.grad, rtol=0, atol=1e-5)


def test_a_tied_weight_is_converted_for_all_who_read_it(pool):
    pool.run(2, converted_through_one)
