"""`fsdp-compile validate`: what `predict` says of a step next to what the step does, for several options, in one run.

::

    ranks (validate_worker)  ──►  calibrate  ──►  for each set of options: explain, simulate  ──►  predicted ┐
                                             └─►  train, in interleaved rounds                ──►  measured  ┴►  table
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from fsdp_compile.passes.machine import Machine

from . import launcher
from .bench_model import Sizes
from .calibrate import CalibrateConfig
from .text import human_bytes

BUCKETS: tuple[dict[str, Any], ...] = ({}, {"bucket_bytes": 1 << 20}, {"bucket_bytes": 25 << 20})


@dataclass(frozen=True)
class ValidateConfig:
    """What to compare: each of ``variants`` (options of the backend) for ``steps`` timed steps in each of ``rounds`` visits, on
    ``nproc`` ranks on ``device`` with ``threads`` each; ``timeout``: seconds for one collective."""

    nproc: int = 2
    steps: int = 4
    rounds: int = 3
    sizes: Sizes = field(default_factory=Sizes)
    variants: tuple[dict[str, Any], ...] = BUCKETS
    device: str = "cpu"
    threads: int = 1
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if min(self.steps, self.rounds) < 1 or not self.variants:
            raise ValueError("steps and rounds must be at least 1, and there must be options to compare")
        self.calibration()

    def calibration(self) -> CalibrateConfig:
        """How the machine is measured, in the same processes."""
        return CalibrateConfig(self.nproc, self.device, self.threads, dtypes=("float32",), timeout=self.timeout)


@dataclass(frozen=True)
class Row:
    """One set of options. Times in seconds; ``measured``: of each step, of its slowest rank; peaks: bytes of gathered weights alive."""

    options: dict[str, Any]
    predicted: float
    exposed: float
    measured: tuple[float, ...]
    predicted_peak: int
    measured_peak: int

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, of the median step."""
        return self.predicted / statistics.median(self.measured) - 1


def run(config: ValidateConfig) -> tuple[Machine, list[Row]]:
    """Start the ranks, measure and predict. Raises ValueError if a rank died."""
    from .validate_worker import worker

    try:
        return launcher.launch(worker, config, config.nproc, config.threads)
    except launcher.LaunchError as error:
        raise ValueError(str(error)) from error


def show(rows: list[Row], config: ValidateConfig, console: Console) -> None:
    """Print the table."""
    s = config.sizes
    what = f"{s.layers} layers of {s.dim}, {s.batch} x {s.seq} tokens per rank"
    table = Table(title=f"{config.nproc} ranks on {config.device}, {what}, {config.steps * config.rounds} steps each")
    table.add_column("options")
    headings = ("predicted ms", "measured ms", "min", "max", "error", "exposed ms\npredicted", "peak gathered\npredicted", "measured")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        times = (row.predicted, statistics.median(row.measured), min(row.measured), max(row.measured))
        table.add_row(
            json.dumps(row.options) if row.options else "default",
            *(f"{1e3 * t:,.1f}" for t in times),
            f"{row.error:+.1%}",
            f"{1e3 * row.exposed:,.1f}",
            human_bytes(row.predicted_peak),
            human_bytes(row.measured_peak),
        )
    console.print(table)
