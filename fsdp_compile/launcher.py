"""Starts ranks on this machine, each running one importable function, and returns what rank 0 returned; under torchrun, which has started
them already, on whatever machines, it runs the function here."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class LaunchError(Exception):
    """A rank died, or there are not as many as asked for; the message says which and how."""


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or whoever sets its variables) has started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def speaks() -> bool:
    """Whether this process is the one to print: every process but torchrun's ranks from 1 on."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def launch(worker: Callable[[Any], Any], argument: Any, nproc: int, threads: int) -> Any:
    """Run ``worker(argument)`` on ``nproc`` ranks with ``threads`` threads each; rank 0's result (under torchrun each rank's own).
    Raises `LaunchError`."""
    if under_torchrun():
        if int(os.environ["WORLD_SIZE"]) != nproc:
            raise LaunchError(f"torchrun has started {os.environ['WORLD_SIZE']} ranks: --nproc must be that number, not {nproc}")
        return worker(argument)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if sys.platform == "linux":  # all ranks are on this machine: name no other interface, resolve no host name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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


@contextlib.contextmanager
def process_group(device: str, threads: int, timeout: float) -> Iterator[torch.device]:
    """In a launched rank: its device, within a process group whose collectives give up after ``timeout`` seconds."""
    torch.set_num_threads(threads)
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield own
    finally:
        dist.destroy_process_group()
