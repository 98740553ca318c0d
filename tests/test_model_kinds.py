"""Kinds of layers and parameters that real models hold, trained sharded and on one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from fsdp_compile import fully_shard

BATCHES = [models.vector_batch(i) for i in range(3)]


def compiled(model: nn.Module, **kwargs: Any) -> nn.Module:
    return torch.compile(model, backend="fsdp", options={"lowering": "fx"}, **kwargs)


class Kind(nn.Module):
    """Modules and parameters under the names given, and the forward that uses them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def rand(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.4)


def words(x: Tensor) -> Tensor:
    """Four tokens below 7 for each row of a vector batch; about a quarter of them 0."""
    return (x[:, :4].abs() * 4).long() % 7


def sequence(x: Tensor) -> Tensor:
    """Five vectors of 8 for each row of a vector batch."""
    return torch.stack([torch.sin(x[:, :8] + k) for k in range(5)], 1)


def containers() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = sum(torch.tanh(x @ w) for w in m.list) * m.dict["scale"]
        return h @ m.list[0][:3, :7].t() + sum(p.sum(0) for p in m.dict.values())

    named = {"scale": nn.Parameter(torch.tensor(0.7)), "a": rand(5, 3), "b": rand(2, 3)}
    return Kind(run, list=nn.ParameterList([rand(10, 7) for _ in range(3)]), dict=nn.ParameterDict(named))


def convolutions() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x.view(-1, 1, 2, 5).expand(-1, 2, -1, -1))
        return m.up(torch.tanh(m.norm(m.act(h)))).mean((2, 3))

    parts = {"first": nn.Conv2d(2, 6, (1, 3), groups=2), "act": nn.PReLU(6), "norm": nn.GroupNorm(3, 6), "up": nn.ConvTranspose2d(6, 3, 2)}
    return Kind(run, **parts).to(memory_format=torch.channels_last)


def tied_to_its_transpose() -> nn.Module:
    return Kind(lambda m, x: (torch.tanh(x @ m.w) @ m.w.t())[:, :3], w=rand(10, 7))


def used_several_times() -> nn.Module:
    block = nn.Linear(7, 7)
    return Kind(lambda m, x: m.out(torch.tanh(m.b(torch.tanh(m.a(torch.tanh(m.b(x[:, :7]))))))), a=block, b=block, out=nn.Linear(7, 3))


def one_parameter_under_two_names() -> nn.Module:
    w = rand(7, 10)
    return Kind(lambda m, x: m.out(torch.tanh(x @ m.first.t()) + torch.sin(x @ m.second.t())), first=w, second=w, out=nn.Linear(7, 3))


def read_in_odd_ways() -> nn.Module:
    """By its FQN, by getattr, its dtype alone, detached, and through ``parameters()`` of a part."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.to(m.unit.weight.dtype)
        h = torch.tanh(F.linear(x, m.get_parameter("unit.weight"), getattr(m.unit, "bias", None)))
        return m.out(h) + h[:, :3] * m.out.weight.detach().mean()

    return Kind(run, unit=nn.Linear(10, 7), out=nn.Linear(7, 3))


def old_weight_norm() -> nn.Module:
    return Kind(lambda m, x: m.b(torch.tanh(m.a(x))), a=torch.nn.utils.weight_norm(nn.Linear(10, 7)), b=nn.Linear(7, 3))


def parametrized(how: Callable[[nn.Module], nn.Module]) -> nn.Module:
    run = lambda m, x: m.out(torch.tanh(m.mid(torch.tanh(m.inp(x)))))  # noqa: E731
    return Kind(run, inp=nn.Linear(10, 7), mid=how(nn.Linear(7, 7)), out=nn.Linear(7, 3))


def attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = sequence(x)
        a, weights = m.plain(h, h, h, average_attn_weights=False)
        return m.out(m.block(a).mean(1)) + weights[:, 0, 0, :3]

    block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Kind(run, plain=nn.MultiheadAttention(8, 2, batch_first=True), block=block, out=nn.Linear(8, 3))


def cross_attention() -> nn.Module:
    """Keys and values of other widths: three projections where there was one; learned extra key and value."""
    attend = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True, batch_first=True)

    def run(m: Any, x: Tensor) -> Tensor:
        h = sequence(x)
        return m.out(m.attend(h, h[..., :6], h[..., :4], need_weights=False)[0].mean(1))

    return Kind(run, attend=attend, out=nn.Linear(8, 3))


def embeddings() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.tanh(m.words(words(x)).mean(1) + m.bag(words(x)[:, :3])))

    return Kind(run, words=nn.Embedding(7, 6, padding_idx=0), bag=nn.EmbeddingBag(7, 6, mode="mean", padding_idx=2), out=nn.Linear(6, 3))


def cells() -> nn.Module:
    run = lambda m, x: m.out(m.gru(x, m.lstm(x, m.lstm(x))[0]))  # noqa: E731
    return Kind(run, lstm=nn.LSTMCell(10, 7), gru=nn.GRUCell(10, 7), out=nn.Linear(7, 3))


class Recurrent(nn.Module):
    """Layers around `nn.LSTM` or `nn.GRU`, which Dynamo leaves out. Statements of their own in forward: a graph ends before the call."""

    def __init__(self, kind: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.rnn = kind(8, 5, num_layers=2, bidirectional=True, batch_first=True, **kwargs)
        self.out = nn.Linear(self.rnn(torch.zeros(1, 1, 8))[0].shape[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(sequence(x)))
        h = self.rnn(h)[0]
        return self.out(h.mean(1))


KINDS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f
    for f in (
        containers, convolutions, tied_to_its_transpose, used_several_times, one_parameter_under_two_names, read_in_odd_ways,
        old_weight_norm, attention, cross_attention, embeddings, cells,
    )
} | {
    "weight_norm": functools.partial(parametrized, parametrizations.weight_norm),
    "spectral_norm": functools.partial(parametrized, parametrizations.spectral_norm),
    "orthogonal_exp": functools.partial(parametrized, functools.partial(parametrizations.orthogonal, orthogonal_map="matrix_exp")),
    "orthogonal_householder": functools.partial(parametrized, functools.partial(parametrizations.orthogonal, orthogonal_map="householder")),
    "lstm": functools.partial(Recurrent, nn.LSTM, proj_size=3),
    "gru": functools.partial(Recurrent, nn.GRU),
}  # fmt: skip
NOT_TRACED = {"lstm", "gru"}


def build(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return KINDS[kind]().train()


def trains(kind: str, explicit: bool) -> None:
    plain, model = build(kind), build(kind)
    if explicit:
        fully_shard(model)
    fast = compiled(model)
    parity.train_alike(plain, fast, BATCHES, models.square_loss, lr=1.0 if kind in NOT_TRACED else 0.1)
    assert list(model.state_dict()) == list(plain.state_dict())
    for n, p in build(kind).named_parameters():
        assert isinstance(model.get_parameter(n), DTensor), f"{n} was not sharded"
        assert (plain.get_parameter(n) - p).abs().max() > 1e-4, f"{n} did not train: the comparison proves nothing about it"
    for n, b in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(n), b, rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")
    for m in (model, plain):
        m.eval()
    if kind in NOT_TRACED:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4, "reads are compiled one by one"
        assert not any(isinstance(w, Tensor) for w in model.rnn._flat_weights), "whole weights are kept from step to step"
        model, plain = copy.deepcopy(model), copy.deepcopy(plain)
        parity.train_alike(plain, model, BATCHES, models.square_loss)
        fast = model
    with torch.no_grad():  # layers with a fast path take it here
        torch.testing.assert_close(fast(BATCHES[0][0]), plain(BATCHES[0][0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_oneliner(pool, kind):
    pool.run(2, trains, kind, False)


@pytest.mark.parametrize("kind", KINDS)
def test_fully_shard(pool, kind):
    pool.run(3, trains, kind, True)
