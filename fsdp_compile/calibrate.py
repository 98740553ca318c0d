"""`fsdp-compile calibrate`: measure this machine's collectives and kernels, fit them, and keep the result for `predict`.

::

    ranks (calibrate_worker)  ──►  points (kind, lowering, dtype, bytes, seconds)  ──►  fit  ──►  Machine  ──►  JSON in the cache
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fsdp_compile.passes.machine import Link, Machine, Rates, from_json, wire_bytes
from fsdp_compile.text import human_bytes

from . import launcher

SIZES = 20  # of each collective
SMALLEST = 4 << 10  # bytes


@dataclass(frozen=True)
class CalibrateConfig:
    """What to measure: ``nproc`` ranks on ``device`` ("cpu" or "cuda") with ``threads`` each; ``repeats`` of each size; ``largest``: bytes
    of the largest collective (output of a gather, input of a reduction); ``timeout``: seconds for one collective."""

    nproc: int = 2
    device: str = "cpu"
    threads: int = 1
    repeats: int = 5
    largest: int = 16 << 20
    sizes: int = SIZES
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.nproc < 2:
            raise ValueError(f"calibration needs at least 2 ranks, got {self.nproc}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {self.device!r}")
        if min(self.threads, self.repeats) < 1 or self.sizes < 2:
            raise ValueError("threads and repeats must be at least 1, sizes at least 2")
        if self.largest < SMALLEST:
            raise ValueError(f"largest must be at least {SMALLEST} bytes, got {self.largest}")
        if self.device == "cuda" and self.nproc > torch.cuda.device_count():
            raise ValueError(f"{self.nproc} ranks, but this machine has {torch.cuda.device_count()} CUDA devices")

    @property
    def backend(self) -> str:
        """What carries the collectives."""
        return "gloo" if self.device == "cpu" else "nccl"

    def nbytes(self) -> list[int]:
        """The sizes: geometric, each a multiple of 1 KiB x nproc, so that every rank's parts are whole."""
        step = 1024 * self.nproc
        steps = np.geomspace(SMALLEST, self.largest, self.sizes)
        return list(dict.fromkeys(max(step, round(s / step) * step) for s in steps))


@dataclass(frozen=True)
class Point:
    """One measured collective: median seconds of the slowest rank."""

    kind: str
    lowering: str
    dtype: str
    nbytes: int
    seconds: float

    @property
    def key(self) -> str:
        """Its link in `Machine.links`."""
        return f"{self.kind}/{self.lowering}/{self.dtype}"


def fit(wire: Sequence[float], seconds: Sequence[float]) -> Link:
    """The line latency + wire / bandwidth with the least squares of relative errors (absolute ones would leave the small sizes, which
    tell the latency, no weight). ``wire``: bytes sent. Raises ValueError for fewer than two different sizes or times not positive."""
    x, y = np.asarray(wire, dtype=float), np.asarray(seconds, dtype=float)
    if len(set(x.tolist())) < 2 or x.shape != y.shape:
        raise ValueError(f"a line needs two sizes and a time for each, got {len(x)} sizes and {len(y)} times")
    if not (y > 0).all():
        raise ValueError("measured times must be positive")
    a = np.stack([1 / y, x / y], axis=1)
    latency, slope = np.linalg.lstsq(a, np.ones_like(y), rcond=None)[0]
    if latency < 0:  # noise: the best line through the origin
        latency, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    if slope <= 0:  # sizes too small to tell: nothing but latency, and no bandwidth below what was reached
        latency, slope = float(np.median(y)), float((y / np.maximum(x, 1)).min()) * 1e-3
    residual = float(np.median(np.abs(latency + slope * x - y) / y))
    return Link(float(latency), float(1 / slope), residual)


def at_steady(links: dict[str, Link], steady: dict[str, Link]) -> dict[str, Link]:
    """``links`` brought to what the float32 links in ``steady`` carry: those themselves, and bandwidths of other dtypes of the same kind
    and lowering in the same proportion."""

    def brought(key: str, link: Link) -> Link:
        float32 = key.rpartition("/")[0] + "/float32"
        if float32 not in steady or float32 not in links:
            return link
        other = steady[float32]
        return replace(link, latency=other.latency, bandwidth=link.bandwidth * other.bandwidth / links[float32].bandwidth)

    return {key: brought(key, link) for key, link in links.items()}


def machine_of(config: CalibrateConfig, points: Sequence[Point], measured: dict[str, Any]) -> Machine:
    """The machine that fits. ``measured``: flops by dtype, memory, launch, interference, posting, the device's name, and ``steady``:
    points of traffic without pauses."""

    def fitted(points: Sequence[Point]) -> dict[str, Link]:
        found = {}
        for key in dict.fromkeys(p.key for p in points):
            mine = [p for p in points if p.key == key]
            found[key] = fit([wire_bytes(p.kind, p.nbytes, config.nproc, config.backend) for p in mine], [p.seconds for p in mine])
        return found

    return Machine(
        name=measured["device"],
        rates=Rates(measured["flops"], measured["memory"], measured["launch"]),
        links=at_steady(fitted(points), fitted(measured["steady"])),
        backend=config.backend,
        world=config.nproc,
        interference=measured["interference"],
        posting=measured["posting"],
        source=f"measured on {config.nproc} ranks with {config.threads} threads each, torch {torch.__version__}",
    )


def run(config: CalibrateConfig) -> Machine:
    """Start the ranks and measure. Raises ValueError if a rank died."""
    from .calibrate_worker import worker

    try:
        points, measured = launcher.launch(worker, config, config.nproc, config.threads)
    except launcher.LaunchError as error:
        raise ValueError(str(error)) from error
    return machine_of(config, points, measured)


# --- Cache --------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """``$FSDP_COMPILE_CACHE``, or ``~/.cache/fsdp_compile``."""
    return Path(os.environ.get("FSDP_COMPILE_CACHE") or Path.home() / ".cache" / "fsdp_compile")


def device_name(device: str) -> str:
    """The processor's or the accelerator's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def cache_file(device: str, world: int, backend: str) -> Path:
    """Where a calibration of this topology is kept: one file for device, ranks, backend and torch version."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device_name(device)} {device}").strip("-").lower()
    return cache_folder() / f"machine-{slug}-{world}-{backend}-torch{torch.__version__}.json"


def save(machine: Machine, config: CalibrateConfig) -> Path:
    """Keep a calibration; returns the file."""
    path = cache_file(config.device, config.nproc, config.backend)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")  # another process may read the file just now
    partial.write_text(machine.to_json() + "\n")
    partial.replace(path)
    return path


def load_machine(world: int, device: str | None = None, backend: str | None = None) -> Machine:
    """This machine as `fsdp-compile calibrate` measured it with ``world`` ranks; ``device``: "cuda" where there is one, else "cpu".
    Raises FileNotFoundError, naming the command, if it has not been measured, ValueError for an unreadable file, and TypeError for
    arguments of other types, such as the two swapped."""
    if not isinstance(world, int) or isinstance(world, bool) or not isinstance(device, str | None) or not isinstance(backend, str | None):
        given = ", ".join(repr(argument) for argument in (world, device, backend))
        raise TypeError(f'load_machine({given}): give the number of ranks, then the device, as in load_machine(2, "cpu")')
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = cache_file(device, world, backend or ("nccl" if device == "cuda" else "gloo"))
    command = f"fsdp-compile calibrate --nproc {world} --device {device}"
    try:
        return from_json(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"this machine has not been measured with {world} ranks on {device} and torch {torch.__version__} ({path} does not exist); "
            f"run: {command}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); run again: {command}") from error


# --- Showing ------------------------------------------------------------------------------------------------------------


def show(machine: Machine, console: Console) -> None:
    """Print what was measured."""
    table = Table(title=f"{machine.name}, {machine.world} ranks, {machine.backend}")
    table.add_column("collective", no_wrap=True)
    table.add_column("dtype")
    for heading in ("latency us", "GB/s sent", "median error"):
        table.add_column(heading, justify="right")
    for key, link in machine.links.items():
        kind, lowering, dtype = (key + "//").split("/")[:3]
        error = "-" if link.residual is None else f"{link.residual:.0%}"
        table.add_row(f"{kind} {lowering}", dtype, f"{1e6 * link.latency:,.0f}", f"{link.bandwidth / 1e9:,.3f}", error)
    console.print(table)
    rates = ", ".join(f"{dtype} {rate / 1e9:,.1f}" for dtype, rate in machine.rates.flops.items())
    console.print(f"matmul GFLOP/s: {rates}", highlight=False)
    console.print(f"memory: {human_bytes(machine.rates.memory)}/s   launch: {1e6 * machine.rates.launch:.1f} us", highlight=False)
    console.print(f"interference: {machine.interference:.0%} of compute is lost while collectives run beside it", highlight=False)
    console.print(f"starting a collective: {1e6 * machine.posting:,.0f} us", highlight=False)
