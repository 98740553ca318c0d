"""What users write around a step: optimizers, clipping, scaling, schedulers, hooks. One process and two ranks agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
from parity import Cut, alike, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard

Params = Any


# --- optimizers -----------------------------------------------------------------------------------------------------------


class ByNumel(torch.optim.Optimizer):
    """An optimizer of the user's own that looks at sizes: numel, shape and dtype must be those of the whole parameter."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / math.sqrt(p.numel() * p.shape[0] / p.dim()), alpha=-0.5)


EPS = {"lr": 1e-2, "eps": 1e-6}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), **EPS, foreach=False),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), **EPS, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), **EPS, fused=True),
    "adamw amsgrad": lambda m: torch.optim.AdamW(m.parameters(), **EPS, amsgrad=True),
    "sgd nesterov foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, eps=1e-6),
    "reads numel": lambda m: ByNumel(m.parameters()),
    "groups by ndim": lambda m: torch.optim.AdamW(
        [{"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 0.5}, {"params": [p for p in m.parameters() if p.ndim < 2]}],
        **EPS,
    ),
    "groups by name": lambda m: torch.optim.AdamW(
        [
            {"params": [p for n, p in m.named_parameters() if n.startswith("a.")], "lr": 3e-2},
            {"params": [p for n, p in m.named_parameters() if not n.startswith("a.")]},
        ],
        **EPS,
    ),
}


def optimize(name: str, before: bool) -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> None:
        if not before:
            with torch.no_grad():
                run(cut(models.vector_batch(0)[0]))
        train(module, run, cut, OPTIMIZERS[name](module))

    alike(script, models.mlp)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(pool, name):
    """Half of them are built before the first call, which re-points them, half after."""
    pool.run(2, optimize, name, list(OPTIMIZERS).index(name) % 2 == 0)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "adafactor": (lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2), "in-place operations that require placement changes"),
    "sgd fused": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True), "_fused_sgd_.default does not have a sharding strategy"),
}


def refused(name: str, shard: Callable[[nn.Module], Any]) -> None:
    model, (make, match) = models.mlp(), REFUSED[name]
    shard(model)
    opt = make(model)
    model(models.vector_batch(0)[0]).sum().backward()
    with pytest.raises(Exception, match=match):
        opt.step()


@pytest.mark.parametrize("shard", [fully_shard, fsdp2], ids=["ours", "fsdp2"])
@pytest.mark.parametrize("name", REFUSED)
def test_optimizer_that_torch_refuses_on_dtensors(pool, name, shard):
    """Loudly, and for FSDP2's parameters too. If one of these starts to work, move it to OPTIMIZERS and correct docs/works.md."""
    pool.run(2, refused, name, shard)


def compiled_step(backend: str) -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> None:
        opt = torch.optim.AdamW(module.parameters(), **EPS, foreach=True)
        step = torch.compile(opt.step, backend=backend) if cut.sharded else opt.step
        for i in range(3):
            x, y = models.vector_batch(i)
            models.square_loss(run(cut(x)), cut(y)).backward()
            step()
            opt.zero_grad()

    alike(script, models.mlp, explicit=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])])
def test_compiled_optimizer_step(pool, backend):
    pool.run(2, compiled_step, backend, timeout_s=200)


def scheduler() -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[float]:
        opt = torch.optim.SGD(module.parameters(), lr=0.5)
        warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=2)
        late = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 3)
        schedule = torch.optim.lr_scheduler.SequentialLR(opt, [warm, late], [2])
        rates = []
        for _ in range(4):
            train(module, run, cut, opt, steps=1)
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return rates

    alike(script, models.mlp)


def test_scheduler_of_an_optimizer_built_before_sharding(pool):
    pool.run(2, scheduler)


# --- gradients ------------------------------------------------------------------------------------------------------------


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05),
    "norm foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, foreach=True),
    "largest": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=float("inf")),
    "norm by hand": lambda m: nn.utils.clip_grads_with_norm_(
        m.parameters(), 0.05, nn.utils.get_total_norm([p.grad for p in m.parameters()])
    ),
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.002),
}


def clip(name: str) -> None:
    def script(module: nn.Module, run: Any, cut: Cut) -> list[Tensor]:
        def clip_it() -> Any:
            before = [parity.full(p.grad) for p in module.parameters()]
            norm = CLIPS[name](module)
            assert any((parity.full(p.grad) - b).abs().max() > 1e-3 for p, b in zip(module.parameters(), before)), "nothing was clipped"
            return norm

        return train(module, run, cut, torch.optim.SGD(module.parameters(), lr=1.0), clip_it)

    alike(script, models.mlp)


@pytest.mark.parametrize("name, world", [*((n, 2) for n in CLIPS), ("norm", 3), ("value", 3)])
def test_clipping(pool, name, world):
    pool.run(world, clip, name)


def scale_gradients() -> None:
    """Step 1 has an Inf in the last rank's input, step 2 one in the last rank's shard of a gradient: all ranks skip both."""

    def script(module: nn.Module, run: Any, cut: Cut) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        opt = torch.optim.SGD(module.parameters(), lr=0.5)
        said = []
        for step in range(5):
            x, y = models.vector_batch(step)
            if step == 1:
                x[-1, 0] = float("inf")
            before = parity.full(module.a.weight)
            with torch.autocast("cpu", torch.float16):
                out = run(cut(x))
            assert out.dtype == torch.float16
            scaler.scale(models.square_loss(out, cut(y))).backward()
            if step == 2:
                grad = module.b.weight.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                if cut.rank == cut.world - 1:
                    local[-1, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            skipped = torch.equal(parity.full(module.a.weight), before)
            assert skipped == (step in (1, 2)), (step, skipped)
            said.append(scaler.get_scale())
        return said

    alike(script, models.mlp, explicit=True, tol=2e-3, moved=2e-2)


@pytest.mark.parametrize("world", [2, 3])
def test_grad_scaler_skips_on_all_ranks(pool, world):
    pool.run(world, scale_gradients)


def hooks_each_step() -> None:
    """An optimizer step inside the hook, as memory-saving loops do; the hook fires once for each backward."""

    def script(module: nn.Module, run: Any, cut: Cut) -> list[int]:
        with torch.no_grad():
            run(cut(models.vector_batch(0)[0]))
        opts = {p: torch.optim.SGD([p], lr=0.3) for p in module.parameters()}
        fired = []

        def step_one(p: Tensor) -> None:
            opts[p].step()
            p.grad = None
            fired.append(p.numel())

        for p in module.parameters():
            p.register_post_accumulate_grad_hook(step_one)
        for i in range(3):
            x, y = models.vector_batch(i)
            models.square_loss(run(cut(x)), cut(y)).backward()
        return sorted(fired)

    alike(script, models.mlp)


def test_optimizer_in_post_accumulate_hook(pool):
    pool.run(2, hooks_each_step)
