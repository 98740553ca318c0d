"""What ``fsdp-compile plan`` does: decide a model's plan for a machine, show what it is predicted to bring, and write it down."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fsdp_compile.explain_command import CommandError, build, parse_options
from fsdp_compile.plan import Planned, make_plan
from fsdp_compile.predict_command import Target
from fsdp_compile.text import human_bytes


def run(
    factory: str, world_size: int, options: str | None, meta: bool, target: Target, memory_budget: int | None, out: Path
) -> None:
    """Write the plan to ``out``. Raises `CommandError`."""
    known = parse_options(options)
    if not out.parent.is_dir():
        raise CommandError(f"--out: there is no folder {out.parent}")
    machine = target.find(world_size)
    model, inputs = build(factory, meta)
    try:
        with Console(stderr=True).status("simulating plans"):
            planned = make_plan(model, *inputs, machine=machine, world_size=world_size, memory_budget=memory_budget, **known)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from error
    console = Console()
    console.print(table(planned))
    out.write_text(json.dumps(planned.plan, indent=1) + "\n")
    print(f'written to {out}; use it: torch.compile(model, backend="fsdp", options={{"plan": "{out}"}})')


def table(planned: Planned) -> Table:
    """Default options and plan, predicted."""
    budget = human_bytes(planned.memory_budget)
    shown = Table(title=f"{planned.report.model} on {planned.report.world_size} ranks, within {budget} of gathered weights")
    for heading in ("", "forward and backward, ms", "exposed, ms", "gathered, peak"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, t in (("default options", planned.default), ("this plan", planned.predicted)):
        shown.add_row(name, f"{1e3 * t.step:,.2f}", f"{1e3 * t.exposed_seconds:,.2f}", human_bytes(t.peak_gathered_bytes))
    kept = planned.plan["keep"]
    shown.caption = f"{len(kept)} weights stay gathered from forward to backward" if kept else "every weight is gathered again for backward"
    return shown
