"""Fixtures: one pool of worker processes for the whole session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FSDP_COMPILE_CACHE"] = tempfile.mkdtemp(prefix="fsdp_compile_tests_")  # no calibration of this machine: plans stay as they are

from pool import Pool


@pytest.fixture(scope="session")
def _session_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def pool(_session_pool: Pool) -> Pool:
    """``pool.run(world, function, *args)`` runs an importable function on every rank; see `pool.Pool`."""
    import torch

    torch.set_num_threads(1)
    return _session_pool
