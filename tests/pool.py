"""Persistent worker processes for tests that need ranks.

One set of workers serves every world size: a task for world n runs on the first n of them, in a process group made for that task.
Importing torch costs seconds, so workers live as long as the session; a rank that raises or hangs costs the others their life.

    results = Pool().run(2, function, *args)      # function is importable by name; results[rank]
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # how long the other ranks may go on after one has failed


class RankError(AssertionError):
    """A rank raised or did not finish in time; the message holds what every rank said."""


class _Worker:
    def __init__(self, index: int, folder: Path, env: dict[str, str]) -> None:
        context = mp.get_context("spawn")
        self.index = index
        self.stack = folder / f"stack{index}_{time.monotonic_ns()}"
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(self.stack), env), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def where(self) -> str:
        """The stack of a worker that hangs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.stack.read_text() if self.stack.exists() else "(no stack)"


class Pool:
    """Workers, started when a world size first needs them. ``env``: environment variables that they start with."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp_pool_")
        self._env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self._workers: list[_Worker] = []
        self._tasks = 0

    def run(self, world: int, fn: Any, *args: Any, timeout_s: float = 120.0, pg_timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on ``world`` ranks; returns the results by rank. Raises `RankError`."""
        folder = Path(self._folder.name)
        while len(self._workers) < world:
            self._workers.append(_Worker(len(self._workers), folder, self._env))
        self._tasks += 1
        task = pickle.dumps((fn, args, kwargs))
        for rank, w in enumerate(self._workers[:world]):
            w.pipe.send((rank, world, str(folder / f"store{self._tasks}"), pg_timeout_s, task))
        return self._collect(self._workers[:world], timeout_s + 10.0 * (self._tasks == 1))

    def _collect(self, workers: list[_Worker], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        said: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(said) < len(workers):
            left = {w.pipe: (rank, w) for rank, w in enumerate(workers) if rank not in results and rank not in said}
            ready = wait(list(left), max(0.0, deadline - time.monotonic()))
            if not ready:
                said.update({rank: f"did not finish; it stands at\n{w.where()}" for rank, w in left.values()})
                break
            for pipe in ready:
                rank, w = left[pipe]  # type: ignore[index]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    w.process.join(1)
                    ok, value = False, f"died with exit code {w.process.exitcode}"
                if ok:
                    results[rank] = value
                else:
                    said[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if said:
            self.close()
            raise RankError("\n".join(f"=== rank {r} {said[r]}" if r in said else f"=== rank {r} finished" for r in range(len(workers))))
        return [results[r] for r in range(len(workers))]

    def close(self) -> None:
        """Kill the workers; the next `run` starts new ones."""
        for w in self._workers:
            w.kill()
        self._workers.clear()


def _serve(pipe: Connection, stack: str, env: dict[str, str]) -> None:
    os.environ.update(env)
    out = open(stack, "w")
    faulthandler.register(signal.SIGUSR1, file=out, all_threads=False)
    import torch

    torch.set_num_threads(1)
    _import_all()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            rank, world, store, pg_timeout_s, task = pipe.recv()
            pipe.send_bytes(_run(rank, world, store, pg_timeout_s, task))


def _import_all() -> None:
    """What every test needs. It stays: out of the garbage collector's sight half a million objects need not be looked at in each test."""

    import fsdp_compile.backend  # noqa: F401

    gc.collect()
    gc.freeze()


def _run(rank: int, world: int, store: str, pg_timeout_s: float, task: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    try:
        fn, args, kwargs = pickle.loads(task)
        files = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=timedelta(seconds=pg_timeout_s))
        dist.barrier()  # a rank with little to do would close its connections before another has made them
        torch.manual_seed(0)
        answer = (True, fn(*args, **kwargs))
        data = pickle.dumps(answer)
    except BaseException:
        data = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
    _clean()
    sys.stdout.flush()
    return data


def _clean() -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.debug
    from torch.distributed.tensor import _redistribute

    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # DTensor keeps the meshes of destroyed process groups in here, gives them to equal meshes made later, and so keeps their threads.
    torch.distributed.tensor.debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    torch.set_default_dtype(torch.float32)
    gc.collect()
    gc.freeze()  # what Dynamo leaves of each test (compiled code in globals) would make every later collection slower
