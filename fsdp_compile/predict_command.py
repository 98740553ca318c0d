"""What ``fsdp-compile predict`` does: explain a model, then simulate its step on a machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from fsdp_compile import calibrate, devices
from fsdp_compile.explain_command import CommandError, explained
from fsdp_compile.passes.machine import Machine, from_json
from fsdp_compile.timeline_view import draw


def run(
    factory: str,
    world_size: int,
    options: str | None,
    meta: bool,
    machine: str,
    efficiency: float,
    tf32: bool,
    optimizer: str,
    json_file: Path | None,
) -> None:
    """Print the predicted step. Raises `CommandError`."""
    try:
        target = find_machine(machine, world_size, efficiency, tf32)
    except (ValueError, FileNotFoundError) as error:
        raise CommandError(str(error)) from error
    report = explained(factory, world_size, options, meta)
    try:
        timeline = report.simulate(target, optimizer)
    except ValueError as error:
        raise CommandError(str(error)) from error
    console = Console()
    width = max(32, min(120, console.width) - 24) if console.is_terminal else 96
    print(f"{report.model} on {world_size} ranks, {report.parameters:,} parameters")
    print(draw(timeline, width), end="")
    if target.source:
        print(f"figures: {target.source}")
    if json_file:
        data = asdict(timeline) | {"step": timeline.step, "exposed_seconds": timeline.exposed_seconds}
        json_file.write_text(json.dumps(data | {"peak_gathered_bytes": timeline.peak_gathered_bytes}, indent=1) + "\n")


def find_machine(name: str, world_size: int, efficiency: float = 1.0, tf32: bool = False) -> Machine:
    """A published device, ``calibrated`` (this machine, as measured), or a JSON file. Raises ValueError or FileNotFoundError."""
    if name == "calibrated":
        return calibrate.load_machine(world_size)
    if name.endswith(".json"):
        return from_json(Path(name).read_text())
    try:
        return devices.device(name, tf32, efficiency)
    except ValueError as error:
        raise ValueError(f"{error}; or 'calibrated', or a .json file that calibrate wrote") from error
