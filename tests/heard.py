"""What a logger says, on any rank (pytest's caplog lives in the parent process)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def heard(name: str = "fsdp_compile") -> Iterator[list[str]]:
    """The messages that logger ``name`` gets within it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
