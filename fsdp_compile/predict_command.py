"""What ``fsdp-compile predict`` does: explain a model, then simulate its step on a machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from fsdp_compile import calibrate, devices
from fsdp_compile.explain_command import CommandError, explained
from fsdp_compile.passes.machine import Machine, from_json
from fsdp_compile.timeline_view import draw


@dataclass(frozen=True)
class Target:
    """The machine that a user names: a published device, "calibrated" (this machine, as measured), or a JSON file."""

    name: str
    efficiency: float = 1.0
    tf32: bool = False

    def find(self, world_size: int) -> Machine:
        """Raises `CommandError`."""
        try:
            if self.name == "calibrated":
                return calibrate.load_machine(world_size)
            if self.name.endswith(".json"):
                return from_json(Path(self.name).read_text())
            return devices.device(self.name, self.tf32, self.efficiency)
        except FileNotFoundError as error:
            raise CommandError(str(error)) from error
        except ValueError as error:
            more = "" if self.name.endswith(".json") else "; or 'calibrated', or a .json file that calibrate wrote"
            raise CommandError(f"{error}{more}") from error


def run(
    factory: str, world_size: int, options: str | None, meta: bool, target: Target, optimizer: str, json_file: Path | None
) -> None:
    """Print the predicted step. Raises `CommandError`."""
    machine = target.find(world_size)
    report = explained(factory, world_size, options, meta)
    try:
        timeline = report.simulate(machine, optimizer)
    except ValueError as error:
        raise CommandError(str(error)) from error
    console = Console()
    width = max(32, min(120, console.width) - 24) if console.is_terminal else 96
    print(f"{report.model} on {world_size} ranks, {report.parameters:,} parameters")
    print(draw(timeline, width), end="")
    if machine.source:
        print(f"figures: {machine.source}")
    if json_file:
        data = asdict(timeline) | {"step": timeline.step, "exposed_seconds": timeline.exposed_seconds}
        json_file.write_text(json.dumps(data | {"peak_gathered_bytes": timeline.peak_gathered_bytes}, indent=1) + "\n")
