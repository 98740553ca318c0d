"""A plain model that shards itself at its first call: what was read before that, and what cannot be sharded so."""

from __future__ import annotations

import models
import parity
import pytest
import torch
import torch.distributed as dist
from test_bad_input import message
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import fully_shard

FX = {"lowering": "fx"}
BATCHES = [models.vector_batch(i) for i in range(3)]


class Helped(nn.Module):
    """Reads ``a`` and ``b.weight`` in code that Dynamo leaves out, before (or without) the first graph."""

    def __init__(self, before: bool, after: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before, self.after = before, after
        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)

    @torch._dynamo.disable
    def helper(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b.weight.tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.helper((x * 2).tanh() if self.before else x)
        return self.b(x) if self.after else x


def first_step_counts(before: bool, after: bool) -> None:
    model = Helped(before, after)
    fired: list[Tensor] = []
    model.a.weight.register_hook(lambda g: fired.append(g))
    compiled = torch.compile(model, backend="fsdp", options=FX)
    batches = [(x, x) for x, _ in BATCHES]
    parity.train_alike(Helped(before, after), compiled, batches, lambda out, x: ((out - x) ** 2).mean())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert len(fired) == len(batches) and all(isinstance(g, DTensor) for g in fired), "a hook fires once, on the reduced shard"


@pytest.mark.parametrize("before, after", [(False, True), (True, False), (True, True)])
def test_gradients_of_eager_reads_before_the_first_graph(pool, before, after):
    pool.run(2, first_step_counts, before, after)


def wrapped() -> str:
    model = DistributedDataParallel(models.mlp())
    return message(torch.compile(model, backend="fsdp", options=FX), BATCHES[0][0])


def test_ddp_around_the_model_is_refused(pool):
    for said in pool.run(2, wrapped):
        assert "compile the model itself, without DDP around it" in said


OTHER = {
    "mp_policy": torch.bfloat16,
    "reduce_op": "sum",
    "reshard_after_forward": False,
}


def asked_again() -> dict[str, str]:
    out = {}
    for name, value in OTHER.items():
        out[name] = message(torch.compile(fully_shard(models.mlp()), backend="fsdp", options={**FX, name: value}), BATCHES[0][0])
    model = fully_shard(models.mlp())
    out["ignored_params"] = message(torch.compile(model, backend="fsdp", options={**FX, "ignored_params": [model.c.bias]}), BATCHES[0][0])
    same = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "reduce_op": "sum"}
    torch.compile(fully_shard(models.mlp(), **same), backend="fsdp", options={**FX, **same})(BATCHES[0][0])
    return out


def test_options_that_contradict_the_sharding(pool):
    for said in pool.run(2, asked_again):
        for name in (*OTHER, "ignored_params"):
            assert f"option {name}=" in said[name] and "the model is sharded already, with" in said[name], said[name]


class Writes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(10, 4), how

    def forward(self, x: Tensor) -> Tensor:
        w = self.lin.weight
        if self.how == "data":
            w.data.clamp_(-0.1, 0.1)
        elif self.how == "out":
            with torch.no_grad():
                torch.mul(w, 2.0, out=w)
        elif self.how == "row":
            with torch.no_grad():
                w[0] = 1.0
        elif self.how == "detach":
            w.detach().mul_(0.5)
        elif self.how == "no write":
            x = x + (w * 2).relu_().sum()
        return self.lin(x)


def writes(how: str, first: bool) -> str:
    model = fully_shard(Writes(how)) if first else Writes(how)
    fast = torch.compile(model, backend="fsdp", options=FX)
    if how == "no write":
        fast(BATCHES[0][0])
        return ""
    return message(fast, BATCHES[0][0])


@pytest.mark.parametrize("how", ["data", "out", "row", "detach", "no write"])
@pytest.mark.parametrize("first", [False, True])
def test_writes_inside_forward_are_refused(pool, how, first):
    said = pool.run(1, writes, how, first)[0]
    assert how == "no write" or ("parameter 'lin.weight' is written in place inside the compiled model" in said), said


def test_group_of_one_may_step(pool):
    """Alone there is nothing to shard, and nothing to refuse."""
    pool.run(1, alone)


def alone() -> None:
    assert dist.get_world_size() == 1
    model = Helped(False, False)
    torch.compile(model, backend="fsdp", options=FX)(BATCHES[0][0]).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def casts() -> dict[str, str]:
    out = {}
    late = MixedPrecisionPolicy(output_dtype=torch.float32)
    for name, policy in (("inputs", torch.bfloat16), ("outputs", late)):
        model = models.mlp()
        fast = torch.compile(model, backend="fsdp", options={**FX, "mp_policy": policy})
        out[name] = message(fast, BATCHES[0][0])
        assert not any(isinstance(p, DTensor) for p in model.parameters()), "refused before anything was sharded"
    return out


def test_a_policy_that_casts_what_the_first_call_has_passed_already(pool):
    for said in pool.run(2, casts):
        assert all("call fsdp_compile.fully_shard(model, mp_policy=...) before" in text for text in said.values()), said


def closure() -> None:
    model = models.mlp()
    fast = torch.compile(model, backend="fsdp", options=FX)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = models.square_loss(fast(BATCHES[0][0]), BATCHES[0][1])
        loss.backward()
        return loss

    optimizer.step(evaluate)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_a_closure_may_make_the_first_call(pool):
    pool.run(2, closure)
