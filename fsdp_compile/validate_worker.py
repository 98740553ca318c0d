"""What each rank of `fsdp-compile validate` runs."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compile import compat
from fsdp_compile.explain import explain
from fsdp_compile.options import ON_GLOO, ROWS_FROM
from fsdp_compile.passes.machine import Machine
from fsdp_compile.runtime.communicator import communicator, is_gloo

from .bench_model import make_batches, model_factory
from .calibrate import machine_of
from .calibrate_worker import Calibration, rank_progress
from .launcher import process_group
from .validate import Row, ValidateConfig

WARMUP = 3
PEAK_STEPS = 3


class WithLoss(nn.Module):
    """A model and its loss as one graph: (tokens, targets), int64 [B, T] each → mean cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


class GatheredBytes(TorchDispatchMode):
    """Most bytes of gathered weights alive at once while it is active: counted at each all-gather, when they can only grow. A buffer that
    Inductor uses again for something else still counts (option ``inductor={"allow_buffer_reuse": False, "inplace_buffers": False}``)."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: list[tuple[Any, int]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is; without this, torch would run the eager model instead."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "all_gather" in func.name():
            self._alive = [(ref, nbytes) for ref, nbytes in self._alive if not ref.expired()]
            self._alive += [(compat.storage_ref(t), t.untyped_storage().nbytes()) for t in tree_leaves(out) if isinstance(t, Tensor)]
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive))
        return out


class Job:
    """One set of options under measurement."""

    def __init__(self, config: ValidateConfig, options: dict[str, Any], device: torch.device, warmup: int = WARMUP) -> None:
        self.batches = make_batches(config.sizes, dist.get_rank(), device)
        self.model = self._build(config, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.compiled = torch.compile(self.model, backend="fsdp", options=options)
        self.config, self.options, self.device = config, options, device
        self.taken = 0
        self.seconds: list[float] = []
        self.speeds: list[tuple[float, float]] = []  # of the machine, before each visit
        self.steps(warmup)
        self.seconds.clear()

    @staticmethod
    def _build(config: ValidateConfig, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        with device:
            return WithLoss(model_factory(None)(**config.sizes.model_arguments()))

    def steps(self, count: int) -> None:
        """Take steps, timed each."""
        for _ in range(count):
            batch = self.batches[self.taken % len(self.batches)]
            self.taken += 1
            self._finish()
            began = time.perf_counter()
            self.compiled(*batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._finish()
            self.seconds.append(time.perf_counter() - began)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> int:
        """Bytes; the least of a few steps, because a thread that carried a gather may hold it a moment longer. Compiled once more without
        reuse of buffers, or a gathered weight's memory would count on when it has become an activation's."""
        if self.options.get("lowering") != "fx" and "allow_buffer_reuse" not in self.options.get("inductor", {}):
            inductor = {**self.options.get("inductor", {}), "allow_buffer_reuse": False}
            return Job(self.config, {**self.options, "inductor": inductor}, self.device, warmup=1).peak()
        found = []
        for _ in range(PEAK_STEPS):
            with GatheredBytes() as seen:
                self.compiled(*self.batches[0]).backward()
            self.optimizer.zero_grad()
            found.append(seen.peak)
        return min(found)

    def row(self, machine: Machine) -> Row:
        """Predicted and measured; the same on every rank. Predicted for a machine as fast as it was before the visits: others may use it,
        too, and it has been seen to change by half within minutes."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.seconds, self.peak()))
        assert dist.group.WORLD is not None
        on_cpu = self.device.type == "cpu"
        default = ON_GLOO if is_gloo(dist.group.WORLD) else {"embedding_rows": ROWS_FROM} if on_cpu else {}
        options = {**default, **self.options}  # `explain` cannot know where it would run
        flops, memory = (statistics.median(each) for each in zip(*self.speeds))
        rates = replace(machine.rates, flops={**machine.rates.flops, "float32": flops}, memory=memory)
        machine = replace(machine, rates=rates)
        report = explain(self._build(self.config, self.device), *self.batches[0], world_size=len(ranks), **options)
        t = report.simulate(machine, "adamw")
        measured = tuple(max(each) for each in zip(*(r[0] for r in ranks)))
        return Row(self.options, t.step, t.exposed_seconds, measured, t.peak_gathered_bytes, max(r[1] for r in ranks))


def worker(config: ValidateConfig) -> tuple[Machine, list[Row]]:
    """Entry point of a launched rank."""
    with process_group(config.device, config.threads, config.timeout) as device, rank_progress() as progress:
        calibration = config.calibration()
        group = communicator(init_device_mesh(config.device, (config.nproc,)), config.timeout)
        measuring = Calibration(calibration, device, group, progress)
        machine = machine_of(calibration, *measuring.run())
        bar = progress.add_task("", total=len(config.variants) * (2 + config.rounds))
        jobs = []
        for options in config.variants:
            progress.update(bar, description=f"compiling {options or 'default'}")
            jobs.append(Job(config, options, device))
            progress.advance(bar)
        gc.collect()
        gc.freeze()  # collections during a timed step would scan every job's graphs
        for turn in range(config.rounds):
            for job in jobs:
                progress.update(bar, description=f"round {turn + 1} of {config.rounds}: {job.options or 'default'}")
                job.speeds.append(measuring.speed("float32"))
                dist.barrier()
                job.steps(config.steps)
                progress.advance(bar)
        rows = []
        for job in jobs:
            progress.update(bar, description=f"predicting {job.options or 'default'}")
            rows.append(job.row(machine))
            progress.advance(bar)
        return machine, rows
