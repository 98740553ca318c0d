"""What would train on each rank alone: refused at the first optimizer.step(), or said."""

from __future__ import annotations

from typing import Any

import models
import torch
from heard import heard
from test_bad_input import message
from test_oneliner import BATCHES, FX, Helped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import fully_shard


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(10, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Broken(nn.Module):
    """Dynamo leaves out a frame that breaks within a loop, and torch's own containers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def never_traced() -> dict[str, str]:
    out = {}
    for name, model in (("helper", Helped(False, False)), ("rnn", Recurrent()), ("loop", Broken())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fast = torch.compile(model, backend="fsdp", options=FX)
        fast(BATCHES[0][0]).sum().backward()
        out[name] = message(optimizer.step)
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # a model that nobody compiled is none of our business
    return out


def test_a_model_in_which_nothing_is_traced_cannot_train_apart(pool):
    for said in pool.run(2, never_traced):
        assert "Helped was compiled with backend='fsdp' but is not sharded" in said["helper"] and "'a.weight'" in said["helper"]
        assert "'blocks.0.0.weight' on each rank alone" in said["loop"]
        assert "'rnn.weight_ih_l0' on each rank alone. Call fsdp_compile.fully_shard(model) first" in said["rnn"]


def one_after_the_other(sharded: bool, **how: Any) -> list[str]:
    said = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            model = fully_shard(models.mlp()) if sharded else models.mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fast = torch.compile(model, backend="fsdp", options=FX, **how)
            fast(BATCHES[0][0]).sum().backward()
            try:
                optimizer.step()
                said.append("")
            except RuntimeError as e:
                said.append(str(e))
    return said


def isolated() -> list[str]:
    return one_after_the_other(False, isolate_recompiles=True)


def test_more_models_of_a_class_than_dynamo_compiles(pool):
    for said in pool.run(2, one_after_the_other, False):
        assert said[:2] == ["", ""] and all("gave up at config.recompile_limit" in s for s in said[2:])
    for said in pool.run(2, one_after_the_other, True):
        assert said == [""] * 4, "sharded before, they share what was compiled"
    for said in pool.run(2, isolated):
        assert said == [""] * 4


def function_for_many() -> list[list[str]]:
    """What is said at the step of each model that one compiled function is given."""
    fast = torch.compile(lambda model, x: model(x).sum(), backend="fsdp", options=FX)
    said = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            model = models.mlp()
            fast(model, BATCHES[0][0]).backward()
            with heard() as lines:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            said.append(list(lines))
    return said


def test_a_function_given_more_models_than_dynamo_compiles(pool):
    for first, second, third in pool.run(2, function_for_many):
        assert first == second == []
        assert len(third) == 1 and "updates parameter 'a.weight' of a MLP on each rank alone" in third[0]


class Parts(nn.Module):
    """Two blocks and a head; only blocks are compiled."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(models.MLP(10, 14, 10) for _ in range(blocks))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def step_of(model: nn.Module, *others: nn.Module, **options: Any) -> str:
    """What the first step of a model says whose blocks are compiled, with the parameters of other modules in the same optimizer."""
    for b in model.blocks:  # type: ignore[union-attr]
        b.compile(backend="fsdp", options={**FX, **options}, isolate_recompiles=True)
    optimizer = torch.optim.SGD([p for m in (model, *others) for p in m.parameters()], lr=0.1)
    out = model(BATCHES[0][0])
    for m in others:
        out = m(out)
    out.sum().backward()
    return said_at(optimizer)


def said_at(optimizer: torch.optim.Optimizer) -> str:
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def beside() -> dict[str, str]:
    out = {"plain": step_of(Parts()), "sharded first": step_of(fully_shard(Parts()))}
    model = Parts()
    out["ignored"] = step_of(model, ignored_params=list(model.head.parameters()))
    model = Parts()
    model.head = DistributedDataParallel(model.head)  # type: ignore[assignment]
    out["ddp"] = step_of(model)
    with heard() as warned:
        out["elsewhere"] = step_of(fully_shard(Parts()), nn.Linear(3, 2))
    assert len(warned) == 1 and "updates 2 plain parameters, such as 'weight', on each rank alone" in warned[0]
    frozen = Parts()
    frozen.head.requires_grad_(False)
    out["frozen"] = step_of(frozen)
    model = fully_shard(Parts())
    model.temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (torch.compile(model, backend="fsdp", options=FX)(BATCHES[0][0]) * model.temperature).sum().backward()
    out["added"] = said_at(optimizer)
    model = fully_shard(Parts())
    fast, optimizer = torch.compile(model, backend="fsdp", options=FX), torch.optim.SGD(model.parameters(), lr=0.1)
    fast(BATCHES[0][0]).sum().backward()
    out["before the group is added"] = said_at(optimizer)
    model.extra = nn.Linear(3, 2)
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    model.extra(fast(BATCHES[0][0])).sum().backward()
    out["group"] = said_at(optimizer)
    return out


def test_what_lies_beside_the_sharded_parts_of_a_model(pool):
    for said in pool.run(2, beside):
        assert "parameter 'head.weight' of Parts is not sharded although 'blocks.0' is (2 such parameters)" in said.pop("plain")
        assert "parameter 'temperature' of FSDPParts is not sharded although 'the rest' is (1 such" in said.pop("added")
        assert "parameter 'extra.weight' of FSDPParts is not sharded" in said.pop("group")
        assert said == dict.fromkeys(said, "nothing")


def graphs_of_blocks() -> int:
    model = fully_shard(Parts(4))
    count = 0

    def counted(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend("fsdp")(gm, inputs, **kwargs)

    with torch._dynamo.config.patch(recompile_limit=2):
        for i, b in enumerate(model.blocks):
            model.blocks[i] = torch.compile(b, backend=counted, options=FX, fullgraph=True, isolate_recompiles=True)
        model(BATCHES[0][0]).sum().backward()
    return count


def test_more_blocks_of_a_class_than_dynamo_compiles(pool):
    assert pool.run(2, graphs_of_blocks) == [4, 4]
