"""no_sync(keep_bytes=…): weights gathered once for several micro-steps."""

from __future__ import annotations

import models
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_compile.passes.arrive import arrive, holds
from fsdp_compile.passes.graph_ops import output_of
from fsdp_compile.passes.roles import Held, role_of
from test_accumulation import MICRO, Net, windows
from test_autoplan import GatheredBytes, calibrated
from torch import Tensor, fx, nn

import fsdp_compile

ALL = 1 << 30


def count(fn, *names: str) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        fn()
    return sum(e.count for e in p.key_averages() if e.key.startswith(names))


GATHERS = ("_c10d_functional::all_gather", "fsdp_compile::all_gather")


def held(keep_bytes: int, want: str, lowering: str, tight: dict) -> None:
    """Three optimizer steps of MICRO micro-steps in the context and one after it, next to one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = Net(), Net()
    fsdp_compile.fully_shard(model)
    run = torch.compile(model, backend="fsdp", options={"lowering": lowering, **tight})
    options = {"lr": 1e-3, "eps": 1e-6}
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **options)
    ours = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **options)
    for step in range(3):
        batches = [*windows(step), *windows(step + 10)[:1]]
        for x, y in batches:
            models.square_loss(plain(x), y).backward()
        parts = [(parity.part(x, rank, world), parity.part(y, rank, world)) for x, y in batches]
        counts = []
        with fsdp_compile.no_sync(run, keep_bytes=keep_bytes):
            for x, y in parts[:MICRO]:
                counts.append(count(lambda x=x, y=y: models.square_loss(run(x), y).backward(), *GATHERS))
        x, y = parts[MICRO]
        after = count(lambda: models.square_loss(run(x), y).backward(), *GATHERS)  # noqa: B023
        if step == 2:  # nothing is compiled any more
            right = {"none": set(counts) == {0}, "fewer": 0 < min(counts) == max(counts) < after, "all": set(counts) == {after}}
            assert after > 0 and right[want], (counts, after)
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            if q.requires_grad:
                torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        theirs.step(), ours.step(), theirs.zero_grad(), ours.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parity.full(p), q.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("keep_bytes", "want"), [(ALL, "none"), (500, "fewer"), (0, "all")])
def test_micro_steps_without_gathers(pool, world, keep_bytes, want):
    pool.run(world, held, keep_bytes, want, "fx", {"bucket_bytes": 1})


@pytest.mark.slow
@pytest.mark.inductor
def test_on_inductor(pool):
    """Inductor may write on what forward saves for backward: a held weight must survive all micro-steps."""
    pool.run(2, held, ALL, "none", "inductor", {})


class Saved(nn.Module):
    """Weights that backward reads last, when it may reuse what it no longer needs: the shape of a gradient is that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = (nn.Parameter(0.2 * torch.randn(12, 12)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).sin() @ (self.b.t() * 2).exp() + (self.a * self.b).sum()


def bits_survive(lowering: str) -> None:
    model = fsdp_compile.fully_shard(Saved())
    run = torch.compile(model, backend="fsdp", options={"lowering": lowering})
    x = torch.randn(12, 12)
    with fsdp_compile.no_sync(run, keep_bytes=ALL):
        losses = []
        for _ in range(4):
            loss = run(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        wholes = [model._fsdp_accumulate[n][2].clone() for n in ("a", "b")]
        with torch.no_grad():
            assert run(x).square().mean().item() == pytest.approx(losses[0], rel=1e-6)  # without a backward graph, too
    assert len(set(losses)) == 1
    for p, w in zip(model.parameters(), wholes):
        assert torch.equal(parity.full(p), w)


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["fx", "inductor"])
def test_nothing_writes_on_a_held_weight(pool, lowering):
    pool.run(2, bits_survive, lowering)


def half() -> None:
    """In the compute dtype, with odd shapes; read in code that Dynamo leaves out, too."""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    grads = []
    for keep_bytes in (0, ALL):
        torch.manual_seed(0)
        model = fsdp_compile.fully_shard(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), Helper()), mp_policy=policy)
        run = torch.compile(model, backend="fsdp", options={"lowering": "fx"})
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
        with fsdp_compile.no_sync(run, keep_bytes=keep_bytes):
            for _ in range(2):
                run(x).float().square().mean().backward()
        run(x).float().square().mean().backward()
        grads.append([parity.full(p.grad) for p in model.parameters()])
    for a, b in zip(*grads):
        assert torch.equal(a, b)


class Helper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(x)

    @torch._dynamo.disable
    def outside(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_compute_dtype_and_eager_reads(pool):
    pool.run(3, half)


def nested() -> None:
    """The end of an inner context is not the end of the outer one, whichever way it began."""
    model = fsdp_compile.fully_shard(models.mlp())
    name, p = next(iter(model.named_parameters()))
    owner, _, leaf = name.rpartition(".")
    table = lambda: (model.get_submodule(owner)._fsdp_accumulate or {}).get(leaf)  # noqa: E731
    with fsdp_compile.no_sync(model, keep_bytes=ALL):
        whole = table()[2]
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(whole), parity.full(p))
        with fsdp_compile.no_sync(model, keep_bytes=ALL):
            assert table()[2] is whole  # not gathered again
        assert table()[2] is whole
    assert table() is None
    model.set_requires_gradient_sync(False)
    with fsdp_compile.no_sync(model, keep_bytes=ALL):
        assert table()[2] is not None
    assert table()[0] is not None and table()[1:] == (None, None)
    model.set_requires_gradient_sync(True)
    assert table() is None


def test_a_context_within_another(pool):
    pool.run(2, nested)


def written_meanwhile() -> None:
    model = fsdp_compile.fully_shard(models.mlp())
    first = next(iter(model.parameters()))
    name = next(iter(model.state_dict()))
    with pytest.raises(RuntimeError, match=f"parameter '{name}' was written inside no_sync"):
        with fsdp_compile.no_sync(model, keep_bytes=ALL), torch.no_grad():
            if dist.get_rank() == 1:  # told to all ranks
                first.to_local().add_(1.0)
    assert all(m._fsdp_accumulate is None for m in model.modules())
    with pytest.raises(ZeroDivisionError), fsdp_compile.no_sync(model, keep_bytes=ALL), torch.no_grad():
        first.add_(1.0)
        raise ZeroDivisionError
    with fsdp_compile.no_sync(model), torch.no_grad():  # nothing is held
        first.add_(1.0)


def test_a_write_meanwhile_is_an_error(pool):
    pool.run(2, written_meanwhile)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (True, TypeError), ("1GB", TypeError), (1e9, TypeError)])
def test_bad_keep_bytes(value, error):
    with pytest.raises(error, match="keep_bytes must"), fsdp_compile.no_sync(nn.Linear(2, 2), keep_bytes=value):
        pass


def only_one_enters() -> None:
    model = fsdp_compile.fully_shard(models.mlp())
    keep = ALL if dist.get_rank() == 0 else 100
    with pytest.raises(RuntimeError, match="differs from rank"), fsdp_compile.no_sync(model, keep_bytes=keep):
        pass


def test_ranks_that_hold_different_weights(pool):
    pool.run(2, only_one_enters)


def test_arrive_waits_before_the_first_use_and_returns_the_placeholder():
    g = fx.Graph()
    a, x, y = (g.placeholder(n) for n in "axy")
    for n in (a, x, y):
        n.meta["val"] = torch.empty(3, 3)
    x.meta[Held.KEY], y.meta[Held.KEY] = Held("l.weight"), Held("unused.weight")
    first = g.call_function(torch.ops.aten.sin.default, (a,))
    second = g.call_function(torch.ops.aten.mm.default, (first, x))
    g.output((second, x))
    assert holds(g) == [x, y] and arrive(g) == 1
    waits = [(n, r) for n in g.nodes if (r := role_of(n)) is not None]
    assert [(n.target, r.kind, r.params) for n, r in waits] == [(torch.ops._c10d_functional.wait_tensor.default, "arrive", ("l.weight",))]
    wait = waits[0][0]
    assert second.args == (first, wait) and output_of(g).args[0] == (second, x)
    assert [n.name for n in g.nodes][3:5] == [first.name, wait.name]


def within(folder: str, budget: int) -> tuple[int, int]:
    """(bytes held, most gathered bytes alive beside them) of micro-steps after a planned step."""
    model = fsdp_compile.fully_shard(models.decoder())
    run = torch.compile(model, backend="fsdp", options={"lowering": "fx", "memory_budget": budget})
    x, y = models.token_batch(0)
    peaks = []
    with calibrated(folder):
        with fsdp_compile.no_sync(run, keep_bytes=None):
            assert not any(held_of(model))  # nothing is planned yet
            models.token_loss(run(x), y).backward()
        with fsdp_compile.no_sync(run, keep_bytes=None):
            held = sum(held_of(model))
            for _ in range(3):
                with GatheredBytes() as seen:
                    models.token_loss(run(x), y).backward()
                peaks.append(seen.peak)
        assert not sum(held_of(model))
    return held, min(peaks)


def too_much(folder: str, budget: int) -> None:
    model = fsdp_compile.fully_shard(models.decoder())
    run = torch.compile(model, backend="fsdp", options={"lowering": "fx", "memory_budget": budget})
    said = r"memory_budget: .* bytes here, beside \d+ that no_sync\(keep_bytes=...\) holds; the least possible is \d+"
    with calibrated(folder), pytest.raises(Exception, match=said), fsdp_compile.no_sync(run, keep_bytes=budget - 8):
        run(models.token_batch(0)[0])


def held_of(model: nn.Module) -> list[int]:
    """Bytes of each buffer that is held, tied weights once."""
    tables = [m._fsdp_accumulate or {} for m in model.modules()]
    wholes = {r[2].data_ptr(): r[2].untyped_storage().nbytes() for t in tables for r in t.values() if r[2] is not None}
    return list(wholes.values())


def test_as_much_as_the_memory_budget_leaves(pool, tmp_path):
    total = sum(4 * p.numel() for p in models.decoder().parameters())
    for budget, want in ((int(0.9 * total), "some"), (4 * total, "all")):
        for held, beside in pool.run(2, within, str(tmp_path), budget):
            assert 0 < held and held + beside <= budget
            assert (beside == 0) == (want == "all"), (held, beside, total)


def test_holding_more_than_the_budget_leaves_is_an_error(pool, tmp_path):
    pool.run(2, too_much, str(tmp_path), sum(4 * p.numel() for p in models.decoder().parameters()) // 2)
