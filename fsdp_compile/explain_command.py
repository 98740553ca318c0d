"""What ``fsdp-compile explain`` does."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import nn

from fsdp_compile.bench_model import model_factory
from fsdp_compile.explain import explain
from fsdp_compile.report import Report
from fsdp_compile.spec import DTYPES


class CommandError(click.ClickException):
    """Something the user typed is wrong; the message says what. The command line prints it and exits with status 1."""


def run(
    factory: str,
    world_size: int,
    options: str | None,
    meta: bool,
    inference: bool,
    diffs: tuple[str, ...],
    save: Path | None,
    json_file: Path | None,
) -> None:
    """Build the model, explain it, print and write what was asked for. Raises `CommandError`."""
    report = explained(factory, world_size, options, meta, inference)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(report)
    try:
        for stage in diffs:
            print("\n".join(_diffs(report, stage)))
    except ValueError as error:
        raise CommandError(str(error)) from error
    if save:
        print(f"{len(report.save(save))} files in {save}")
    if json_file:
        json_file.write_text(json.dumps(report.to_dict(), indent=1) + "\n")


def explained(factory: str, world_size: int, options: str | None, meta: bool, inference: bool = False) -> Report:
    """The report of the model that ``FILE.py:FUNCTION`` makes. Raises `CommandError`."""
    known = parse_options(options)
    model, inputs = build(factory, meta)
    with torch.no_grad() if inference else contextlib.nullcontext():
        try:
            return explain(model, *inputs, world_size=world_size, **known)
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from error


def parse_options(text: str | None) -> dict[str, Any]:
    """Options of the backend from a JSON object; ``mp_policy`` may name a dtype. Raises `CommandError`."""
    try:
        options = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise CommandError(f"--options is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise CommandError(f"""--options wants a JSON object such as '{{"prefetch": 2}}', not {text}""")
    if "mp_policy" in options:
        if options["mp_policy"] not in DTYPES:
            raise CommandError(f"mp_policy {options['mp_policy']!r}: name a dtype, one of {', '.join(DTYPES)}")
        options["mp_policy"] = DTYPES[options["mp_policy"]]
    return options


def build(factory: str, meta: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    """Model and inputs, as the factory ``FILE.py:FUNCTION`` makes them. Raises `CommandError`."""
    try:
        make = model_factory(factory)
    except (ValueError, FileNotFoundError) as error:
        raise CommandError(str(error).replace("--model wants", "FACTORY:")) from error
    with torch.device("meta") if meta else contextlib.nullcontext():
        made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise CommandError(f"{factory} must return (model, inputs), not {type(made).__name__}")
    model, inputs = made
    return model, tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)


def _diffs(report: Report, stage: str) -> list[str]:
    """The stage's diff of each graph that has the stage. Raises ValueError if none has."""
    out = []
    for frame in range(len(report.calls)):
        for direction in ("joint", "forward", "backward"):
            if any((s.frame, s.direction, s.name) == (frame, direction, stage) for s in report.stages):
                out.append(report.diff(stage, direction, frame))
    if not out:
        names = dict.fromkeys(s.name for s in report.stages)
        raise ValueError(f"--diff: no stage {stage!r}; there are: {', '.join(names)}")
    return out
