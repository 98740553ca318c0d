"""The ways to train that the bench compares. Each builds the same model from the same seed, and then takes steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .bench_model import storage_bytes

DESCRIPTIONS = {
    "single": "one process alone, eager (each rank on its own batch)",
    "single_compile": "one process alone, torch.compile: compute alone",
    "ddp": "DistributedDataParallel, eager",
    "fsdp2": "FSDP2 (fully_shard on each block and on the model), eager",
    "fsdp2_compile": "FSDP2 with each block compiled",
    "fsdp": 'this package: torch.compile(model, backend="fsdp")',
}
LOCAL_MODES = frozenset({"single", "single_compile"})


@dataclass(frozen=True)
class Setting:
    """What building a mode needs to know: `factory` makes the model, a collective gives up after `timeout`."""

    factory: Callable[[], nn.Module]
    device: torch.device
    timeout: timedelta = timedelta(minutes=5)
    bf16: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """A model of one mode with its optimizer (AdamW, the same in every mode)."""

    def __init__(self, name: str, setting: Setting) -> None:
        """Builds the mode `name`, on every rank at once.

        DDP and FSDP2 get a process group of their own, and the fsdp backend has the default one for itself: a mode in
        which one rank fails leaves the others waiting in a collective, and the timeout then breaks the whole group.
        """
        self.name = name
        self.device = setting.device
        # First of all: ranks must create the same groups even if building the model fails on one.
        group = dist.new_group(timeout=setting.timeout) if name in ("ddp", "fsdp2", "fsdp2_compile") else None
        torch.manual_seed(0)
        with setting.device:
            model = setting.factory()
        # FSDP casts the shards, the other modes have only autocast: the closest they get to the same arithmetic.
        self.autocast = setting.bf16 and name in LOCAL_MODES | {"ddp"}
        if name.startswith("fsdp2"):
            mesh = DeviceMesh.from_group(group, setting.device.type)  # type: ignore[arg-type]
            _fully_shard_blocks(model, mesh, setting.bf16, compiled=name == "fsdp2_compile")
        # Before torch.compile, as in an ordinary script. FSDP2 replaces the parameters, so after it.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-6, fused=True)
        if name == "single_compile":
            model = torch.compile(model)  # type: ignore[assignment]
        elif name == "ddp":
            model = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        elif name == "fsdp":
            options = dict(setting.options)
            if setting.bf16:
                options["mp_policy"] = _bf16_policy()
            model = torch.compile(model, backend="fsdp", options=options or None)  # type: ignore[assignment]
        self.model = model

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of this rank's batch; tokens and targets int64 [B, T]."""
        cast = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with cast:
            logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step; returns the loss before it, detached."""
        loss = self.loss(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state_bytes(self) -> int:
        """Bytes which stay on this rank between steps: parameters and optimizer state."""
        return storage_bytes(self._state())

    def _state(self) -> Iterator[object]:
        yield from self.model.parameters()
        for group in self.optimizer.param_groups:
            yield from group["params"]
        for state in self.optimizer.state.values():
            yield from state.values()


def reference_losses(setting: Setting, batches: list[list[tuple[Tensor, Tensor]]], steps: int) -> list[float]:
    """Losses of one eager process in the setting's model in float32 on the global batch, step by step.

    `batches[rank]` are that rank's batches; gradients of the ranks' batches are averaged, as data parallelism does.
    """
    trainer = Trainer("single", Setting(setting.factory, setting.device))
    losses = []
    for step in range(steps):
        total = 0.0
        for own in batches:
            loss = trainer.loss(*own[step % len(own)]) / len(batches)
            loss.backward()
            total += loss.item()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def _bf16_policy() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _fully_shard_blocks(model: nn.Module, mesh: DeviceMesh, bf16: bool, *, compiled: bool) -> None:
    """FSDP2 as its documentation has it: each block of `model.layers`, then the model with what remains."""
    from torch.distributed.fsdp import fully_shard

    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TypeError("the fsdp2 modes need a model with its blocks in `.layers`, an nn.ModuleList")
    policy = {"mp_policy": _bf16_policy()} if bf16 else {}
    for index, layer in enumerate(layers):
        if compiled:  # inside the hooks that gather and free, which Dynamo must not see
            layers[index] = layer = torch.compile(layer, fullgraph=True)  # type: ignore[assignment]
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
