"""The rooms of docs/architecture.md import what they may: passes run without a process group, the runtime without graphs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("fsdp_compile.spec", "fsdp_compile.compat", "fsdp_compile.live")


def imported(source: str) -> set[str]:
    """Dotted names of what a file imports from outside its room, anywhere in it: modules, and names in them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


def strays(source: str, forbidden: tuple[str, ...]) -> list[str]:
    """Imports below ``forbidden``, and of this package's other rooms but the vocabulary that all share."""

    def below(name: str, roots: tuple[str, ...]) -> bool:
        return any(f"{name}.".startswith(f"{root}.") for root in roots)

    return sorted(n for n in imported(source) if below(n, forbidden) or (below(n, ("fsdp_compile",)) and not below(n, SHARED)))


@pytest.mark.parametrize("file", sorted((ROOT / "passes").glob("*.py")), ids=lambda f: f.name)
def test_passes(file: Path) -> None:
    assert strays(file.read_text(), ("torch.distributed",)) == []


@pytest.mark.parametrize("file", sorted((ROOT / "runtime").glob("*.py")), ids=lambda f: f.name)
def test_runtime(file: Path) -> None:
    assert strays(file.read_text(), ("torch.fx",)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "def f():\n    from torch.distributed import all_reduce",
        "from fsdp_compile.runtime import wire",
        "from fsdp_compile import runtime",
        "import fsdp_compile.runtime.early",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert strays(source, ("torch.distributed",))
    assert not strays("from torch import fx\nfrom fsdp_compile import compat\nfrom .wire import lay", ("torch.distributed",))
