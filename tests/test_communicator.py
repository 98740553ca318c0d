"""The group that carries a model's collectives on gloo: one worker thread (two corrupt the heap, `runtime/communicator.py`)."""

from __future__ import annotations

import os
import time

import models
import torch
import torch.distributed as dist
from fsdp_compile.runtime.communicator import BACKEND, is_gloo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile import fully_shard
from fsdp_compile.compat import cpu_backend_name
from fsdp_compile.spec import decode


def groups_of(model: torch.nn.Module) -> set[str]:
    return {decode(p._fsdp_spec).group for p in model.parameters()}


def single_threaded() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain, on_mesh = fully_shard(models.mlp()), fully_shard(models.mlp(), mesh=mesh)
    (name,) = groups_of(plain)
    assert groups_of(on_mesh) == {name}, "models over the same ranks must share one communicator"
    group = dist.distributed_c10d._resolve_process_group(name)
    assert cpu_backend_name(group) == BACKEND and is_gloo(group)
    options = group._get_backend(torch.device("cpu")).options
    theirs = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options
    assert (options._threads, theirs._threads) == (1, 2) and options._timeout == theirs._timeout
    assert next(plain.parameters()).device_mesh.get_group() is group, "DTensor's own collectives run there too"
    assert next(on_mesh.parameters()).device_mesh is mesh, "a mesh that the user gave stays"


def test_every_collective_of_a_model_runs_on_one_gloo_thread(pool):
    pool.run(2, single_threaded)


def many_in_flight(seconds: float) -> int:
    """Functional all-gathers, 15 in flight: on a group with two threads this crashes within seconds while the cores are busy."""
    (name,) = groups_of(fully_shard(models.mlp()))
    ops = torch.ops._c10d_functional
    rounds, end = 0, torch.tensor([time.monotonic() + seconds], dtype=torch.float64)
    dist.broadcast(end, 0)
    while True:
        for _ in range(100):
            xs = [torch.full((n,), float(n)) for n in (32, 200, 1000, 7, 1024)] * 3
            outs = [ops.all_gather_into_tensor(x, 2, name) for x in xs]
            for x, out in zip(xs, outs):
                assert torch.equal(ops.wait_tensor(out), torch.cat([x, x]))
            rounds += 1
        over = torch.tensor([float(time.monotonic() > end.item())])
        dist.all_reduce(over)
        if over.item():
            return rounds


def test_many_gathers_in_flight(pool):
    assert min(pool.run(2, many_in_flight, 4.0)) > 0


def subset_then_all() -> None:
    """Ranks that made other groups before must still find each other."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        fully_shard(models.mlp(), mesh=mesh)
    other = DeviceMesh("cpu", [1, 2])
    if dist.get_rank() > 0:
        fully_shard(models.mlp(), mesh=other)
    everyone = fully_shard(models.mlp())
    assert everyone(models.vector_batch(0)[0]).isfinite().all()
    dist.barrier()


def test_a_subset_of_the_ranks_then_all_of_them(pool):
    pool.run(3, subset_then_all)


def trained() -> None:
    fast = torch.compile(fully_shard(models.mlp()), backend="fsdp", options={"lowering": "fx"})
    models.square_loss(fast(models.vector_batch(0)[0]), models.vector_batch(0)[1]).backward()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_threads_end_with_their_process_group(pool):
    """Although the compiled code stays: Dynamo leaves it in the globals of the module that it was made for."""
    counts = []
    for _ in range(3):
        pool.run(2, trained)
        counts.append(max(pool.run(2, threads)))
    assert counts[1] == counts[2], f"{counts} threads after each of three trainings, each with process groups of its own"
