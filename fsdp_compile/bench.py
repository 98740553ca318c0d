"""`fsdp-compile bench`: what to measure, the launch of the ranks, statistics and the table."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import launcher as launching
from .bench_model import Sizes, model_factory
from .bench_modes import DESCRIPTIONS, LOCAL_MODES

MODES = tuple(DESCRIPTIONS)
BASELINES = ("fsdp2", "single_compile")  # whose ratios are in the main table, where they were measured


class BenchError(Exception):
    """A mistake in what was asked, or a bench that could not run; the message says what to do."""


@dataclass(frozen=True)
class BenchConfig:
    """What to measure. `steps` are timed in each of `rounds` visits of a mode, after `warmup` untimed ones.

    `options` go to the fsdp backend, `lowering` overrides theirs; `timeout` is in seconds for one collective;
    `check_steps` are compared with one process on the global batch (0: no comparison). `validate` says what is wrong.
    """

    modes: tuple[str, ...] = MODES
    nproc: int = 2
    steps: int = 4
    rounds: int = 3
    warmup: int = 3
    sizes: Sizes = field(default_factory=Sizes)
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    lowering: str | None = None
    bf16: bool = False
    device: str = "cpu"
    threads: int = 1
    timeout: float = 300.0
    check_steps: int = 6

    def backend_options(self) -> dict[str, Any]:
        """The options of `torch.compile(model, backend="fsdp", options=...)`."""
        return self.options | ({"lowering": self.lowering} if self.lowering else {})

    def validate(self) -> BenchConfig:
        """Returns itself; raises BenchError on sizes or counts that cannot work, or a model that cannot be found."""
        if min(self.nproc, self.steps, self.rounds, self.warmup) < 1:
            raise BenchError("--nproc, --steps, --rounds and --warmup must be at least 1 (the first step compiles)")
        if self.timeout <= 0 or self.check_steps < 0 or self.threads < 1:
            raise BenchError("--timeout and --threads must be positive, --check-steps not negative")
        if self.sizes.batch < 1:
            raise BenchError(f"--batch must be at least 1, not {self.sizes.batch}")
        if self.device == "cuda":
            import torch

            if self.nproc > torch.cuda.device_count():
                raise BenchError(f"--nproc {self.nproc}, but this machine has {torch.cuda.device_count()} CUDA devices")
        try:
            factory = model_factory(self.model)
            if self.model is None:
                import torch

                with torch.device("meta"):  # sizes that do not fit together fail here, once, before any rank starts
                    factory(**self.sizes.model_arguments())
        except (ValueError, OSError) as error:
            raise BenchError(str(error)) from error
        return self


def parse_modes(text: str) -> tuple[str, ...]:
    """Modes from a comma-separated list, in its order. Raises BenchError, which lists the valid ones."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    valid = "\n".join(f"  {name:15} {what}" for name, what in DESCRIPTIONS.items())
    unknown = [name for name in names if name not in DESCRIPTIONS]
    if unknown or not names:
        raise BenchError(f"unknown mode: {', '.join(unknown) or '(none given)'}; choose among\n{valid}")
    if len(set(names)) < len(names):
        raise BenchError(f"a mode is named twice: {text}")
    return names


def parse_options(text: str | None) -> dict[str, Any]:
    """Backend options from a JSON object. Raises BenchError."""
    try:
        options = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise BenchError(f"""--options wants a JSON object such as '{{"prefetch": 2}}': {error}""") from error
    if not isinstance(options, dict):
        raise BenchError(f"""--options wants a JSON object such as '{{"prefetch": 2}}', not {text}""")
    return options


@dataclass(frozen=True)
class Summary:
    """Step times in seconds over all rounds, and `n`, how many there were."""

    median: float
    min: float
    max: float
    n: int


def summarize(rounds: list[list[float]]) -> Summary:
    """Statistics of step seconds [round][step]; at least one sample."""
    samples = [seconds for turn in rounds for seconds in turn]
    return Summary(statistics.median(samples), min(samples), max(samples), len(samples))


@dataclass(frozen=True)
class Ratio:
    """How long a mode's step takes, over another's: the median over rounds and the extremes of the rounds."""

    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.min:.2f}-{self.max:.2f})"


def ratio(mode: list[list[float]], other: list[list[float]]) -> Ratio:
    """Compares within each round, where the machine was in about the same state, and only then over the rounds."""
    each = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(mode, other)]
    return Ratio(statistics.median(each), min(each), max(each))


def launch(config: BenchConfig) -> dict[str, Any]:
    """Start the ranks on this machine, wait, and return rank 0's results. Raises BenchError if a rank died."""
    from .bench_worker import worker

    try:
        return launching.launch(worker, config, config.nproc, config.threads)
    except launching.LaunchError as error:
        raise BenchError(str(error)) from error


def run(config: BenchConfig) -> dict[str, Any]:
    """Measure. Returns a JSON-able report: config, environment, each mode's samples and statistics, and all ratios."""
    import torch

    config.validate()
    began = time.time()
    results = launch(config)
    for name, mode in results["modes"].items():
        mode["summary_seconds"] = asdict(summarize(mode["round_seconds"]))
        mode["ratio_to"] = {
            other: asdict(ratio(mode["round_seconds"], theirs["round_seconds"]))
            for other, theirs in results["modes"].items()
            if other != name
        }
        mode["tokens_per_second"] = tokens_per_step(config) / mode["summary_seconds"]["median"]
    return {
        "config": asdict(config),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "wall_seconds": time.time() - began,
        **results,
    }


def tokens_per_step(config: BenchConfig) -> int:
    """Tokens that all ranks together see in a step."""
    return config.sizes.batch * config.sizes.seq * config.nproc


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report, making folders as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables, and what they do and do not say."""
    config, modes = report["config"], report["modes"]
    for name, error in report["errors"].items():
        console.print(f"[red]{name} was dropped:[/] {escape(error)}")
    if not modes:
        console.print("[red]no mode could be measured[/]")
        return
    console.print(_main_table(config, modes))
    if len(modes) > 2:
        console.print(_ratio_table(modes))
    for line in _notes(config, modes):
        console.print(line, style="dim", highlight=False)


def _main_table(config: dict[str, Any], modes: dict[str, Any]) -> Table:
    cuda = config["device"] == "cuda"
    baselines = [name for name in BASELINES if name in modes]
    sizes = config["sizes"]
    title = (
        f"{config['nproc']} ranks on {config['device']}, {sizes['layers']} layers of {sizes['dim']}, "
        f"{sizes['batch']} x {sizes['seq']} tokens per rank, {'bf16' if config['bf16'] else 'fp32'}"
    )
    table = Table(title=title)
    table.add_column("mode", no_wrap=True)
    headings = ["median ms", "min", "max", "tokens/s", *(f"x vs {name}" for name in baselines), "state MB\nper rank"]
    headings += ["peak MB\nper rank"] if cuda else ["loopback\nMB/step"]
    for heading in [*headings, "loss vs\n1 process"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, mode in sorted(modes.items(), key=lambda item: item[1]["summary_seconds"]["median"]):
        times = mode["summary_seconds"]
        cells = [f"{1e3 * times[key]:.1f}" for key in ("median", "min", "max")]
        cells.append(f"{mode['tokens_per_second']:,.0f}")
        cells += ["1.00" if name == other else str(Ratio(**mode["ratio_to"][other])) for other in baselines]
        cells.append(f"{mode['state_bytes'] / 1e6:.1f}")
        if cuda:
            cells.append(f"{(mode['state_bytes'] + mode['peak_extra_bytes']) / 1e6:.1f}")
        else:
            sent = mode["sent_bytes_per_step"]
            cells.append("?" if sent is None else f"{sent / 1e6:.1f}")
        table.add_row(name, *cells, _verdict(mode["max_loss_deviation"], config["bf16"]))
    return table


def _verdict(deviation: float | None, bf16: bool) -> str:
    """The deviation in colour: green where rounding explains it. Order of summation differs between modes."""
    if deviation is None:
        return "-"
    return f"[{'green' if deviation < loss_tolerance(bf16) else 'red'}]{deviation:.1e}[/]"


def loss_tolerance(bf16: bool) -> float:
    """How far a loss in nats may be from one fp32 process's before it is more than rounding."""
    return 5e-2 if bf16 else 1e-3


def _ratio_table(modes: dict[str, Any]) -> Table:
    table = Table(title="step time of the row / step time of the column (below 1: the row is faster)")
    table.add_column("")
    for name in modes:
        table.add_column(name, justify="right")
    for name, mode in modes.items():
        table.add_row(name, *("" if other == name else f"{mode['ratio_to'][other]['median']:.2f}" for other in modes))
    return table


def _notes(config: dict[str, Any], modes: dict[str, Any]) -> list[str]:
    samples = config["steps"] * config["rounds"]
    notes = [
        f"Times: {samples} steps in {config['rounds']} interleaved rounds, each as long as its slowest rank. Ratios: "
        "step time over the other mode's, round by round; median (lowest-highest round). Below 1 is faster.",
        "State: parameters and optimizer state kept between steps. Loss: largest deviation in up to "
        f"{config['check_steps']} first steps from one fp32 process on the global batch.",
    ]
    if LOCAL_MODES & modes.keys():
        notes.append("single, single_compile: every rank trains alone on its own batch sending nothing: compute alone.")
    if config["device"] == "cpu":
        notes.append(
            "Loopback: bytes all processes of this machine sent over the interface. Loopback is fast and copies on the "
            "cores that compute: this shows overhead and memory, but little of how well communication hides."
        )
    return notes
