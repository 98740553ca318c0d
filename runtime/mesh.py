"""The FSDP mesh: which ranks share a model, and a process group where there is none yet."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .communicator import communicator

log = logging.getLogger("fsdp_compile")


def default_device_type() -> str:
    """``"cuda"`` (or another accelerator) where there is one, else ``"cpu"``."""
    acc = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return acc.type if acc is not None else "cpu"


def resolve_mesh(
    mesh: DeviceMesh | None, device_type: str | None = None, timeout_s: float = 600.0
) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """``mesh``, checked, or one over all ranks; and the group for its collectives (`communicator`). Starts a process group if none
    is there: torchrun's, or a single process.

    Raises ValueError if ``mesh`` is not one-dimensional or lies on another device type than the
    parameters, `RankMismatch` if a rank does not come within ``timeout_s`` seconds."""
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; fully_shard takes a one-dimensional one, for example "
                f"mesh[{(mesh.mesh_dim_names or ('dp',))[0]!r}]"
            )
        if device_type not in (None, "meta", mesh.device_type):
            raise ValueError(f"mesh is on {mesh.device_type!r} but the parameters are on {device_type!r}")
        if dist.is_initialized() and mesh.size() > dist.get_world_size():
            raise ValueError(f"mesh has {mesh.size()} ranks but the process group only {dist.get_world_size()}")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}; call fully_shard on the mesh's ranks only")
        return mesh, communicator(mesh, timeout_s)
    kind = default_device_type() if device_type in (None, "meta") else device_type
    assert kind is not None
    if not dist.is_initialized():
        _start_group(kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    group = communicator(mesh, timeout_s)
    if group is not mesh.get_group():  # so that DTensor's own collectives (clipping, full_tensor) run there too
        mesh = DeviceMesh.from_group(group, kind, mesh_dim_names=("fsdp",))
    return mesh, group


def _start_group(kind: str) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if kind != "cpu":
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo" if kind == "cpu" else None)
        return
    log.warning("no process group and not under torchrun: running as world size 1 (nothing is sharded)")
    dist.init_process_group("gloo" if kind == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1)
