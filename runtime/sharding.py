"""Turn a module's parameters into shards, in place, and let code read them.

::

    module._parameters["weight"]   nn.Parameter(DTensor Shard(0))      what optimizers, clipping and checkpoints see
        ._local_tensor  ─┐
        ._fsdp_shard    ─┴─ one slot of a flat buffer                  the leaf that graphs differentiate, 1-D, padded
        ._fsdp_spec                                                    its ParamSpec as text
    module.weight                  property: traced → unshard(shard); in an eager forward → the whole tensor;
                                   anywhere else → the DTensor
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compile import compat
from fsdp_compile.spec import ParamSpec, decode

from .accumulation import forget
from .grads import Move
from .layout import FlatLayout

_states: weakref.WeakValueDictionary[int, FSDPState] = weakref.WeakValueDictionary()  # in the order in which models were sharded
_count = itertools.count()


@dataclass(frozen=True, eq=False)
class FSDPState:
    """What the modules of one sharded model share. Immutable, so that deepcopy of a module shares it."""

    mesh: DeviceMesh
    ignored: frozenset[int]
    module_classes: dict[str, tuple[str, ...]]  # parameter FQN → class names of the modules around it, innermost first
    buffer_bytes: int
    padding_bytes: int
    given: Mapping[str, Any]  # the arguments of `fully_shard`, resolved
    sizes: Mapping[str, int]  # parameter FQN → bytes when gathered

    def __post_init__(self) -> None:
        _states[next(_count)] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPState:
        return self


def states() -> list[FSDPState]:
    """The state of each sharded model that is alive, oldest first."""
    return list(_states.values())


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module of a sharded model, else None."""
    return module.__dict__.get("_fsdp_state")


def is_shard(t: object) -> bool:
    """Whether ``t`` is the leaf behind a sharded parameter."""
    return isinstance(t, Tensor) and getattr(t, "_fsdp_is_shard", False)


# --- Memory -----------------------------------------------------------------------------------------------------------


def slot_view(flat: Tensor, offset: int, numel: int) -> Tensor:
    """``flat[offset : offset + numel]`` with a version counter of its own.

    Views of one base share a counter: an optimizer step on one parameter would look like a write to all the others."""
    return flat.new_empty(0).set_(flat.untyped_storage(), flat.storage_offset() + offset, (numel,), (1,))  # type: ignore[call-overload]


def make_flat(layout: FlatLayout, device: torch.device) -> Tensor:
    """The zeroed buffer of a layout (zeros, so that padding is finite and the same on every rank)."""
    return torch.zeros(layout.numel, dtype=layout.dtype, device=device)


def _copy(p: Any, memo: dict[int, Any]) -> nn.Parameter:
    """An independent copy of a sharded parameter: values, gradient and the user's attributes, with a leaf of its own."""
    if id(p) in memo:
        return memo[id(p)]
    adopt(p)
    new = new_parameter(p._fsdp_shard.detach().clone(), decode(p._fsdp_spec), p.device_mesh, p.requires_grad)
    memo[id(p)] = new
    if p.grad is not None:
        new.grad = p.grad.clone()
    for k, v in p.__dict__.items():
        if k not in new.__dict__ and not k.startswith("_dynamo"):
            new.__dict__[k] = copy.deepcopy(v, memo)
    return new


def attach(p: nn.Parameter, shard: Tensor, spec: ParamSpec) -> None:
    """Make ``shard`` the leaf behind ``p``, from which gradients are moved to it."""
    # A Parameter, so that Dynamo keeps its shape static. It always requires grad: reading a frozen parameter detaches.
    leaf = nn.Parameter(shard, requires_grad=True)
    leaf._fsdp_is_shard = True  # type: ignore[attr-defined]
    p._fsdp_shard = leaf  # type: ignore[attr-defined]
    p._fsdp_spec = spec.encode()  # type: ignore[attr-defined]
    p._fsdp_owners = weakref.WeakSet()  # type: ignore[attr-defined]
    ref = weakref.ref(p)
    leaf._fsdp_of = ref  # type: ignore[attr-defined]
    # On the instance, where copy.deepcopy looks first: Tensor's own would copy leaf and local tensor apart, and fails on a DTensor.
    p.__deepcopy__ = lambda memo: _copy(ref(), memo)  # type: ignore[attr-defined,method-assign]
    Move(p, leaf)


def new_parameter(shard: Tensor, spec: ParamSpec, mesh: DeviceMesh, requires_grad: bool) -> nn.Parameter:
    """An ``nn.Parameter`` holding a DTensor whose local tensor is a view of ``shard``."""
    rank = mesh.get_local_rank()
    local = shard.detach()[: spec.local_numel(rank)].view(spec.local_shape(rank))
    stride = torch.empty(spec.shape, device="meta").stride()
    placement = Shard(0) if spec.kind == "shard" else Replicate()
    shape = torch.Size(spec.shape)
    d = DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)
    p = nn.Parameter(d, requires_grad=requires_grad)
    attach(p, shard, spec)
    return p


@torch.no_grad()
def convert(p: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """What ``module.to(...)`` does to a sharded parameter: ``fn`` on its shard; the parameter object stays the same.

    Raises ValueError if ``fn`` moves it to a device that its mesh does not span."""
    adopt(p)
    old, spec, mesh = p._fsdp_shard.detach(), decode(p._fsdp_spec), p.device_mesh
    shard = fn(old)
    if shard is old or (shard.data_ptr() == old.data_ptr() and shard.dtype == old.dtype and shard.device == old.device and old.numel()):
        return
    if shard.device.type not in ("meta", mesh.device_type):
        raise ValueError(
            f"parameter {spec.fqn!r} is sharded over a mesh on {mesh.device_type!r} and cannot move to {shard.device}; move the model "
            "before it is sharded"
        )
    if shard.dtype != spec.dtype:
        spec = _with_dtype(spec, shard.dtype)
    grad = None if p.grad is None else fn(p.grad._local_tensor)
    shard[p._local_tensor.numel() :].zero_()
    new = new_parameter(shard, spec, mesh, p.requires_grad)
    compat.become(p, new)
    attach(p, shard, spec)
    if grad is not None:
        p.grad = compat.dtensor_like(grad, p)


def owners_of(leaf: Any) -> list[nn.Module]:
    """The modules that read a parameter through this leaf; none for any other object."""
    of = getattr(leaf, "__dict__", {}).get("_fsdp_of")  # quicker than asking a tensor for an attribute that it has not
    p = of() if of is not None else None
    return list(p._fsdp_owners) if p is not None else []


def state_behind(leaves: Iterable[Any]) -> FSDPState | None:
    """The state of the sharded model that the first of these leaves belongs to; None if none does (other objects are passed over)."""
    return next((s for leaf in leaves for m in owners_of(leaf) if (s := state_of(m)) is not None), None)


def adopt(p: Tensor | None) -> bool:
    """Give ``p`` a leaf again if something (``to``, ``load_state_dict(assign=True)``, ``deepcopy``) replaced its local tensor.

    Returns whether anything had to be done. Without it such a parameter would go on being read from its old storage and would
    train nothing, in silence."""
    if not isinstance(p, DTensor) or not hasattr(p, "_fsdp_spec"):
        return False
    local, leaf = p._local_tensor, getattr(p, "_fsdp_shard", None)
    if leaf is not None and leaf._fsdp_of() is not p:
        forget(p)
    spec = decode(p._fsdp_spec)
    same = leaf is not None and leaf._fsdp_of() is p and leaf.device == local.device and leaf.dtype == local.dtype
    if same and local.numel() and not local.is_meta:
        same = leaf is not None and leaf.data_ptr() == local.data_ptr()
    if same:
        return False
    if local.dtype != spec.dtype:
        spec = _with_dtype(spec, local.dtype)
    with torch.no_grad():
        shard = torch.zeros(spec.shard_numel, dtype=local.dtype, device=local.device)
        shard[: local.numel()].copy_(local.reshape(-1))
        p._local_tensor = shard.detach()[: local.numel()].view(local.shape)
    attach(p, shard, spec)  # type: ignore[arg-type]
    return True


def _with_dtype(spec: ParamSpec, dtype: torch.dtype) -> ParamSpec:
    same_compute = spec.compute_dtype == spec.dtype
    same_reduce = spec.reduce_dtype == spec.dtype
    return replace(
        spec,
        dtype=dtype,
        compute_dtype=dtype if same_compute else spec.compute_dtype,
        reduce_dtype=dtype if same_reduce else spec.reduce_dtype,
    )


# --- Values -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def local_rows(full: Tensor, spec: ParamSpec, rank: int) -> Tensor:
    """``rank``'s rows of a whole tensor, flat, padded with zeros to ``shard_numel``."""
    flat = full.detach().reshape(-1)
    lo, hi = spec.rows_of(rank)
    part = flat if spec.kind == "replicate" else flat[lo * spec.row_numel : hi * spec.row_numel]
    return torch.nn.functional.pad(part, (0, spec.shard_numel - part.numel())) if part.numel() < spec.shard_numel else part


@torch.no_grad()
def fill(shard: Tensor, full: Tensor, spec: ParamSpec, mesh: DeviceMesh, sync: bool) -> None:
    """Write this rank's part of ``full`` into ``shard``: rank 0's values if ``sync``, else this rank's own."""
    if full.is_meta or not spec.shard_numel:
        return
    rank, size = mesh.get_local_rank(), mesh.size()
    if not sync or size == 1:
        shard.copy_(local_rows(full, spec, rank))
        return
    group = mesh.get_group()
    parts = None
    if rank == 0:
        parts = [local_rows(full, spec, r).to(shard.device).contiguous().view(torch.uint8) for r in range(size)]
    dist.scatter(shard.view(torch.uint8), parts, src=dist.get_global_rank(group, 0), group=group)
