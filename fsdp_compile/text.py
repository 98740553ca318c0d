"""Graphs as text that a person can read and compare."""

from __future__ import annotations

import difflib
import re

from torch import fx

from fsdp_compile.passes.roles import role_of

# What FX appends to a line to drop a value after its last use: it moves whenever a line moves, and says nothing new.
_DROPS = re.compile(r";(?:  |\s)(?:\w+ = )+None\s*(#.*)?$")
_ASSIGNED = re.compile(r"\s*(\w+)(?:: \"[^\"]*\")? = ")


def readable(graph: fx.Graph) -> str:
    """The graph's Python code with shapes, one line for each node; our own nodes say what they are for at the end of the line.

    ::

        wait_tensor: "f32[512]" = torch.ops._c10d_functional.wait_tensor.default(gather)  # wait_gather ag1
    """
    roles = {n.name: r for n in graph.nodes if (r := role_of(n)) is not None}
    out = []
    for line in graph.python_code("self", verbose=True, include_stride=False, include_device=False).src.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        line = _DROPS.sub("", line).rstrip()
        m = _ASSIGNED.match(line)
        if m and (role := roles.get(m[1])):
            names = f": {', '.join(role.params)}" if role.kind in ("gather", "reduce") else ""
            line += f"  # {role.kind} {role.bucket}{names}"
        out.append(line)
    return "\n".join(out) + "\n"


def unified_diff(before: str, after: str, names: tuple[str, str]) -> str:
    """A unified diff with two lines of context; empty if nothing changed."""
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names, n=2))


def human_bytes(n: float) -> str:
    """``3232`` → ``"3.2 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
