"""The process group that carries a mesh's collectives: the mesh's own, or beside gloo's a group with a single worker thread.

Two worker threads of one gloo group write the name of the last completed operation into the same string without a lock
(torch 2.13, `ProcessGroupGloo::runLoop`, ``pgStatus_->lastCompletedWorkName``). A name of more than 15 characters lives on the heap
("ALLGATHER_COALESCED", which every functional all-gather uses), and when several are in flight the heap is soon corrupted.
One thread has nothing to race with, and completes collectives in the order of their launch. docs/known-issues.md has a script.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import compat

from .agree import agree

BACKEND = "fsdp_gloo"  # gloo with one worker thread
# By the mesh's group; a group made anew gets a new one.
_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` sends CPU tensors through gloo itself (not through another backend built on it)."""
    return compat.cpu_backend_name(group) in ("gloo", BACKEND)


def communicator(mesh: DeviceMesh, timeout_s: float) -> dist.ProcessGroup:
    """The group for ``mesh``'s collectives. All its ranks must call this; made once for each group of a mesh.

    Raises `RankMismatch` if a rank does not come within ``timeout_s`` seconds."""
    group = mesh.get_group()
    if mesh.device_type != "cpu" or group.size() == 1 or compat.cpu_backend_name(group) != "gloo":
        return group
    made = _beside.get(group)
    if made is None:
        ranks = dist.get_process_group_ranks(group)
        agree(group, "communicator", [f"ranks {ranks}"], timeout_s)
        made = _beside[group] = compat.single_threaded_gloo(BACKEND, group, ranks)
    return made
