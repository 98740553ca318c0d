"""Starts ranks on this machine, each running one importable function, and returns what rank 0 returned."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any


class LaunchError(Exception):
    """A rank died; the message says which and how."""


def launch(worker: Callable[[Any], Any], argument: Any, nproc: int, threads: int) -> Any:
    """Run ``worker(argument)`` on ``nproc`` ranks with ``threads`` threads each; rank 0's result. Raises `LaunchError`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    try:
        return elastic_launch(launcher, worker)(argument)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise LaunchError(f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}") from error
