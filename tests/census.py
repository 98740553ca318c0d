"""Counting what is alive in a process with threads that let go of it a moment later."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def least(look: Callable[[], T], looks: int = 8) -> T:
    """The smallest of several looks. A gloo thread that has completed a collective lets go of its tensors as soon as it gets the GIL, which
    is sometimes after the first look; what a program keeps is there at each."""
    found = []
    for _ in range(looks):
        gc.collect()
        found.append(look())
        time.sleep(0.01)
    return min(found)  # type: ignore[type-var]
