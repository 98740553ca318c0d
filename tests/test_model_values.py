"""What models compute with and return: operators of their own, checkpoints, norms with state, ties, outputs of every shape."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_model_kinds import BATCHES, Kind, compiled, rand, sequence
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fully_shard


class Scaled(torch.autograd.Function):
    """``x @ w.t()`` whose derivative for w is twice the true one, so that a lost rule shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, 2 * grad.t() @ x


@torch.library.custom_op("fsdp_test::halved", mutates_args=())
def halved(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()) / 2


halved.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[0]))
halved.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1] / 2, grad.t() @ ctx.saved_tensors[0] / 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def own_operators() -> nn.Module:
    run = lambda m, x: halved(torch.tanh(Scaled.apply(x, m.a.weight) + m.a.bias), m.b)  # noqa: E731
    return Kind(run, a=nn.Linear(10, 7), b=rand(3, 7))


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoints() -> nn.Module:
    """One body called twice, one inside another, one that keeps its matrix products."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.inp(x))
        for _ in range(2):
            h = h + checkpoint(m.block, h, use_reentrant=False)
        h = checkpoint(lambda h: torch.sin(m.mid(h)) + checkpoint(m.block, h, use_reentrant=False), h, use_reentrant=False)
        select = functools.partial(create_selective_checkpoint_contexts, keep_products)
        return checkpoint(m.out, h, use_reentrant=False, context_fn=select)

    block = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
    return Kind(run, inp=nn.Linear(10, 7), block=block, mid=nn.Linear(7, 7), out=nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)))


def reentrant_checkpoint() -> nn.Module:
    run = lambda m, x: m.out(checkpoint(m.mid, torch.tanh(m.inp(x)), use_reentrant=True))  # noqa: E731
    return Kind(run, inp=nn.Linear(10, 7), mid=nn.Sequential(nn.Linear(7, 7), nn.Tanh()), out=nn.Linear(7, 3))


def attention_function() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(sequence(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias)
        return m.out(h.transpose(1, 2).flatten(2).mean(1))

    return Kind(run, qkv=nn.Linear(8, 24), bias=rand(2, 5, 5), out=nn.Linear(8, 3))


@dataclass
class Answer:
    main: Tensor
    parts: dict[str, Any]


def split(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(m.inp(x))
    return h, m.out(h)


def of_dataclass() -> nn.Module:
    def run(m: Any, x: Tensor) -> Answer:
        h, y = split(m, x)
        return Answer(y, {"hidden": [h], "size": h.shape[1], "nothing": None})

    return Kind(run, inp=nn.Linear(10, 7), out=nn.Linear(7, 3))


def of_views() -> nn.Module:
    """Views of one tensor, which its own gradient does not need, and of an input."""

    def run(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.inp(x)
        return {"y": m.out(torch.tanh(h)), "left": h[:, :3], "right": h[:, 3:], "x": x[:, :3]}

    return Kind(run, inp=nn.Linear(10, 7), out=nn.Linear(7, 3))


def of_parameters() -> nn.Module:
    """A parameter itself, a view and a function of one."""
    run = lambda m, x: (split(m, x)[1], m.out.weight, m.inp.weight[:3, :4], m.out.bias * 2)  # noqa: E731
    return Kind(run, inp=nn.Linear(10, 7), out=nn.Linear(7, 3))


def modified(out: dict[str, Tensor]) -> Tensor:
    left = out["left"]
    left[:, 0].mul_(2)
    out["y"].add_(1)
    return out["y"] + left + torch.sin(out["right"][:, :3]) + out["x"]


# name → how to build, and what the caller makes of the output
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    **{f.__name__: (f, lambda out: out) for f in (own_operators, checkpoints, reentrant_checkpoint, attention_function)},
    "dataclass": (of_dataclass, lambda out: out.main + out.parts["hidden"][0][:, : out.parts["size"] - 4]),
    "views modified by the caller": (of_views, modified),
    "only one output used": (of_views, lambda out: out["y"]),
    "parameters returned": (of_parameters, lambda out: out[0] + out[1].sum() + out[2].mean() + out[3]),
}


def build(case: str) -> nn.Module:
    torch.manual_seed(6)
    return CASES[case][0]().train()


def trains(case: str, explicit: bool) -> None:
    plain, model = build(case), build(case)
    if explicit:
        fully_shard(model)
    fast, use = compiled(model), CASES[case][1]
    loss = lambda out, y: models.square_loss(use(out), y)  # noqa: E731
    parity.train_alike(plain, fast, BATCHES, loss)
    for n, p in build(case).named_parameters():
        assert isinstance(model.get_parameter(n), DTensor), f"{n} was not sharded"
        assert (plain.get_parameter(n) - p).abs().max() > 1e-4, f"{n} did not train: the comparison proves nothing about it"


@pytest.mark.parametrize("case", CASES)
def test_oneliner(pool, case):
    pool.run(2, trains, case, False)


@pytest.mark.parametrize("case", CASES)
def test_fully_shard(pool, case):
    pool.run(3, trains, case, True)


# --- Norms that keep statistics ---------------------------------------------------------------------------------------


def normed(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(7)
    return Kind(lambda m, x: m.out(torch.tanh(m.norm(m.inp(x)))), inp=nn.Linear(10, 7), norm=norm(7), out=nn.Linear(7, 3))


def batch_norm(same_data: bool) -> None:
    """Statistics are of this rank's data, as in DDP and FSDP2; with the same data everywhere all is as on one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = normed(), normed()
    fast = compiled(model)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for x, y in BATCHES[: 3 if same_data else 1]:
        mine = x if same_data else parity.part(x, rank, world)
        for m in (plain, fast):
            models.square_loss(m(mine), y[: len(mine)]).backward()
        for o in opts:
            o.step()
            o.zero_grad()
    assert len(list(plain.buffers())) == 3
    for n, b in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(n), b, rtol=1e-5, atol=1e-6)
    whole = [torch.empty_like(plain.norm.running_mean) for _ in range(world)]
    dist.all_gather(whole, model.norm.running_mean)
    assert torch.equal(whole[0], whole[1]) == same_data
    if same_data:
        for n, p in plain.named_parameters():
            torch.testing.assert_close(parity.full(model.get_parameter(n)), p.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("same_data", [True, False])
def test_batch_norm(pool, same_data):
    pool.run(2, batch_norm, same_data)


def sync_batch_norm() -> str:
    with pytest.raises(ValueError) as e:
        compiled(fully_shard(normed(nn.SyncBatchNorm)))(BATCHES[0][0])
    return str(e.value)


def test_sync_batch_norm_says_that_it_needs_a_gpu(pool):
    assert "SyncBatchNorm expected input tensor to be on" in pool.run(2, sync_batch_norm)[0]


# --- Ties -------------------------------------------------------------------------------------------------------------


def tied_twice() -> nn.Module:
    """A weight under two names of one module, and a module under two names."""
    torch.manual_seed(8)
    w, block = rand(7, 10), nn.Linear(7, 7)
    run = lambda m, x: m.out(torch.tanh(m.b(torch.tanh(m.a(torch.tanh(x @ m.first.t()) + torch.sin(x @ m.second.t()))))))  # noqa: E731
    return Kind(run, first=w, second=w, a=block, b=block, out=nn.Linear(7, 3))


def ties(explicit: bool) -> None:
    """One shard, one entry in the optimizer, and a tie that saving and loading leaves alone."""
    plain, model = tied_twice(), tied_twice()
    if explicit:
        fully_shard(model)
    fast = compiled(model)
    parity.train_alike(plain, fast, BATCHES[:1], models.square_loss)
    assert [n for n, _ in model.named_parameters()] == ["first", "a.weight", "a.bias", "out.weight", "out.bias"]
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    models.square_loss(fast(BATCHES[0][0]), BATCHES[0][1]).backward()
    opt.step()
    opt.zero_grad()
    assert len(opt.state) == 5
    file = io.BytesIO()
    torch.save({k: parity.full(v) for k, v in model.state_dict().items()}, file)
    assert list(model.state_dict()) == list(plain.state_dict())
    file.seek(0)
    saved = torch.load(file)
    shard = lambda v, like: torch.distributed.tensor.distribute_tensor(v, like.device_mesh, like.placements)  # noqa: E731
    model.load_state_dict({k: shard(v * 0.5, model._parameters["first"]) for k, v in saved.items()})
    plain.load_state_dict({k: v * 0.5 for k, v in saved.items()})
    assert model._parameters["first"] is model._parameters["second"] and model.a is model.b
    parity.train_alike(plain, fast, BATCHES[1:], models.square_loss)
    assert model._parameters["first"] is model._parameters["second"]


@pytest.mark.parametrize("explicit", [False, True])
def test_ties(pool, explicit):
    pool.run(2, ties, explicit)


# --- Parameters that a step does not use ------------------------------------------------------------------------------


def unused(explicit: bool) -> None:
    def some(m: Any, x: Tensor) -> Tensor:
        return m.used(x) + (m.sometimes(x) if m.flag else 0)

    model = Kind(some, used=nn.Linear(10, 3), sometimes=nn.Linear(10, 3), never=nn.Linear(10, 3))
    model.flag = True
    if explicit:
        fully_shard(model)
    fast = compiled(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for flag in (True, False, True):
        model.flag = flag
        opt.zero_grad()
        before = parity.full(model.sometimes._parameters["weight"])
        models.square_loss(fast(BATCHES[0][0]), BATCHES[0][1]).backward()
        opt.step()
        none = {n for n, p in model.named_parameters() if p.grad is None}
        assert none == {f"{m}.{p}" for m in ("never", *(["sometimes"] if not flag else [])) for p in ("weight", "bias")}
        assert torch.equal(before, parity.full(model.sometimes._parameters["weight"])) != flag
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("explicit", [False, True])
def test_unused_parameters_have_no_gradient(pool, explicit):
    pool.run(2, unused, explicit)


# --- flex_attention: on CPU for inference only ------------------------------------------------------------------------


def flex() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(sequence(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        h = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + m.bias[h, i, j])
        return m.out(h.transpose(1, 2).flatten(2).mean(1))

    model = Kind(run, qkv=nn.Linear(8, 24), bias=rand(2, 5, 5), out=nn.Linear(8, 3))
    x = BATCHES[0][0]
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(compiled(fully_shard(model), fullgraph=True)(x), want)


def test_flex_attention(pool):
    pool.run(2, flex)
