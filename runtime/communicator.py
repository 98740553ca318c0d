"""The process group that carries a mesh's collectives: the mesh's own, or beside gloo's one with a single worker thread (and a second
like it, which `wire` uses in turn).

Two worker threads of one gloo group write the name of the last completed operation into the same string without a lock
(torch 2.13, `ProcessGroupGloo::runLoop`, ``pgStatus_->lastCompletedWorkName``). A name of more than 15 characters lives on the heap
("ALLGATHER_COALESCED", which every functional all-gather uses), and when several are in flight the heap is soon corrupted.
One thread has nothing to race with, and completes collectives in the order of their launch. docs/known-issues.md has a script.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import compat

from .agree import agree
from .wire import lay

BACKEND = "fsdp_gloo"  # gloo with one worker thread
# By the mesh's group; a group made anew gets new ones.
_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()
_control: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` sends CPU tensors through gloo itself (not through another backend built on it)."""
    return compat.cpu_backend_name(group) in ("gloo", BACKEND)


def communicator(mesh: DeviceMesh, timeout_s: float) -> dist.ProcessGroup:
    """The group for ``mesh``'s collectives. All its ranks must call this; made once for each group of a mesh.

    Raises `RankMismatch` if a rank does not come within ``timeout_s`` seconds."""
    group = mesh.get_group()
    backend = compat.cpu_backend_name(group)
    if group.size() == 1 or (mesh.device_type == "cpu" and backend != "gloo"):
        return group
    if mesh.device_type != "cpu":
        if not backend and group not in _control and dist.is_gloo_available():
            _control[group] = dist.new_group(_ranks_of(group, timeout_s), backend="gloo", use_local_synchronization=True)
        return group
    if group not in _beside:
        ranks = _ranks_of(group, timeout_s)
        made, second = (compat.single_threaded_gloo(BACKEND, group, ranks, _name(ranks)) for _ in range(2))
        _beside[group] = made
        lay(made, second)
    return _beside[group]


def _name(ranks: list[int]) -> str:
    """A name for a new group, the same on all ``ranks``: they make their groups together. The first after a new `init_process_group` is
    called as before it, because DTensor keeps names of groups from mesh to equal mesh."""
    key = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    assert dist.group.WORLD is not None
    return f"fsdp_{key}_{next(_counts.setdefault(dist.group.WORLD, {}).setdefault(key, itertools.count()))}"


def _ranks_of(group: dist.ProcessGroup, timeout_s: float) -> list[int]:
    """The group's ranks, once they are all here: making a group waits for the others for as long as its own timeout."""
    ranks = dist.get_process_group_ranks(group)
    agree(group, "communicator", [f"ranks {ranks}"], timeout_s)
    return ranks


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group that carries small CPU messages between ``group``'s ranks; None if there is none (or nobody to talk to)."""
    backend = compat.cpu_backend_name(group)
    if group.size() == 1 or backend == "fake":
        return None
    return group if backend else _control.get(group)
