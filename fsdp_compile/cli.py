"""The `fsdp-compile` command. A new subcommand is a function here under `@main.command()`; its work lives elsewhere."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="fsdp-compile")
def main() -> None:
    """Fully sharded training as a compiler pass: torch.compile(model, backend="fsdp")."""


def _size(name: str, default: int, help: str):
    return click.option(f"--{name}", type=click.IntRange(min=1), default=default, help=help)


def _all(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in this order in the help."""
    return lambda command: functools.reduce(lambda fn, option: option(fn), reversed(options), command)


_subject = _all(
    click.argument("factory", metavar="FILE.py:FUNCTION"),
    _size("world-size", 8, "Ranks to plan for; none of them is started."),
    click.option("--options", metavar="JSON", help="""Options of the fsdp backend, such as '{"mp_policy": "bfloat16"}'."""),
    click.option("--meta", is_flag=True, help="Build the model on the meta device: any size, no memory."),
)
_machine = _all(
    click.option("--machine", default="calibrated", metavar="NAME", help="'calibrated' (this one), a device such as H100, or a JSON file."),
    click.option("--efficiency", type=float, default=1.0, help="Share of a device's published rates that is reached."),
    click.option("--tf32", is_flag=True, help="A device's float32 products run in TF32."),
)

_decoder = _all(
    _size("layers", 4, "Blocks of the decoder."),
    _size("dim", 256, "Width of the decoder."),
    _size("heads", 4, "Attention heads."),
    _size("ffn", 688, "Inner width of the feed-forward layers."),
    _size("vocab", 512, "Vocabulary."),
    _size("seq", 128, "Tokens of a sequence."),
    _size("batch", 4, "Sequences in a rank's batch."),
)


@main.command()
@click.option("--modes", default="single,single_compile,ddp,fsdp2,fsdp2_compile,fsdp", help="What to compare.")
@_size("nproc", 2, "Ranks to start on this machine.")
@_size("steps", 4, "Timed steps in each visit of a mode.")
@_size("rounds", 3, "Visits of each mode, interleaved with the others.")
@_size("warmup", 3, "Untimed steps of each mode at first; the first of them compiles.")
@_decoder
@click.option("--model", metavar="FILE.py:FUNCTION", help="Factory of another model, called with the sizes by keyword.")
@click.option("--options", metavar="JSON", help="""Options of the fsdp backend, such as '{"prefetch": 2}'.""")
@click.option("--lowering", type=click.Choice(["inductor", "fx"]), help="How the fsdp backend runs its graphs.")
@click.option("--bf16", is_flag=True, help="Compute in bfloat16 (single and ddp: autocast), reduce in float32.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="gloo on cpu, nccl on cuda.")
@click.option("--threads", type=int, default=None, help="Threads of each rank.  [default: cores / nproc]")
@click.option("--timeout", type=float, default=300.0, help="Seconds until a collective gives up.")
@click.option("--check-steps", type=int, default=6, help="Steps whose loss is compared with one process; 0: none.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every sample here.")
def bench(
    modes: str,
    options: str | None,
    device: str,
    threads: int | None,
    nproc: int,
    steps: int,
    rounds: int,
    warmup: int,
    model: str | None,
    lowering: str | None,
    bf16: bool,
    timeout: float,
    check_steps: int,
    json_file: Path | None,
    **sizes: int,
) -> None:
    """Train one model in several ways and compare time, memory, traffic and losses.

    All modes run in the same processes and are timed in turn, so that they see the same machine. A mode that fails is
    dropped, and the exit status is then 1; BENCH_TRACE=1 in the environment adds tracebacks.
    """
    import torch
    from rich.console import Console

    from . import bench as measuring
    from . import launcher

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = measuring.BenchConfig(
            modes=measuring.parse_modes(modes),
            nproc=nproc,
            steps=steps,
            rounds=rounds,
            warmup=warmup,
            sizes=measuring.Sizes(**sizes),
            model=model,
            options=measuring.parse_options(options),
            lowering=lowering,
            bf16=bf16,
            device=device,
            threads=threads if threads is not None else max(1, (os.cpu_count() or 1) // nproc),
            timeout=timeout,
            check_steps=check_steps,
        )
        report = measuring.run(config)
    except measuring.BenchError as error:
        raise click.ClickException(str(error)) from error
    if not launcher.speaks():
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file or a log has no width of its own
    measuring.show(report, console)
    if json_file:
        measuring.write_json(report, json_file)
        console.print(f"every sample: {json_file}", soft_wrap=True)
    if report["errors"]:
        raise SystemExit(1)


@main.command()
@_subject
@click.option("--inference", is_flag=True, help="Under no_grad: no backward graph, no reductions.")
@click.option("--diff", "diffs", multiple=True, metavar="STAGE", help="Show what a pass did to each graph; repeatable.")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Write every graph into this folder.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
def explain(**given: Any) -> None:
    """Show what torch.compile(model, backend="fsdp") would do: buckets, memory, traffic, graphs.

    FUNCTION takes no arguments and returns (model, inputs), inputs being a tuple. Nothing is launched.
    """
    from . import explain_command

    explain_command.run(**given)


@main.command()
@_subject
@_machine
@click.option("--optimizer", type=click.Choice(["adamw", "sgd", "none"]), default="adamw", help="Counted as bytes moved.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline here.")
def predict(machine: str, efficiency: float, tf32: bool, **given: Any) -> None:
    """Predict a step: how long it takes, which communication is exposed and why, and the peak of gathered weights.

    FUNCTION takes no arguments and returns (model, inputs), inputs being a tuple. Nothing is launched.
    """
    from . import predict_command

    predict_command.run(target=predict_command.Target(machine, efficiency, tf32), **given)


@main.command()
@_subject
@_machine
@click.option(
    "--memory-budget", type=click.IntRange(min=1), metavar="BYTES", help="Most gathered weights at once.  [default: as the default options]"
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("plan.json"), help="Write the plan here.")
def plan(machine: str, efficiency: float, tf32: bool, **given: Any) -> None:
    """Decide buckets, prefetch and what to keep for backward by simulation, and write them as a file for option "plan".

    FUNCTION takes no arguments and returns (model, inputs), inputs being a tuple. Nothing is launched.
    """
    from . import plan_command, predict_command

    plan_command.run(target=predict_command.Target(machine, efficiency, tf32), **given)


@main.command()
@_size("nproc", 2, "Ranks to start on this machine.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="gloo on cpu, nccl on cuda.")
@click.option("--threads", type=int, default=None, help="Threads of each rank.  [default: cores / nproc]")
@_size("repeats", 5, "Measurements of each size; the median counts.")
@click.option("--largest", type=click.IntRange(min=1 << 12), default=16 << 20, help="Bytes of the largest collective.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the machine here, too.")
def calibrate(nproc: int, device: str, threads: int | None, repeats: int, largest: int, json_file: Path | None) -> None:
    """Measure this machine for `predict`: collectives of about twenty sizes, matmuls, memory.

    The result is kept in ~/.cache/fsdp_compile (FSDP_COMPILE_CACHE names another folder).
    """
    import torch
    from rich.console import Console

    from . import bench as measuring
    from . import calibrate as calibrating
    from . import launcher

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    per_rank = threads if threads is not None else max(1, (os.cpu_count() or 1) // nproc)
    try:
        config = calibrating.CalibrateConfig(nproc, device, per_rank, repeats, largest)
        machine = calibrating.run(config)
    except (ValueError, measuring.BenchError) as error:
        raise click.ClickException(str(error)) from error
    if not launcher.speaks():
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    calibrating.show(machine, console)
    console.print(f"kept in {calibrating.save(machine, config)}", soft_wrap=True)
    if json_file:
        json_file.write_text(machine.to_json() + "\n")


@main.command()
@_size("nproc", 2, "Ranks to start on this machine.")
@_size("steps", 4, "Timed steps in each visit.")
@_size("rounds", 3, "Visits of each set of options, interleaved.")
@_decoder
@click.option("--options", "variants", multiple=True, metavar="JSON", help="Options to compare; repeatable.  [default: three bucket sizes]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="gloo on cpu, nccl on cuda.")
@click.option("--threads", type=int, default=None, help="Threads of each rank.  [default: cores / nproc]")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every sample here.")
def validate(
    nproc: int, steps: int, rounds: int, variants: tuple[str, ...], device: str, threads: int | None, json_file: Path | None, **sizes: int
) -> None:
    """Measure this machine, then compare predicted steps with measured ones: time, and peak of gathered weights.

    Under torchrun it runs on the ranks that torchrun started, on whatever hosts.
    """
    import json
    from dataclasses import asdict

    import torch
    from rich.console import Console

    from . import bench as measuring
    from . import calibrate as calibrating
    from . import launcher
    from . import validate as validating

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    per_rank = threads if threads is not None else max(1, (os.cpu_count() or 1) // nproc)
    try:
        chosen = tuple(measuring.parse_options(v) for v in variants) or validating.BUCKETS
        config = validating.ValidateConfig(nproc, steps, rounds, measuring.Sizes(**sizes), chosen, device, per_rank)
        machine, rows = validating.run(config)
    except (ValueError, measuring.BenchError) as error:
        raise click.ClickException(str(error)) from error
    if not launcher.speaks():
        return
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    calibrating.show(machine, console)
    validating.show(rows, config, console)
    if json_file:
        json_file.write_text(json.dumps({"machine": asdict(machine), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
