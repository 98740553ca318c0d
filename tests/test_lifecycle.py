"""What users do between steps: copies, conversions, checkpoints, graph breaks, modes of autograd."""

from __future__ import annotations

import copy

import models
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard, unshard

FX = {"lowering": "fx"}
BATCHES = [models.vector_batch(i) for i in range(3)]


def compiled(model: nn.Module, **kwargs) -> nn.Module:
    return torch.compile(model, backend="fsdp", options=FX, **kwargs)


def deepcopy_trains() -> None:
    model = fully_shard(models.mlp())
    twin = copy.deepcopy(model)
    storages = [{p.to_local().untyped_storage().data_ptr() for p in m.parameters()} for m in (model, twin)]
    assert not storages[0] & storages[1], "the copy shares memory with the original"
    parity.train_alike(models.mlp(), compiled(twin), BATCHES, models.square_loss)
    for n, p in models.mlp().named_parameters():
        assert torch.equal(parity.full(model.get_parameter(n)), p.detach()), f"training the copy changed the original's {n}"
    parity.train_alike(models.mlp(), compiled(model), BATCHES, models.square_loss)


def test_deepcopy_is_independent_and_trains(pool):
    pool.run(2, deepcopy_trains)


def scaled() -> nn.Module:
    model = models.mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    return model


def load_then_train(assign: bool, after_step: bool) -> None:
    model = fully_shard(models.mlp())
    fast = compiled(model)
    if after_step:
        models.square_loss(fast(BATCHES[0][0]), BATCHES[0][1]).backward()
        model.zero_grad()
    source = {
        k: torch.distributed.tensor.distribute_tensor(v, model.get_parameter(k).device_mesh, model.get_parameter(k).placements)
        for k, v in scaled().state_dict().items()
    }
    model.load_state_dict(source, assign=assign)
    for n, p in scaled().named_parameters():
        assert torch.equal(parity.full(model.get_parameter(n)), p.detach()), n
    parity.train_alike(scaled(), fast, BATCHES, models.square_loss)


@pytest.mark.parametrize("after_step", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_then_train(pool, assign, after_step):
    pool.run(2, load_then_train, assign, after_step)


def to_dtype_then_train() -> None:
    model = fully_shard(models.mlp())
    fast = compiled(model)
    models.square_loss(fast(BATCHES[0][0]), BATCHES[0][1]).backward()
    model.zero_grad()
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    data = [(x.double(), y.double()) for x, y in BATCHES]
    parity.train_alike(models.mlp().double(), fast, data, F.mse_loss, tol=1e-12)


def test_to_dtype_then_train(pool):
    pool.run(2, to_dtype_then_train)


def state_dict_names() -> None:
    plain, model = models.decoder(layers=1), models.decoder(layers=1)
    fast = compiled(model)
    with torch.no_grad():
        fast(models.token_batch(0)[0])
    want = plain.state_dict()
    assert list(model.state_dict()) == list(want)
    assert list(fast.state_dict()) == [f"_orig_mod.{k}" for k in want], "torch.compile's own prefix, and nothing else"
    for k, v in model.state_dict().items():
        assert torch.equal(parity.full(v), want[k]), k


def test_state_dict_names_and_values(pool):
    pool.run(3, state_dict_names)


class Breaks(nn.Module):
    """A graph break in the middle, and a helper that Dynamo does not see but that reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randn(7, 10) * 0.3)
        self.net = models.MLP(7, 9, 3)

    @torch._dynamo.disable
    def helper(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.helper(x * self.weight.mean()))
        torch._dynamo.graph_break()
        return self.net(h)


def graph_breaks(explicit: bool) -> None:
    model = Breaks()
    if explicit:
        fully_shard(model)
    parity.train_alike(Breaks(), compiled(model), BATCHES, models.square_loss)
    assert isinstance(model._parameters["weight"], DTensor)


def test_graph_breaks_explicit(pool):
    pool.run(2, graph_breaks, True)


class SimpleBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = models.mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.net.a(x))
        torch._dynamo.graph_break()
        return self.net.c(F.gelu(self.net.b(h)))


def simple_break() -> None:
    """The optimizer of `train_alike` is built before the first call: the one-liner re-points it."""
    parity.train_alike(SimpleBreak(), compiled(SimpleBreak()), BATCHES, models.square_loss)


def test_graph_break_oneliner(pool):
    pool.run(2, simple_break)


def eager_forward() -> None:
    model = fully_shard(models.mlp())
    parity.train_alike(models.mlp(), model, BATCHES, models.square_loss)


def test_sharded_model_trains_without_compile(pool):
    pool.run(3, eager_forward)


def eval_then_train(mode: str) -> None:
    model = models.mlp()
    fast = compiled(model)
    guard = torch.no_grad() if mode == "no_grad" else torch.inference_mode()
    with guard:
        out = fast(BATCHES[0][0])
    assert not out.requires_grad
    torch.testing.assert_close(out.clone(), models.mlp()(BATCHES[0][0]).detach())
    parity.train_alike(models.mlp(), fast, BATCHES, models.square_loss)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluate_then_train(pool, mode):
    pool.run(2, eval_then_train, mode)


def whole_graph(explicit: bool) -> None:
    model = models.mlp()
    if explicit:
        fully_shard(model)
    parity.train_alike(models.mlp(), compiled(model, fullgraph=True), BATCHES, models.square_loss)


@pytest.mark.parametrize("explicit", [False, True])
def test_fullgraph(pool, explicit):
    pool.run(2, whole_graph, explicit)


def two_forwards_two_backwards() -> None:
    plain, model = models.mlp(), fully_shard(models.mlp())
    fast = compiled(model)
    for m, run in ((plain, plain), (model, fast)):
        losses = [models.square_loss(run(x), y) for x, y in BATCHES[:2]]
        for loss in losses:
            loss.backward()
        assert all(p.grad is not None for p in m.parameters())
    for n, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(n).grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-6)


def test_two_forwards_then_two_backwards(pool):
    pool.run(2, two_forwards_two_backwards)


def parameters_held_from_before() -> None:
    model = models.mlp()
    held = list(model.parameters())
    x, target = BATCHES[0]
    models.square_loss(compiled(model)(x), target).backward()
    with pytest.raises(RuntimeError, match=r"'[\w.]+' was replaced when the model was sharded.*take model.parameters\(\) again"):
        torch.nn.utils.clip_grad_norm_(held, 1.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert parity.full(norm) > 0


def test_parameters_held_from_before_sharding_fail_loudly(pool):
    pool.run(2, parameters_held_from_before)


def teacher_and_student() -> None:
    """Two models of one class, with the same FQNs, in one compiled function."""

    def run(teacher: nn.Module, student: nn.Module, wrap) -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            return (teacher(x).detach() - student(x)).square().mean() + 0.1 * teacher(x).mean()

        x, _ = BATCHES[0]
        wrap(loss)(x).backward()
        return [p.grad for m in (teacher, student) for p in m.parameters()]

    def pair() -> list[nn.Module]:
        first, second = models.mlp(), models.mlp()
        with torch.no_grad():
            for p in second.parameters():
                p.mul_(0.7)
        return [first, second]

    want = run(*pair(), lambda fn: fn)
    got = run(*[fully_shard(m) for m in pair()], lambda fn: torch.compile(fn, backend="fsdp", options=FX, fullgraph=True))
    for a, b in zip(want, got):
        torch.testing.assert_close(parity.full(b), a, rtol=1e-6, atol=1e-7)


def test_two_models_with_the_same_names_in_one_graph(pool):
    pool.run(2, teacher_and_student)


def added_after_sharding() -> None:
    model = nn.Sequential(*models.mlp().children())
    fully_shard(model)
    model.append(nn.Linear(3, 3))
    x, _ = BATCHES[0]
    with pytest.raises(Exception, match=r"'\d+\.weight' of \w+ is not sharded although the rest of the model is .2 such"):
        compiled(model)(x)


def test_parameters_added_after_sharding_are_refused(pool):
    pool.run(2, added_after_sharding)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(10, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh()

    def encode(self, x: Tensor) -> Tensor:
        return F.linear(x, self.body.weight) + self.body(x)


def chunked(model: nn.Module, hidden: Tensor) -> Tensor:
    """A loss that reads the head's weight itself, in pieces."""
    parts = [hidden @ w.t() for w in model.head.weight.split(2)]
    return torch.cat(parts, 1).logsumexp(1).mean() + model.encode(torch.ones(2, 10)).square().mean()


def whole_outside() -> None:
    plain, model = Tower(), Tower()
    fast = compiled(fully_shard(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for x, _ in BATCHES:
        chunked(plain, plain(x)).backward()
        hidden = fast(parity.part(x, dist.get_rank(), dist.get_world_size()))
        with unshard(fast):
            loss = chunked(model, hidden)
        loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    for n, p in plain.named_parameters():
        torch.testing.assert_close(parity.full(model.get_parameter(n)), p.detach(), rtol=0, atol=1e-5)
    assert isinstance(model.head.weight, DTensor), "outside the context a parameter is its shard again"
    with pytest.raises(ValueError, match="not sharded yet"), unshard(plain):
        pass


def test_unshard_reads_whole_weights_outside_forward(pool):
    pool.run(2, whole_outside)
