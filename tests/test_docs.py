"""docs/works.md: every test that it names exists, and every line is proved by one or stands among what does not work."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WORKS = TESTS.parent / "docs" / "works.md"
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's test functions, read without running it."""
    path = TESTS / file
    if not path.exists():
        return frozenset()
    found = ast.walk(ast.parse(path.read_text()))
    return frozenset(n.name for n in found if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def problems(text: str) -> list[str]:
    """What is wrong with a text like works.md."""
    wrong, section, lines = [], "", 0
    for line in text.splitlines():
        if line.startswith("#"):
            section = line
        named = NAMED.findall(line)
        wrong += [f"{file}::{test} does not exist" for file, test in named if test not in names_in(file)]
        if line.count("::") != len(named):
            wrong.append(f"not a test's name: {line}")
        if not line.startswith("| ") or line.startswith("| what |"):
            continue
        lines += 1
        if not named and section != "## What does not":
            wrong.append(f"no test: {line}")
    return wrong if lines else ["no lines"]


def test_works_md() -> None:
    assert problems(WORKS.read_text()) == []


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "no lines"),
        ("## Models\n| x | `test_docs.py::test_gone` |", "test_gone does not exist"),
        ("## Models\n| x | `test_gone.py::test_works_md` |", "test_gone.py::test_works_md does not exist"),
        ("## Models\n| x | `test_docs.py::problems` |", "problems does not exist"),
        ("## Models\n| x | test_docs.py::test_works_md |", "not a test's name"),
        ("## Models\n| x | |", "no test: "),
    ],
)
def test_the_check_sees(text: str, match: str) -> None:
    assert any(match in p for p in problems(text))


def test_limits_need_no_test() -> None:
    assert problems("## What does not\n| x | y | |") == []
