"""Sharding in place: every kind of parameter, and what users do with them around training."""

from __future__ import annotations

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from fsdp_compile.runtime.sharding import state_of
from heard import heard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard

FX = {"lowering": "fx"}
BATCHES = [models.vector_batch(i) for i in range(3)]


def compiled(model: nn.Module, **kwargs) -> nn.Module:
    return torch.compile(model, backend="fsdp", options=FX, **kwargs)


class Odd(nn.Module):
    """Shapes that shards find hard: uneven, fewer rows than ranks, scalar, one element, empty, not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.uneven = nn.Parameter(torch.randn(7, 10) * 0.3)
        self.few = nn.Parameter(torch.randn(1, 7))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.transposed = nn.Parameter((torch.randn(7, 5) * 0.3).t())
        self.steps = nn.Parameter((torch.randn(6, 10) * 0.3)[::2])
        self.image = nn.Parameter((torch.randn(3, 2, 2, 3) * 0.3).to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.uneven.t() * self.scalar + self.few)
        h = h @ self.transposed.t() + self.empty.sum(0)
        return h[:, :3] * self.one + x @ self.steps.t() + torch.einsum("cabd,nd->nc", self.image, x[:, :3])


def odd_shapes() -> None:
    plain, model = Odd(), Odd()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fully_shard(model)
    for n, p in model.named_parameters():
        assert isinstance(p, DTensor) and p.shape == before[n].shape and p.is_leaf and p.requires_grad
        assert torch.equal(parity.full(p), before[n]), n
    parity.train_alike(plain, compiled(model), BATCHES, models.square_loss)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_odd_shapes(pool, world):
    pool.run(world, odd_shapes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.embed(x))))


def tied() -> None:
    plain, model = Tied(), Tied()
    keys = list(plain.state_dict())
    fast = compiled(model)
    data = [(torch.arange(24).view(12, 2) * k % 11, torch.arange(24).view(12, 2) % 11) for k in (1, 3, 4)]
    with torch.no_grad():
        fast(data[0][0])
    assert model._parameters == {} and model.head._parameters["weight"] is model.embed._parameters["weight"]
    assert len(list(model.parameters())) == 3
    assert list(model.state_dict()) == keys
    parity.train_alike(plain, fast, data, models.token_loss, lr=1.0)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]


def test_tied_parameters_stay_tied(pool):
    pool.run(2, tied)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Linear(10, 7)
        self.b = nn.Linear(7, 5).double()
        self.z = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64) * 0.3)
        self.c = nn.Linear(5, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x)).double())).float()
        h = (h.to(torch.complex64) @ self.z).abs()
        return self.c(h.bfloat16()).float()


def mixed() -> None:
    plain, model = Mixed(), Mixed()
    parity.train_alike(plain, compiled(fully_shard(model)), BATCHES, models.square_loss, tol=4e-3)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
    assert (parity.full(model._parameters["z"]) - Mixed().z).abs().max() > 1e-3, "the complex parameter did not train"


def test_mixed_and_complex_dtypes(pool):
    pool.run(3, mixed)


def frozen_and_ignored() -> None:
    plain, model = models.mlp(), models.mlp()
    for m in (plain, model):
        m.b.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fully_shard(model, ignored_params=[model.c.bias])
    assert not isinstance(model.c.bias, DTensor) and isinstance(model.b.weight, DTensor)
    fast = compiled(model)
    loss = models.square_loss(fast(BATCHES[0][0]), BATCHES[0][1])
    loss.backward()
    assert model.b.weight.grad is None and model.b.bias.grad is None
    assert model.a.weight.grad is not None and type(model.c.bias.grad) is Tensor
    want = models.square_loss(plain(BATCHES[0][0]), BATCHES[0][1])
    want.backward()
    torch.testing.assert_close(model.c.bias.grad, plain.c.bias.grad)
    torch.testing.assert_close(model.a.weight.grad.full_tensor(), plain.a.weight.grad)
    for n in ("b.weight", "b.bias"):
        assert torch.equal(parity.full(model.get_parameter(n)), before[n])


def test_frozen_and_ignored_parameters(pool):
    pool.run(2, frozen_and_ignored)


def unfreeze_midway() -> None:
    plain, model = models.mlp(), models.mlp()
    for m in (plain, model):
        m.b.requires_grad_(False)
    fast = compiled(fully_shard(model))
    parity.train_alike(plain, fast, BATCHES[:1], models.square_loss)
    for m in (plain, model):
        m.b.requires_grad_(True)
        m.a.requires_grad_(False)
    parity.train_alike(plain, fast, BATCHES[1:], models.square_loss)


def test_freezing_and_unfreezing(pool):
    pool.run(2, unfreeze_midway)


def several_models() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))["shard"]
    small, big = fully_shard(models.mlp(), mesh=mesh), fully_shard(models.mlp())
    assert state_of(small).mesh.size() == 2 and state_of(big).mesh.size() == 4
    fast_small, fast_big, plain = compiled(small), compiled(big), models.mlp()
    x, y = BATCHES[0]
    for fast, model in ((fast_small, small), (fast_big, big)):
        models.square_loss(fast(x), y).backward()
        for n, p in model.named_parameters():
            plain.zero_grad()
            models.square_loss(plain(x), y).backward()
            torch.testing.assert_close(p.grad.full_tensor(), plain.get_parameter(n).grad)


def test_several_models_and_meshes(pool):
    pool.run(4, several_models)


def meta_device() -> None:
    plain = models.decoder(layers=1)
    with torch.device("meta"):
        model = models.decoder(layers=1)
    fully_shard(model)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.cos.copy_(plain.cos)
        model.sin.copy_(plain.sin)
        for n, p in model.named_parameters():
            nn.init.zeros_(p)
            p.copy_(torch.distributed.tensor.distribute_tensor(plain.get_parameter(n).detach(), p.device_mesh, p.placements))
    parity.train_alike(plain, compiled(model), [models.token_batch(i) for i in range(2)], models.token_loss, lr=1.0)


def test_meta_device_model(pool):
    pool.run(3, meta_device)


def seeds(sync: bool) -> list[str]:
    rank = torch.distributed.get_rank()
    model = models.mlp()
    model.register_buffer("count", torch.tensor([5, rank]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    with heard() as said:
        fully_shard(model, sync_module_states=sync)
    for n, p in models.mlp().named_parameters():
        spec_rows = model.get_parameter(n).to_local().shape[0]
        chunk = -(-p.shape[0] // 2)
        mine = p.detach()[rank * chunk : rank * chunk + spec_rows] + (0 if sync else rank)
        assert torch.equal(model.get_parameter(n).to_local(), mine), n
    assert model.count.tolist() == [5, 0 if sync else rank]
    return said


def test_rank_zero_values_are_used_and_said(pool):
    zero, one = pool.run(2, seeds, True)
    assert len(zero) == 1 and "ranks [1]" in zero[0] and "rank 0's are used" in zero[0]
    assert one == []


def test_each_rank_keeps_its_own_values_without_sync(pool):
    assert pool.run(2, seeds, False) == [[], []]


def bytes_of() -> None:
    model = models.decoder(layers=2)
    total = sum(p.nbytes for p in model.parameters())
    old = [p for p in model.parameters()]
    fast = compiled(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = models.token_batch(0)
    models.token_loss(fast(x), y).backward()
    opt.step()
    world, state = torch.distributed.get_world_size(), state_of(model)
    storages = {s.data_ptr(): s.nbytes() for p in model.parameters() for s in [p.to_local().untyped_storage()]}
    assert sum(storages.values()) == state.buffer_bytes <= total / world + state.padding_bytes
    assert state.padding_bytes < 0.1 * total
    assert all(p.untyped_storage().nbytes() == 0 for p in old), "an old parameter kept its memory"
    held = sum(v.to_local().nbytes for s in opt.state.values() for v in s.values() if isinstance(v, DTensor))
    assert 0 < held <= 2 * (total / world + state.padding_bytes)
    assert len(opt.state) == len(old)


@pytest.mark.parametrize("world", [2, 3])
def test_persistent_bytes(pool, world):
    pool.run(world, bytes_of)


def optimizer_before() -> None:
    plain, model = models.mlp(), models.mlp()
    opts = []
    for m in (plain, model):
        groups = [
            {"params": [p for n, p in m.named_parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in m.named_parameters() if p.dim() < 2 and n != "c.bias"], "weight_decay": 0.0},
        ]
        opts.append(torch.optim.AdamW(groups, lr=1e-2, eps=1e-6, foreach=False))
    x, y = BATCHES[0]
    for m, o in zip((plain, model), opts):  # one eager step, so that there is state to shard
        models.square_loss(m(x), y).backward()
        o.step()
        o.zero_grad()
    fast = compiled(model)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for x, y in BATCHES:
        models.square_loss(fast(parity.part(x, rank, world)), parity.part(y, rank, world)).backward()
        models.square_loss(plain(x), y).backward()
        for m, o in zip((model, plain), opts[::-1]):
            o.step()
            m.zero_grad()
    assert [len(g["params"]) for g in opts[1].param_groups] == [3, 2]
    for n, p in plain.named_parameters():
        torch.testing.assert_close(parity.full(model.get_parameter(n)), p.detach(), rtol=0, atol=1e-5)
    assert torch.equal(parity.full(model.c.bias), models.mlp().c.bias), "a parameter outside the optimizer changed"


def test_optimizer_built_before_with_groups_and_state(pool):
    pool.run(2, optimizer_before)


def attributes_and_hooks() -> None:
    model = models.mlp()
    model.a.weight.my_tag = "kept"
    seen: list[str] = []
    early = models.mlp()
    early.b.weight.register_hook(lambda g: seen.append(f"early {tuple(g.shape)}"))
    early.b.weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"early post {p.grad is not None}"))
    for m in (model, early):
        fully_shard(m)
    assert model.a.weight.my_tag == "kept"
    model.a.weight.register_hook(lambda g: seen.append(f"hook {type(g).__name__} {tuple(g.to_local().shape)}"))
    model.a.weight.register_hook(lambda g: g * 2)
    model.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"post {tuple(p.grad.to_local().shape)}"))
    x, y = BATCHES[0]
    models.square_loss(compiled(model)(x), y).backward()
    assert seen == ["hook DTensor (7, 10)", "post (7, 10)"], seen
    plain = models.mlp()
    models.square_loss(plain(x), y).backward()
    torch.testing.assert_close(model.a.weight.grad.full_tensor(), 2 * plain.a.weight.grad)
    seen.clear()
    models.square_loss(compiled(early)(x), y).backward()
    assert seen == ["early (14, 14)", "early post True"], seen


def test_attributes_and_hooks(pool):
    pool.run(2, attributes_and_hooks)


def reading_outside() -> list[str]:
    model = models.mlp()
    fast = compiled(model)
    fast(BATCHES[0][0])
    text = ""
    if torch.distributed.get_rank() == 0:  # on one rank only: no collective may hide in here
        text = f"{model.a.weight} {model}"
        nn.init.ones_(model.a.bias)
        assert isinstance(model.a.weight, DTensor) and model.a.weight is model.a._parameters["weight"]
        assert model.a.weight.shape == (14, 10) and model.a.weight.to_local().shape == (7, 10)
    assert list(model.state_dict()) == list(models.mlp().state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in models.mlp().named_parameters()]
    assert F.linear(BATCHES[0][0], parity.full(model.b.weight)[:, :10]).shape == (12, 14)
    return [text]


def test_reading_outside_forward(pool):
    text = pool.run(2, reading_outside)[0][0]
    assert "DTensor" in text and "Linear(in_features=10, out_features=14, bias=True)" in text
