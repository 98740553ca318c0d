"""State dicts of models and optimizers: to a plain model and back, with torch's own helpers, and through a restart."""

from __future__ import annotations

from typing import Any

import models
import parity
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="fsdp", options={"lowering": "fx"})


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def other() -> nn.Module:
    """As `models.mlp`, with other numbers."""
    model = models.mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-0.7)
    return model


def train(run: Any, opt: torch.optim.Optimizer, steps: range, cut: parity.Cut) -> None:
    for step in steps:
        x, y = models.vector_batch(step)
        models.square_loss(run(cut(x)), cut(y)).backward()
        opt.step()
        opt.zero_grad()


def plainly(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.mlp()
    opt = optimizer(model)
    train(model, opt, range(steps), parity.Cut(False))
    return model, opt


def sharded(model: nn.Module) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    fast, opt = compiled(model), optimizer(model)
    with torch.no_grad():
        fast(models.vector_batch(0)[0])
    return model, fast, opt


def assert_equal(model: nn.Module, want: nn.Module) -> None:
    for n, p in want.named_parameters():
        torch.testing.assert_close(parity.full(model.get_parameter(n)), p.detach(), rtol=1e-5, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")


def to_plain_and_back(through: str) -> None:
    model, fast, opt = sharded(models.mlp())
    train(fast, opt, range(2), parity.Cut(True))
    source = fast if through == "compiled" else model
    state = {k: parity.full(v) for k, v in source.state_dict().items()}
    plain = models.mlp()
    target = torch.compile(plain, backend="eager") if through == "compiled" else plain
    target.load_state_dict(state)  # strict: names are those of the plain (or of the compiled plain) model
    want, _ = plainly(2)
    assert_equal(model, want)
    assert_equal(plain, want)
    new, new_fast, _ = sharded(other())
    like = new_fast if through == "compiled" else new
    like.load_state_dict({k: distribute_tensor(v, p.device_mesh, p.placements) for (k, v), p in zip(state.items(), new.parameters())})
    assert_equal(new, want)
    x, _ = models.vector_batch(9)
    torch.testing.assert_close(new_fast(x), want(x))


@pytest.mark.parametrize("through", ["compiled", "inner"])
def test_state_dict_loads_into_a_plain_model_and_back(pool, through):
    pool.run(2, to_plain_and_back, through)


def into_sharded_later(through: str) -> None:
    """A plain model's file is loaded before the first call, when the compiled model is still plain."""
    want, _ = plainly(2)
    model = other()
    fast = compiled(model)
    state = want.state_dict()
    fast.load_state_dict({f"_orig_mod.{k}": v for k, v in state.items()}) if through == "compiled" else model.load_state_dict(state)
    x, _ = models.vector_batch(9)
    torch.testing.assert_close(fast(x), want(x))
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("through", ["compiled", "inner"])
def test_plain_state_loads_before_the_first_call(pool, through):
    pool.run(2, into_sharded_later, through)


def plain_tensors_are_refused() -> None:
    model, _, _ = sharded(models.mlp())
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.load_state_dict(other().state_dict())


def test_plain_tensors_into_a_sharded_model_are_refused(pool):
    pool.run(2, plain_tensors_are_refused)


def full_on_rank_0(through: str) -> None:
    """What rank 0 would write into one file, and a new run that starts from it; the optimizer's state goes along."""
    model, fast, opt = sharded(models.mlp())
    source = fast if through == "compiled" else model
    train(fast, opt, range(2), parity.Cut(True))
    weights, moments = get_model_state_dict(source, options=FULL), get_optimizer_state_dict(source, opt, options=FULL)
    plain, plain_opt = plainly(2)
    if dist.get_rank() == 0:
        assert list(weights) == list(plain.state_dict()) and all(type(v) is Tensor for v in weights.values())
        loaded = models.mlp()
        loaded.load_state_dict(weights)
        assert_equal(loaded, plain)
        for n, p in plain.named_parameters():
            torch.testing.assert_close(moments["state"][n]["exp_avg"], plain_opt.state[p]["exp_avg"], rtol=1e-5, atol=1e-6)
    else:
        assert not weights and not moments.get("state"), "rank 1 holds the whole model"
    new, new_fast, new_opt = sharded(other())
    sink = new_fast if through == "compiled" else new
    set_model_state_dict(sink, weights, options=FROM_RANK_0)
    set_optimizer_state_dict(sink, new_opt, moments, options=FROM_RANK_0)
    train(new_fast, new_opt, range(2, 4), parity.Cut(True))
    assert_equal(new, plainly(4)[0])


@pytest.mark.parametrize("through", ["compiled", "inner"])
def test_full_state_dict_on_rank_0_and_restart(pool, through):
    pool.run(2, full_on_rank_0, through)


def sharded_state() -> None:
    """Each rank keeps its shards: no rank ever holds a whole tensor."""
    model, fast, opt = sharded(models.mlp())
    train(fast, opt, range(2), parity.Cut(True))
    weights, moments = get_state_dict(model, opt)
    assert all(isinstance(v, DTensor) for v in weights.values())
    assert all(isinstance(s["exp_avg"], DTensor) for s in moments["state"].values())
    new, new_fast, new_opt = sharded(other())
    set_state_dict(new, new_opt, model_state_dict=weights, optim_state_dict=moments)
    train(new_fast, new_opt, range(2, 4), parity.Cut(True))
    assert_equal(new, plainly(4)[0])


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_state_dict_and_restart(pool, world):
    pool.run(world, sharded_state)


def optimizers_own() -> None:
    model, fast, opt = sharded(models.mlp())
    train(fast, opt, range(2), parity.Cut(True))
    new, new_fast, new_opt = sharded(other())
    new.load_state_dict(model.state_dict())
    new_opt.load_state_dict(opt.state_dict())
    train(new_fast, new_opt, range(2, 4), parity.Cut(True))
    assert_equal(new, plainly(4)[0])


def test_state_dict_of_the_optimizer_itself(pool):
    pool.run(2, optimizers_own)


def plain_optimizer_state() -> None:
    """An optimizer that was loaded with a plain run's state before the first call is sharded along with the model."""
    plain, plain_opt = plainly(2)
    model = models.mlp()
    opt = optimizer(model)
    model.load_state_dict(plain.state_dict())
    opt.load_state_dict(plain_opt.state_dict())
    train(compiled(model), opt, range(2, 4), parity.Cut(True))
    assert all(isinstance(s["exp_avg"], DTensor) for s in opt.state.values())
    assert_equal(model, plainly(4)[0])


def test_optimizer_state_loaded_before_the_first_call(pool):
    pool.run(2, plain_optimizer_state)
