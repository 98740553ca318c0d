"""Each mistake gets an error that says what to do, on every rank, within bounded time."""

from __future__ import annotations

import os
import time

import models
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_compile import fully_shard, guarded

FX = {"lowering": "fx"}
X, Y = models.vector_batch(0)


def message(fn, *args, **kwargs) -> str:
    """Type and text of the error that ``fn`` raises, the innermost user-relevant one."""
    try:
        fn(*args, **kwargs)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    raise AssertionError("no error was raised")


def call(model: nn.Module, x: Tensor = X, **options) -> Tensor:
    return torch.compile(model, backend="fsdp", options={**FX, **options})(x)


def errors_one_rank() -> dict[str, str]:
    """Everything that one rank alone can get wrong."""
    out = {}
    out["option"] = message(call, models.mlp(), bucket_byts=1)
    out["bytes"] = message(call, models.mlp(), bucket_bytes="25MB")
    out["prefetch"] = message(call, models.mlp(), prefetch=1.5)
    out["timeout"] = message(call, models.mlp(), timeout_s="10")
    out["mesh"] = message(call, models.mlp(), mesh="cpu")
    out["mesh, fully_shard"] = message(lambda: fully_shard(models.mlp(), mesh="cpu"))
    out["iterator"] = message(call, models.mlp(), ignored_params=iter([]))
    out["not iterable"] = message(call, models.mlp(), ignored_params=3)
    out["sync"] = message(call, models.mlp(), sync_module_states="yes")
    out["fewer ranks"] = message(call, models.mlp(), reshard_after_forward=2)
    out["negative timeout"] = message(lambda: fully_shard(models.mlp(), timeout_s=-1))
    out["reduces"] = message(call, models.mlp(), limit_reduce_scatters=0)
    out["no patterns"] = message(call, models.mlp(), bucket_modules=3)
    out["inductor"] = message(call, models.mlp(), inductor={"max_autotun": True})
    out["inductor, no dict"] = message(call, models.mlp(), inductor=["max_autotune"])
    out["modules"] = message(call, models.mlp(), bucket_modules=("Linear", "Block"))
    out["policy"] = message(lambda: fully_shard(models.mlp(), mp_policy="bfloat16"))
    out["ignored"] = message(lambda: fully_shard(models.mlp(), ignored_params=["a.weight"]))
    out["folder"] = message(call, models.mlp(), dump_graphs=3)
    out["lowering"] = message(call, models.mlp(), lowering="xla")
    out["reduce_op"] = message(call, models.mlp(), reduce_op="max")
    out["mode"] = message(lambda: torch.compile(models.mlp(), backend="fsdp", mode="max-autotune")(X))
    out["no parameters"] = message(fully_shard, nn.GELU())
    out["no parameters, oneliner"] = message(call, Empty())
    out["sparse"] = message(fully_shard, nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)))
    out["sparse, oneliner"] = message(call, SparseNet(), torch.tensor([1, 2]))
    ints = models.mlp()
    ints.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    out["int"] = message(fully_shard, ints)
    sub = models.mlp()
    sub.b.weight = nn.Parameter(Sub(torch.randn(14, 14)))
    out["subclass"] = message(fully_shard, sub)
    quantised = models.mlp()
    codes = torch.quantize_per_tensor(torch.randn(14, 14), 0.1, 0, torch.qint8)
    quantised.b.weight = nn.Parameter(codes, requires_grad=False)
    out["quantised"] = message(fully_shard, quantised)
    out["mesh too large"] = message(lambda: fully_shard(models.mlp(), mesh=init_device_mesh("cpu", (4,))))
    out["twice"] = message(fully_shard, fully_shard(models.mlp()))
    part = models.mlp()
    fully_shard(part.b)
    out["inner first"] = message(fully_shard, part)
    out["fsdp2 first"] = message(fully_shard, fsdp2(models.mlp()))
    out["lazy"] = message(fully_shard, nn.Sequential(nn.LazyLinear(3)))
    out["limit"] = message(lambda: call(models.mlp(), limit_all_gathers=8).sum().backward())
    model = fully_shard(models.mlp())
    for what, run in (("compiled", torch.compile(model, backend="fsdp", options=FX)), ("eager", model)):
        loss = models.square_loss(run(X), Y)
        leaf = model.a.weight._fsdp_shard
        out[f"double backward, {what}"] = message(lambda: torch.autograd.grad(loss, leaf, create_graph=True)[0].sum().backward())  # noqa: B023
    return out


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Sub(Tensor):
    pass


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(5, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.e(x)


EXPECTED = {
    "option": ("unknown option 'bucket_byts'", "Did you mean 'bucket_bytes'?", "Valid options: mesh,"),
    "bytes": ("option bucket_bytes must be a whole number, got '25MB' (write 26214400)",),
    "prefetch": ("option prefetch must be a whole number, got 1.5",),
    "timeout": ("option timeout_s must be a number of seconds, got '10'",),
    "mesh": ("option mesh must be a DeviceMesh", "init_device_mesh"),
    "mesh, fully_shard": ("mesh must be a DeviceMesh", "init_device_mesh"),
    "iterator": ("option ignored_params must be a list",),
    "not iterable": ("option ignored_params must be a list of parameters, got 3",),
    "sync": ("option sync_module_states must be True or False, got 'yes'",),
    "fewer ranks": ("option reshard_after_forward=2", "only True (or None) and False"),
    "negative timeout": ("ValueError: timeout_s must be positive, got -1",),
    "reduces": ("limit_reduce_scatters must be positive, got 0",),
    "no patterns": ("option bucket_modules must be class names or patterns of module names, got 3",),
    "inductor": ("option inductor", "no 'max_autotun'; did you mean 'max_autotune'?"),
    "inductor, no dict": ("option inductor must be a dict", "['max_autotune']"),
    "modules": ("bucket_modules: 'Block' is neither", "Linear"),
    "policy": ("TypeError", "a dtype such as torch.bfloat16"),
    "ignored": ("TypeError", "the parameters themselves", "'a.weight'"),
    "folder": ("option dump_graphs must be a folder's name",),
    "lowering": ("lowering must be 'inductor' or 'fx', got 'xla'",),
    "reduce_op": ("reduce_op must be 'avg' or 'sum', got 'max'",),
    "mode": ("mode='max-autotune'", "options"),
    "no parameters": ("ValueError", "GELU has no parameters"),
    "no parameters, oneliner": ("no parameters",),
    "sparse": ("TypeError", "'1.weight'", "sparse=False"),
    "sparse, oneliner": ("'e.weight'", "sparse=False"),
    "int": ("TypeError", "'codes'", "torch.int8", "ignored_params"),
    "subclass": ("TypeError", "'b.weight'", "Sub"),
    "quantised": ("TypeError", "'b.weight'", "torch.qint8", "ignored_params"),
    "mesh too large": ("Mesh should not be bigger than default world size",),
    "twice": ("ValueError", "sharded already"),
    "inner first": ("ValueError", "'b'", "sharded already"),
    "fsdp2 first": ("TypeError", "'a.weight'", "DTensor already"),
    "lazy": ("TypeError", "'0.weight'", "lazy"),
    "limit": ("limit_all_gathers=8", "raise"),
    "double backward, compiled": ("does not currently support double backward",),
    "double backward, eager": ("double backward", "'a.weight'"),
}


@pytest.fixture(scope="module")
def errors(request):
    return request.getfixturevalue("_session_pool").run(2, errors_one_rank)


@pytest.mark.parametrize("what", EXPECTED)
def test_message(errors, what):
    for rank in errors:
        for text in EXPECTED[what]:
            assert text in rank[what]


def mesh_2d() -> str:
    return message(fully_shard, models.mlp(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def mesh_without_me() -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    text = message(fully_shard, models.mlp(), mesh=mesh) if dist.get_rank() > 1 else ""
    dist.barrier()  # a rank that leaves takes its connections along, which the others may still be making
    return text


def test_two_dimensional_mesh(pool):
    for text in pool.run(4, mesh_2d):
        assert "ValueError" in text and "mesh has 2 dimensions" in text and "mesh['dp']" in text


def test_rank_outside_the_mesh(pool):
    for text in pool.run(4, mesh_without_me)[2:]:
        assert "ValueError" in text and "not in the mesh" in text


def world_changed() -> tuple[str, str, str]:
    """One rank trains, then the process group is replaced by others under the compiled model."""
    fast = torch.compile(fully_shard(models.mlp()), backend="fsdp", options=FX)
    models.square_loss(fast(X), Y).backward()
    dist.destroy_process_group()
    gone = message(lambda: fast(X))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    smaller = message(lambda: fast(X))
    torch._dynamo.reset()
    anew = message(lambda: fast(X))
    return gone, smaller, anew


def test_changed_world_size(pool):
    for gone, smaller, anew in pool.run(2, world_changed):
        for text in (gone, smaller, anew):
            assert "was sharded over 2 ranks, in process group" in text and "no longer exists" in text


def different_models() -> tuple[str, float]:
    model = models.mlp(hidden=14 + dist.get_rank())
    start = time.monotonic()
    return message(fully_shard, model), time.monotonic() - start


def test_ranks_with_different_models(pool):
    for text, took in pool.run(3, different_models):
        assert text.startswith("RankMismatch") and "rank 1 differs from rank 0" in text and took < 10
        assert "float32[14, 10]" in text and "float32[15, 10]" in text and "a.weight" in text


class Branches(nn.Module):
    def __init__(self, second: int = 5) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(10, 4), nn.Linear(10, second)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.one if which == 0 else self.two)(x)


def different_graphs() -> tuple[str, float]:
    fast = torch.compile(fully_shard(Branches()), backend="fsdp", options=FX)
    start = time.monotonic()
    return message(fast, X, dist.get_rank()), time.monotonic() - start


def test_ranks_with_different_graphs(pool):
    for text, took in pool.run(2, different_graphs):
        assert "RankMismatch" in text and "rank 0:" in text and "rank 1:" in text and took < 30
        assert "one.weight" in text and "two.weight" in text


def one_eager() -> str:
    """A rank whose code Dynamo no longer compiles."""
    model = fully_shard(Branches())
    fast = torch.compile(model, backend="fsdp", options=FX)
    fast(X, 0)
    return message(fast if dist.get_rank() == 0 else model, X, 0)


def test_a_rank_that_runs_eagerly_what_another_has_compiled(pool):
    for text in pool.run(2, one_eager):
        assert "rank 0: forward" in text and "rank 1: eager" in text and "config.recompile_limit" in text


def turn_apart(width: int, disabled: bool) -> tuple[str, float]:
    """All ranks know both branches; then each takes another one. With ``width`` 4 both branches' collectives have equal sizes."""
    model = fully_shard(Branches(width))
    fast = torch.compile(model, backend="fsdp", options=FX)
    if disabled:
        fast = torch._dynamo.disable(model)
    for which in (0, 1, 0):
        fast(X, which)
    start = time.monotonic()
    return message(fast, X, dist.get_rank()), time.monotonic() - start


@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize("disabled", [False, True])
def test_ranks_that_take_different_known_branches(pool, width, disabled):
    for text, took in pool.run(2, turn_apart, width, disabled):
        assert "RankMismatch" in text and "one.weight" in text and "two.weight" in text and took < 10, text


def one_stays_away(compiled: bool) -> tuple[str, float]:
    model = Branches()
    if compiled:
        fully_shard(model)
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(5 if compiled else 0)
        return "", 0.0
    if compiled:
        text = message(torch.compile(model, backend="fsdp", options={**FX, "timeout_s": 2.0}), X, 0)
    else:
        text = message(fully_shard, model, timeout_s=2.0)
    return text, time.monotonic() - start


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rank_that_never_comes(pool, compiled):
    text, took = pool.run(2, one_stays_away, compiled)[0]
    assert "RankMismatch" in text and "within 2 s" in text and 2 <= took < 30
    assert ("before all_gather float32 176 bytes" if compiled else "rank 1 of group") in text, text


def warmed_up(**options) -> nn.Module:
    model = torch.compile(fully_shard(models.mlp()), backend="fsdp", options={"bucket_bytes": 0, **options})
    for _ in range(2):
        models.square_loss(model(X), Y).backward()
    dist.barrier()
    return model


def peer_dies() -> str:
    fast = warmed_up(**FX)
    if dist.get_rank() == 1:
        os._exit(7)
    start = time.monotonic()
    text = message(lambda: [models.square_loss(fast(X), Y).backward() for _ in range(3)])
    assert time.monotonic() - start < 15
    raise AssertionError(text)


def peer_dies_inside(lowering: str) -> str:
    """Rank 1 agrees on the forward graph, and dies before its collectives."""
    fast = warmed_up(lowering=lowering)
    if dist.get_rank() == 1:
        guarded.Guarded._compare = compare_and_die
    start = time.monotonic()
    text = message(fast, X)
    assert time.monotonic() - start < 15
    raise AssertionError(text)


def compare_and_die(self: guarded.Guarded, name: str, *offers, compare=guarded.Guarded._compare) -> None:
    compare(self, name, *offers)
    os._exit(7)


def peer_hangs() -> str:
    fast = torch.compile(fully_shard(models.mlp()), backend="fsdp", options=FX)
    models.square_loss(fast(X), Y).backward()
    dist.distributed_c10d._get_default_store().set(f"there{dist.get_rank()}", "")
    if dist.get_rank() == 1:
        time.sleep(8)
        return ""
    start = time.monotonic()
    text = message(lambda: models.square_loss(fast(X), Y).backward())
    assert time.monotonic() - start < 7
    return text


def fails(fn, *args) -> str:
    """What rank 0 said in a pool of its own."""
    own = Pool()
    try:
        with pytest.raises(AssertionError) as e:
            own.run(2, fn, *args, pg_timeout_s=5)
    finally:
        own.close()
    assert "died with exit code 7" in str(e.value)
    return str(e.value)


def test_dead_peer():
    assert "forward graph 0: a peer has died or closed its connection, before all_gather" in fails(peer_dies)


@pytest.mark.parametrize("lowering", ["fx", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_peer_dies_inside_a_graph(lowering):
    text = fails(peer_dies_inside, lowering)
    assert "forward graph 0: all_gather of bucket ag" in text and "failed (a peer has died or hangs)" in text, text


def test_hanging_peer():
    own = Pool()
    try:
        text = own.run(2, peer_hangs, pg_timeout_s=3)[0]
    finally:
        own.close()
    assert "RankMismatch" in text and "graph 0: not every rank" in text and "before all_gather" in text
