"""no_sync(keep_bytes=…): weights gathered once for several micro-steps."""

from __future__ import annotations

import copy

import models
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_compile.passes.arrive import arrive, holds
from fsdp_compile.passes.graph_ops import output_of
from fsdp_compile.passes.roles import Held, role_of
from test_accumulation import MICRO, Net, beside_one_process, windows
from torch import Tensor, fx, nn

import fsdp_compile

ALL = 1 << 30


def count(fn, *names: str) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        fn()
    return sum(e.count for e in p.key_averages() if e.key.startswith(names))


GATHERS = ("_c10d_functional::all_gather", "fsdp_compile::all_gather")


def held(keep_bytes: int, want: str, lowering: str, tight: dict) -> None:
    """Two optimizer steps of MICRO micro-steps in the context and one after it, next to one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model, run, theirs, ours = beside_one_process(lowering, tight)
    for step in range(2):
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
        if step == 1:  # nothing is compiled any more
            right = {"none": set(counts) == {0}, "fewer": 0 < min(counts) == max(counts) < after, "all": set(counts) == {after}}
            assert after > 0 and right[want], (counts, after)
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            if q.requires_grad:
                torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        theirs.step(), ours.step(), theirs.zero_grad(), ours.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parity.full(p), q.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world", "keep_bytes", "want"), [(2, ALL, "none"), (2, 0, "all"), (3, 500, "fewer")])
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


def forward_within(keep_bytes: int, late: int) -> None:
    """Backwards that run after the context, of forwards within it, reduce: with what was collected before, each once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = Net(), Net()
    run = torch.compile(fsdp_compile.fully_shard(model), backend="fsdp", options={"lowering": "fx"})

    def loss(fn, i: int, cut: bool) -> Tensor:
        x, y = (parity.part(t, rank, world) if cut else t for t in models.vector_batch(i, out=10))
        return models.square_loss(fn(x), y)

    for _ in range(2):
        loss(plain, 0, False).backward()
        with fsdp_compile.no_sync(run, keep_bytes=keep_bytes):
            loss(run, 0, True).backward()
            losses = [loss(run, 1 + i, True) for i in range(late)]
        for i, one in enumerate(losses):
            one.backward()
            loss(plain, 1 + i, False).backward()
            for p, q in zip(model.parameters(), plain.parameters()):
                if q.requires_grad:
                    torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6)
        loss(run, 9, True).backward(), loss(plain, 9, False).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            if q.requires_grad:
                torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6)
        model.zero_grad(), plain.zero_grad()


@pytest.mark.parametrize(("world", "late", "keep_bytes"), [(2, 2, 0), (2, 2, 200), (2, 2, ALL), (3, 1, 0)])
def test_backward_after_the_context(pool, world, late, keep_bytes):
    pool.run(world, forward_within, keep_bytes, late)


def frozen_for_one(keep_bytes: int, through: str) -> None:
    """A micro-step with a weight frozen adds nothing to its gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = models.mlp(), models.mlp()
    run = torch.compile(fsdp_compile.fully_shard(model), backend="fsdp", options={"lowering": "fx"})

    def step(i: int) -> None:
        x, y = models.vector_batch(i)
        models.square_loss(plain(x), y).backward()
        models.square_loss(run(parity.part(x, rank, world)), parity.part(y, rank, world)).backward()

    def freeze(yes: bool) -> None:
        for m in (plain, model):
            (m.a if through == "module" else m.a.weight).requires_grad_(not yes)

    for _ in range(2):
        with fsdp_compile.no_sync(run, keep_bytes=keep_bytes):
            step(0)
            freeze(True)
            step(1)
            step(2)
            freeze(False)
            step(3)
        step(4)
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6)
        model.zero_grad(), plain.zero_grad()


@pytest.mark.parametrize(("keep_bytes", "through"), [(0, "parameter"), (ALL, "parameter"), (ALL, "module")])
def test_frozen_for_a_micro_step(pool, keep_bytes, through):
    pool.run(2, frozen_for_one, keep_bytes, through)


def copied(keep_bytes: int) -> None:
    """A copy made within the context is a model of its own: it holds and collects nothing, and lets the original go on."""
    model = fsdp_compile.fully_shard(models.mlp())
    x, y = models.vector_batch(0)
    with fsdp_compile.no_sync(model, keep_bytes=keep_bytes):
        early = copy.deepcopy(model)
        models.square_loss(model(x), y).backward()
        late = copy.deepcopy(model)
        for other in (early, late):
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()
                assert not other(x).any()
    for other in (early, late):
        models.square_loss(other(x), y).backward()
        assert all(p.grad is not None for p in other.parameters())
        other.zero_grad()
        with fsdp_compile.no_sync(other):
            models.square_loss(other(x), y).backward()
    models.square_loss(model(x), y).backward()
    plain = models.mlp()
    (2 * models.square_loss(plain(x), y)).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parity.full(p.grad), q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep_bytes", [0, ALL])
def test_a_copy_made_within(pool, keep_bytes):
    pool.run(2, copied, keep_bytes)


def converted() -> None:
    model = fsdp_compile.fully_shard(models.mlp())
    with pytest.raises(RuntimeError, match=r"'weight' of .*Linear was converted to torch.float64 on cpu inside no_sync"):
        with fsdp_compile.no_sync(model, keep_bytes=ALL):
            model.to("cpu")
            model.double()


def test_converting_within_is_an_error(pool):
    pool.run(2, converted)


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
