"""Option embedding_rows: an embedding exchanges the rows that the batch names, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import models
import parity
import pytest
import test_bad_input
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_compile.passes.machine import Link, Machine, Rates
from fsdp_compile.runtime.sharding import local_rows
from pool import Pool, RankError
from torch import Tensor, nn

from fsdp_compile import explain, fully_shard, no_sync
from fsdp_compile.options import parse
from fsdp_compile.spec import ParamSpec

DECODER = parity.Case(models.decoder, models.token_batch, models.token_loss, steps=10)


class Tied(nn.Module):
    """The embedding is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(13, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.emb(ids) @ self.emb.weight.T


class Several(nn.Module):
    """One lookup in a table with padding, one in a table with fewer rows than ranks, two in another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(13, 6, padding_idx=-2)
        self.kinds = nn.Embedding(3, 6)
        self.twice = nn.Embedding(5, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids.int()) + self.kinds(ids % 2) + self.twice(ids % 5) * self.twice((ids + 1) % 5)
        return self.out(torch.tanh(x))


def sent(model: nn.Module, **options: Any) -> set[str]:
    """What the model's collectives name."""
    report = explain(model, torch.zeros(2, 3, dtype=torch.int64), world_size=2, embedding_rows=True, **options)
    return {p for b in report.buckets for p in b.parameters}


def test_the_table_is_neither_gathered_nor_reduced() -> None:
    report = explain(Several(), torch.zeros(2, 3, dtype=torch.int64), world_size=2, embedding_rows=True)
    assert {p for b in report.buckets for p in b.parameters} == {"out.weight", "out.bias", "twice.weight"}
    assert report.exchanged == {"words.weight", "kinds.weight"}
    assert "rows           of kinds.weight, words.weight: exchanged as the batch names them, not counted above" in str(report)
    ops = report.stage("joint", "rows").ops
    assert (ops["fsdp_compile.embed_rows"], ops["fsdp_compile.unshard"]) == (2, 3)
    assert "words.weight" in report.graph("backward", "schedule")


def test_a_tied_table_is() -> None:
    assert sent(Tied()) == {"emb.weight"}


def test_a_gradient_scaled_by_frequency_is_left_alone() -> None:
    assert sent(nn.Sequential(nn.Embedding(13, 6, scale_grad_by_freq=True), nn.Linear(6, 5))) == {"0.weight", "1.weight", "1.bias"}


@pytest.mark.parametrize("wrong", ["yes", -1, 0.5])
def test_what_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"option embedding_rows must be True, False or a number of bytes, got {wrong!r}"):
        parse({"embedding_rows": wrong})


@pytest.mark.parametrize(("least", "gathered"), [(0, {"0.weight"}), (14 * 6 * 4, set()), (14 * 6 * 4 + 1, {"0.weight"}), (True, set())])
def test_tables_from_a_size_on(least: int, gathered: set[str]) -> None:
    """13 rows of 6, on two ranks 14."""
    model = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 5))
    report = explain(model, torch.zeros(2, 3, dtype=torch.int64), world_size=2, embedding_rows=least)
    assert {p for b in report.buckets for p in b.parameters} == gathered | {"1.weight", "1.bias"}


def test_not_what_the_plan_names() -> None:
    model, ids = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 5)), torch.zeros(2, 3, dtype=torch.int64)
    plan = explain(model, ids, world_size=2).plan
    report = explain(model, ids, world_size=2, embedding_rows=True, plan=plan)
    assert {p for b in report.buckets for p in b.parameters} == {"0.weight", "1.weight", "1.bias"}


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kinds, self.out = nn.Embedding(13, 6), nn.Embedding(3, 6), nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids) + self.kinds(ids % 2))


def test_the_exchange_is_simulated() -> None:
    """On two ranks half of what a batch names travels: 6 rows of 24 bytes in 72 seconds, 3 rows of a table that has no more in 36. The
    first waits behind the layer's gather or reduction, 84 seconds."""
    machine = Machine("toy", Rates({"float32": 1e30}, 1e30), {"any": Link(0.0, 1.0)})
    report = explain(One(), torch.zeros(2, 3, dtype=torch.int64), world_size=2, embedding_rows=True)
    rows = [(e.direction, e.bucket, round(e.seconds)) for e in report.simulate(machine, "none").exposed if e.why == "rows"]
    words, kinds = "rows of words.weight", "rows of kinds.weight"
    assert rows[:2] == [("forward", words, 84 + 72), ("forward", kinds, 36)]
    assert rows[2:] == [("backward", kinds, 84 + 36), ("backward", words, 72)]


class Sometimes(nn.Module):
    """Some ranks look a table up once, others twice."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)

    def forward(self, ids: Tensor, twice: bool) -> Tensor:
        return self.emb(ids) + self.emb(ids) if twice else self.emb(ids)


def once_and_twice(on: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = fully_shard(Sometimes())
    before = parity.full(model.emb.weight).clone()
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx", "embedding_rows": on, "timeout_s": 30.0})
    fast(torch.tensor([1, 6]), rank == 1).sum().backward()
    assert model.emb.weight.grad is not None
    want = torch.zeros_like(before)
    want[[1, 6]] = 1.5  # the mean of one and two
    torch.testing.assert_close(parity.full(model.emb.weight.grad), want)


def test_ranks_that_look_up_differently_often(pool: Pool) -> None:
    """Right where the table is gathered; refused, and never wrong, where some ranks exchange rows."""
    pool.run(2, once_and_twice, False)
    with pytest.raises(RankError, match=r"RankMismatch(.|\n)*exchange of rows \(option embedding_rows\) of float32\[8, 4\]"):
        pool.run(2, once_and_twice, True)


def written_on() -> None:
    """A model returns what it has looked up, and the caller writes on it."""
    rank = dist.get_rank()
    full, spec = table()
    shard = local_rows(full, spec, rank).clone().requires_grad_()
    torch.ops.fsdp_compile.embed_rows(shard, torch.tensor([[1, 6]]), spec.encode(), -1).mul_(2.0).sum().backward()
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Embedding(13, 6)))
    out = torch.compile(model, backend="fsdp", options={"lowering": "fx", "embedding_rows": True})(torch.tensor([[1, 6]]))
    out.mul_(3.0)
    out.sum().backward()
    grad = parity.full(model[0].weight.grad)  # type: ignore[arg-type]
    assert torch.equal(grad[[1, 6]], torch.full((2, 6), 3.0))


def test_what_was_looked_up_may_be_written_on(pool: Pool) -> None:
    pool.run(2, written_on)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_trains_like_one_process(pool: Pool, world: int) -> None:
    parity.check(pool, DECODER, world, options={"embedding_rows": True})


def test_trains_like_one_process_compiled(pool: Pool) -> None:
    parity.check(pool, DECODER, 2, lowering="inductor", options={"embedding_rows": True})


def ids_batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 13, (12, 4), generator=g), torch.randn(12, 4, 5, generator=g)


@pytest.mark.parametrize(("world", "entry"), [(3, "fully_shard"), (4, "oneliner")])
def test_several_tables(pool: Pool, world: int, entry: str) -> None:
    case = parity.Case(Several, ids_batch, models.square_loss, steps=5, optimizer="sgd", lr=0.1)
    parity.check(pool, case, world, entry=entry, options={"embedding_rows": True})


def table(reduce_op: str = "sum", **kwargs: Any) -> tuple[Tensor, ParamSpec]:
    """A table of 13 rows, and how it is cut over the ranks that there are."""
    world = dist.get_world_size()
    spec = ParamSpec("emb", (13, 6), torch.float32, torch.float32, torch.float32, dist.group.WORLD.group_name, world, reduce_op)  # type: ignore[union-attr]
    return torch.randn(13, 6, generator=torch.Generator().manual_seed(1)), replace(spec, **kwargs)


def lookups(padding: int) -> None:
    """Every rank names other rows, and other numbers of them; rank 0 none at all. Values equal bit for bit, gradients the ranks' sum."""
    rank, world = dist.get_rank(), dist.get_world_size()
    full, spec = table()
    batches = [torch.randint(0, 13, (r, 2 * r + 1), generator=torch.Generator().manual_seed(r)) for r in range(world)]
    shard = local_rows(full, spec, rank).clone().requires_grad_()
    got = torch.ops.fsdp_compile.embed_rows(shard, batches[rank], spec.encode(), padding)
    assert torch.equal(got, F.embedding(batches[rank], full))
    weights = [torch.randn(*b.shape, 6, generator=torch.Generator().manual_seed(10 + r)) for r, b in enumerate(batches)]
    (got * weights[rank]).sum().backward()
    plain = full.clone().requires_grad_()
    for b, w in zip(batches, weights):
        (F.embedding(b, plain, padding_idx=padding if padding >= 0 else None) * w).sum().backward()
    assert plain.grad is not None and shard.grad is not None
    torch.testing.assert_close(shard.grad, local_rows(plain.grad, spec, rank), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_may_name_different_numbers_of_rows(pool: Pool, world: int, padding: int) -> None:
    pool.run(world, lookups, padding)


def halves() -> tuple[torch.dtype, torch.dtype, Tensor]:
    full, spec = table("avg", compute_dtype=torch.bfloat16)
    shard = local_rows(full, spec, dist.get_rank()).clone().requires_grad_()
    got = torch.ops.fsdp_compile.embed_rows(shard, torch.tensor([3, 3, 12]), spec.encode(), -1)
    assert torch.equal(got, F.embedding(torch.tensor([3, 3, 12]), full.bfloat16()))
    got.backward(torch.full_like(got, 2**-10))
    assert shard.grad is not None
    return got.dtype, shard.grad.dtype, shard.grad


def test_rows_travel_in_the_compute_dtype(pool: Pool) -> None:
    """bfloat16 rows; gradients are summed and averaged in the reduce dtype, float32."""
    zero, one = pool.run(2, halves)
    assert zero[:2] == one[:2] == (torch.bfloat16, torch.float32)
    want = torch.zeros(14, 6)
    want[3], want[12] = 2**-9, 2**-10  # named twice by both ranks, and once
    assert torch.equal(torch.cat((zero[2], one[2])).view(14, 6), want)


def out_of_range(index: int) -> None:
    full, spec = table()
    torch.ops.fsdp_compile.embed_rows(local_rows(full, spec, dist.get_rank()), torch.tensor([0, index]), spec.encode(), -1)


@pytest.mark.parametrize("index", [-1, 13])
def test_an_index_out_of_range_is_named(pool: Pool, index: int) -> None:
    with pytest.raises(RankError, match=rf"embedding 'emb': index {index} is out of range: it has 13 rows"):
        pool.run(2, out_of_range, index)


def in_micro_steps(on: bool) -> list[Tensor]:
    """Two micro-steps, one of them within no_sync, three times; ranks have batches of different sizes."""
    rank = dist.get_rank()
    model = fully_shard(Several())
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx", "embedding_rows": on})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = ids_batch(step)
        with no_sync(model):
            models.square_loss(fast(x[: 2 + rank]), y[: 2 + rank]).backward()
        models.square_loss(fast(x[6 : 8 + rank]), y[6 : 8 + rank]).backward()
        opt.step()
        opt.zero_grad()
    return [parity.full(p) for p in model.parameters()]


def test_with_micro_steps_and_batches_of_different_sizes(pool: Pool) -> None:
    for got, want in zip(pool.run(3, in_micro_steps, True)[0], pool.run(3, in_micro_steps, False)[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def some_differ() -> None:
    model = Several()
    on = dist.get_rank() == 0
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx", "embedding_rows": on, "timeout_s": 30.0})
    fast(torch.zeros(2, 3, dtype=torch.int64))


def test_ranks_must_agree(pool: Pool) -> None:
    with pytest.raises(RankError, match="RankMismatch"):
        pool.run(2, some_differ)


def peer_dies_inside(lowering: str) -> str:
    """Rank 1 agrees on the forward graph, and dies before its exchange."""
    model = torch.compile(fully_shard(Several()), backend="fsdp", options={"lowering": lowering, "embedding_rows": True})
    ids = ids_batch(0)[0]
    model(ids)
    dist.barrier()
    if dist.get_rank() == 1:
        test_bad_input.guarded.Guarded._compare = test_bad_input.compare_and_die
    raise AssertionError(test_bad_input.message(model, ids))


@pytest.mark.parametrize("lowering", ["fx", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.extra])])
def test_a_peer_that_dies_is_told_by_the_table(lowering: str) -> None:
    text = test_bad_input.fails(peer_dies_inside, lowering)
    assert "forward graph 0: the exchange of rows of words.weight, kinds.weight failed (a peer has died or hangs)" in text, text
