"""Train a model on one process and sharded on several ranks, and compare.

    case = Case(models.decoder, models.token_batch, models.token_loss)
    check(pool, case, world=2, lowering="fx")

One process sees the global batch, each rank its slice; losses are means, so the mean over ranks is the global loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from models import square_loss, token_batch, token_loss, vector_batch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard

ENTRIES = ("oneliner", "fully_shard", "method", "function")


@dataclass(frozen=True)
class Case:
    """What to train: all functions importable by name, so that workers find them. ``clip``: largest gradient norm, None for none."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    steps: int = 3
    optimizer: str = "adamw"
    lr: float = 1e-3
    eps: float = 1e-6
    clip: float | None = None
    micro: int = 1

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=self.lr, eps=self.eps, foreach=False)
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9, foreach=False)


@dataclass
class Run:
    """Losses and gradient norms by step, parameters by FQN after the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def part(x: Any, index: int, count: int) -> Any:
    """Slice number ``index`` of ``count`` along dimension 0."""
    if not isinstance(x, Tensor):
        return x
    assert x.shape[0] % count == 0, f"{x.shape[0]} rows do not split over {count}"
    return x.tensor_split(count)[index]


def loop(case: Case, step_loss: Callable[..., Tensor], params: list[nn.Parameter], rank: int = 0, world: int = 1) -> Run:
    """The training loop, the same for one process and for a rank of many."""
    optimizer = case.make_optimizer(params)
    run = Run()
    for step in range(case.steps):
        total = 0.0
        for k in range(case.micro):
            inputs = [part(part(x, k, case.micro), rank, world) for x in case.batch(step)]
            loss = step_loss(*inputs) / case.micro
            loss.backward()
            total += float(loss.detach())
        value = torch.tensor(total, dtype=torch.float64)
        if world > 1:
            dist.all_reduce(value)
        run.losses.append(value.item() / world)
        if case.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(params, case.clip)
            run.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return run


def full(p: Tensor) -> Tensor:
    """The whole value of a parameter (a collective where it is sharded)."""
    p = p.detach()
    return (p.full_tensor() if isinstance(p, DTensor) else p).clone()


def lengths_alike(fast: Any, model: nn.Module, plain: nn.Module, plan: list[list[int]]) -> None:
    """Compare gradients on sequences whose length differs between ranks and steps; ``plan[rank]`` holds the lengths by step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(len(plan[0])):
        for r in range(world):
            x, y = token_batch(step, rows=2, length=plan[r][step])
            (token_loss(plain(x), y) / world).backward()
            if r == rank:
                token_loss(fast(x), y).backward()
        for n, p in plain.named_parameters():
            torch.testing.assert_close(full(model.get_parameter(n).grad), p.grad, rtol=1e-4, atol=1e-6)
        plain.zero_grad()
        model.zero_grad()


@functools.cache
def one_process(case: Case) -> Run:
    """Plain eager training on the global batch."""
    torch.set_num_threads(1)
    model = case.build()
    run = loop(case, lambda x, *rest: case.loss(model(x), *rest), list(model.parameters()))
    run.params = {n: full(p) for n, p in model.named_parameters()}
    return run


def step_function(model: nn.Module, case: Case, entry: str, options: dict[str, Any], shard_args: dict[str, Any]) -> Callable[..., Tensor]:
    """How the model is compiled: the four ways in which a user may ask for it."""
    if entry == "function":
        return torch.compile(lambda x, *rest: case.loss(model(x), *rest), backend="fsdp", options={**options, **shard_args})
    if entry == "method":
        model.compile(backend="fsdp", options={**options, **shard_args})
        return lambda x, *rest: case.loss(model(x), *rest)
    if entry == "fully_shard":
        fully_shard(model, **shard_args)
        compiled = torch.compile(model, backend="fsdp", options=options)
    else:
        compiled = torch.compile(model, backend="fsdp", options={**options, **shard_args})
    return lambda x, *rest: case.loss(compiled(x), *rest)


def sharded(case: Case, entry: str, options: dict[str, Any], shard_args: dict[str, Any] | None = None) -> Run:
    """One rank's training; runs in a worker."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = case.build()
    step_loss = step_function(model, case, entry, options, shard_args or {})
    if entry == "fully_shard":
        params = list(model.parameters())
    else:  # one forward without gradients shards the model
        with torch.no_grad():
            step_loss(*(part(x, rank, world) for x in case.batch(0)))
        params = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in params), "the model was not sharded"
    run = loop(case, step_loss, params, rank, world)
    run.params = {n: full(p) for n, p in model.named_parameters()}
    return run


def assert_close(run: Run, want: Run, tol: float = 1e-5) -> None:
    """Losses, gradient norms and parameters within ``tol``, absolutely; relatively for numbers above 1."""
    assert run.params.keys() == want.params.keys()
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(want.losses), rtol=tol, atol=tol)
    torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(want.norms), rtol=tol, atol=tol)
    for name, value in want.params.items():
        torch.testing.assert_close(run.params[name], value, rtol=0, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


def check(
    pool: Pool,
    case: Case,
    world: int,
    *,
    lowering: str = "fx",
    entry: str = "oneliner",
    tol: float = 1e-5,
    options: dict[str, Any] | None = None,
    shard_args: dict[str, Any] | None = None,
    timeout_s: float = 120.0,
) -> list[Run]:
    """Train sharded over ``world`` ranks and compare every rank with one process."""
    runs = pool.run(world, sharded, case, entry, {"lowering": lowering, **(options or {})}, shard_args, timeout_s=timeout_s)
    want = one_process(case)
    moved = max(float((want.params[n] - p.detach()).abs().max()) for n, p in case.build().named_parameters() if p.requires_grad)
    assert moved > 10 * tol, f"training moved the parameters by {moved:.1e} only: the comparison would prove nothing"
    for run in runs:
        assert_close(run, want, tol)
    return runs


def train_alike(
    plain: nn.Module,
    model: Callable[..., Tensor],
    batches: list[tuple[Tensor, ...]],
    loss: Callable[..., Tensor],
    *,
    module: nn.Module | None = None,
    tol: float = 1e-5,
    lr: float = 0.1,
) -> None:
    """Inside a worker: train ``plain`` on each whole batch and ``model`` on this rank's part; assert equal losses and parameters.

    ``module``: the module whose parameters are trained, if ``model`` is a function around it. Frozen parameters stay bit-identical."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inner: nn.Module = module if module is not None else model  # type: ignore[assignment]
    inner = getattr(inner, "_orig_mod", inner)
    frozen = {n: full(p) for n, p in inner.named_parameters() if not p.requires_grad}
    opt, opt_plain = (torch.optim.SGD(m.parameters(), lr=lr, foreach=False) for m in (inner, plain))
    for x, y in batches:
        want = loss(plain(x), y)
        want.backward()
        got = loss(model(part(x, rank, world)), part(y, rank, world))
        got.backward()
        mean = got.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / world, want.detach(), rtol=tol, atol=tol)
        for o in (opt, opt_plain):
            o.step()
            o.zero_grad()
    names = dict(inner.named_parameters())
    assert list(names) == [n for n, _ in plain.named_parameters()]
    for n, p in plain.named_parameters():
        torch.testing.assert_close(full(names[n]).to(p.dtype), p.detach(), rtol=0, atol=tol, msg=lambda m, n=n: f"{n}: {m}")
    for n, v in frozen.items():
        assert torch.equal(full(names[n]), v), f"frozen {n} changed"


class Cut:
    """``cut(x)``: the rows of a whole batch that this run sees: all in one process, this rank's slice in a sharded run."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)

    def __call__(self, x: Any) -> Any:
        return part(x, self.rank, self.world)


def train(module: nn.Module, run: Any, cut: Cut, opt: Any, before_step: Callable[[], Any] = lambda: None, steps: int = 3) -> list[Any]:
    """The usual loop over `models.vector_batch`; returns what ``before_step`` said each time."""
    said = []
    for step in range(steps):
        x, y = vector_batch(step)
        square_loss(run(cut(x)), cut(y)).backward()
        said.append(before_step())
        opt.step()
        opt.zero_grad()
    return [s for s in said if s is not None]


def alike(
    script: Callable[..., Any],
    build: Callable[[], nn.Module],
    *,
    explicit: bool = False,
    tol: float = 1e-5,
    moved: float = 1e-4,
    options: dict[str, Any] | None = None,
) -> None:
    """Inside a worker: a user's training script, ``script(module, run, cut)``, on a plain model and on a sharded one.

    ``run`` is what the script calls. Parameters, and the tensors that it returns, must be equal in the end; a parameter must have moved."""
    plain, model = build(), build()
    if explicit:
        fully_shard(model)
    want = script(plain, plain, Cut(False))
    got = script(model, torch.compile(model, backend="fsdp", options={"lowering": "fx", **(options or {})}), Cut(True))
    assert all(isinstance(p, DTensor) for p in model.parameters()), "the model was not sharded"
    for n, p in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(n)), p.detach(), rtol=tol, atol=tol, msg=lambda m, n=n: f"{n}: {m}")
    for i, (a, b) in enumerate(zip(got or (), want or (), strict=True)):
        a, b = full(torch.as_tensor(a)), full(torch.as_tensor(b))
        torch.testing.assert_close(a, b, rtol=tol, atol=tol, msg=lambda m, i=i: f"result {i}: {m}")
    most = max(float((p - q).detach().abs().max()) for p, q in zip(plain.parameters(), build().parameters()))
    assert most >= moved, f"training moved the parameters by {most:.1e} only: the comparison would prove nothing"
