"""What each rank of `fsdp-compile bench` runs: builds the modes, times them in interleaved rounds, checks the losses.

All modes live in one process and are visited in turn, a few steps each, for several rounds: the machine's drift then
hits all of them alike, where one mode after the other would compare a cool processor with a hot one.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.progress import Progress

from .bench import BenchConfig
from .bench_model import make_batches, model_factory
from .bench_modes import LOCAL_MODES, Setting, Trainer, reference_losses
from .calibrate_worker import rank_progress
from .launcher import process_group

COMPILED_VARIANTS = 256  # of one function: the modes share code, so theirs add up to more than Dynamo allows


@dataclass
class Visited:
    """A mode under measurement, and what was seen of it on this rank."""

    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)  # seconds of each step, a list for each round
    sent: list[float] = field(default_factory=list)  # bytes a step, one for each round
    extra_bytes: int = 0  # most that a step needed beyond the state (CUDA)


@dataclass
class Bench:
    """One rank's bench. `control` is a gloo group of its own: it still works after a mode broke the default group."""

    config: BenchConfig
    device: torch.device
    control: Any
    progress: Progress
    modes: dict[str, Visited] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    build_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        factory = model_factory(self.config.model)
        arguments = self.config.sizes.model_arguments()
        timeout, options = timedelta(seconds=self.config.timeout), self.config.backend_options()
        self.setting = Setting(lambda: factory(**arguments), self.device, timeout, self.config.bf16, options)
        self.batches = make_batches(self.config.sizes, self.rank, self.device)

    def run(self) -> dict[str, Any]:
        """Warm up, time, check. Returns what rank 0 reports, JSON-able (see `bench.Report`)."""
        config = self.config
        visits = len(config.modes) * (1 + config.rounds)
        bar = self.progress.add_task("", total=visits)
        for name in config.modes:
            self.progress.update(bar, description=f"compiling and warming up {name}")
            began = time.perf_counter()
            self._attempt(name, self._build)
            self.build_seconds[name] = time.perf_counter() - began
            self.progress.advance(bar)
        gc.collect()
        gc.freeze()  # collections during a timed step would scan every mode's graphs
        for turn in range(config.rounds):
            first = turn % len(config.modes)  # so that no mode always follows the same other
            for name in config.modes[first:] + config.modes[:first]:
                self.progress.update(bar, description=f"round {turn + 1} of {config.rounds}: {name}")
                if name in self.modes:
                    self._attempt(name, self._visit)
                self.progress.advance(bar)
        self.progress.update(bar, description="comparing losses")
        return self._results()

    def _attempt(self, name: str, action: Any) -> None:
        """Do something with a mode on every rank; if it fails on any, all ranks drop the mode and rank 0 says why."""
        error = ""
        try:
            action(name)
        except Exception as failure:
            cause = f"{type(failure).__name__}: {failure}"
            error = f"{cause}\n{traceback.format_exc(limit=-3)}" if os.environ.get("BENCH_TRACE") else cause
        errors = self._gather(error)
        if any(errors):
            self.errors[name] = merge_errors(errors)
            self.modes.pop(name, None)
            self.progress.console.print(f"[red]{name} failed[/] {escape(self.errors[name])}")

    def _build(self, name: str) -> None:
        visited = Visited(Trainer(name, self.setting))
        self._steps(visited, self.config.warmup)
        self.modes[name] = visited

    def _visit(self, name: str) -> None:
        visited, cuda = self.modes[name], self.device.type == "cuda"
        dist.barrier(self.control)
        before = interface_bytes()
        allocated = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = self._steps(visited, self.config.steps)
        if cuda:
            visited.extra_bytes = max(visited.extra_bytes, torch.cuda.max_memory_allocated() - allocated)
        dist.barrier(self.control)
        visited.rounds.append(seconds)
        if before is not None:
            visited.sent.append(((interface_bytes() or 0) - before) / self.config.steps)
        dist.barrier(self.control)  # else a fast rank's next step would count in a slow one's reading

    def _steps(self, visited: Visited, count: int) -> list[float]:
        """Take steps; returns the seconds of each, as this rank's clock saw them."""
        seconds = []
        for _ in range(count):
            batch = self.batches[len(visited.losses) % len(self.batches)]
            self._finish()
            began = time.perf_counter()
            loss = visited.trainer.step(*batch)
            self._finish()
            seconds.append(time.perf_counter() - began)
            visited.losses.append(loss.item())
        return seconds

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def _results(self) -> dict[str, Any]:
        reference = self._reference()
        modes = {}
        for name, visited in self.modes.items():
            ranks = self._gather(
                {
                    "rounds": visited.rounds,
                    "losses": visited.losses,
                    "state": visited.trainer.state_bytes(),
                    "extra": visited.extra_bytes,
                }
            )
            losses = [sum(step) / self.world for step in zip(*(rank["losses"] for rank in ranks))]
            local = name in LOCAL_MODES
            modes[name] = {
                "round_seconds": slowest([rank["rounds"] for rank in ranks]),
                "rank_round_seconds": [rank["rounds"] for rank in ranks],
                "losses": losses,
                "max_loss_deviation": None if local or not reference else deviation(losses, reference),
                "state_bytes": max(rank["state"] for rank in ranks),
                "peak_extra_bytes": max(rank["extra"] for rank in ranks) if self.device.type == "cuda" else None,
                "sent_bytes_per_step": sum(visited.sent) / len(visited.sent) if visited.sent else None,
                "build_seconds": self.build_seconds[name],
            }
        return {"modes": modes, "errors": self.errors, "reference_losses": reference}

    def _reference(self) -> list[float]:
        """The one-process losses on rank 0, elsewhere nothing; all ranks wait. Needs the whole model on one rank."""
        compared = [len(v.losses) for name, v in self.modes.items() if name not in LOCAL_MODES]
        steps = min([self.config.check_steps, *compared]) if compared else 0
        losses: list[float] = []
        if self.rank == 0 and steps:
            every = [make_batches(self.config.sizes, rank, self.device) for rank in range(self.world)]
            losses = reference_losses(self.setting, every, steps)
        dist.barrier(self.control)
        return losses


def merge_errors(errors: list[str]) -> str:
    """One text from an error of each rank (empty: none): where one rank failed, the others' timeouts say little."""
    if len(set(errors)) == 1:
        return f"on every rank: {errors[0]}"
    return "; ".join(f"on rank {rank}: {text}" for rank, text in enumerate(errors) if text)


def slowest(ranks: list[list[list[float]]]) -> list[list[float]]:
    """From seconds [rank][round][step], those of the slowest rank at each step: [round][step]."""
    return [[max(step) for step in zip(*turn)] for turn in zip(*ranks)]


def deviation(losses: list[float], reference: list[float]) -> float:
    """Largest distance between the two over the steps which both have."""
    return max(abs(mine - theirs) for mine, theirs in zip(losses, reference))


def interface_bytes(table: Path = Path("/proc/net/dev")) -> int | None:
    """Bytes sent so far over the interface that gloo uses, by every process on the machine; None where unknown."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        for line in table.read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    except (OSError, IndexError, ValueError):
        pass
    return None


def worker(config: BenchConfig) -> dict[str, Any]:
    """Entry point of a launched rank."""
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = 4 * COMPILED_VARIANTS
    with process_group(config.device, config.threads, config.timeout) as device:
        # Ranks meet here while others still wait for a broken mode's collective, so it has more patience.
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * config.timeout + 60))
        with rank_progress() as progress:
            return Bench(config, device, control, progress).run()
