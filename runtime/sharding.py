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

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compile.spec import ParamSpec, decode

from .grads import move_grad_hook
from .layout import FlatLayout
from .ops import unshard


@dataclass(frozen=True)
class FSDPState:
    """What the modules of one sharded model share. Immutable, so that deepcopy of a module shares it."""

    mesh: DeviceMesh
    ignored: frozenset[int]
    module_classes: dict[str, tuple[str, ...]]  # parameter FQN → class names of the modules around it, innermost first
    buffer_bytes: int
    padding_bytes: int

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPState:
        return self


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


def attach(p: nn.Parameter, shard: Tensor, spec: ParamSpec) -> None:
    """Make ``shard`` the leaf behind ``p`` and install the hook that moves gradients."""
    leaf = nn.Parameter(shard, requires_grad=p.requires_grad)  # a Parameter: Dynamo keeps its shape static
    leaf._fsdp_is_shard = True  # type: ignore[attr-defined]
    p._fsdp_shard = leaf  # type: ignore[attr-defined]
    p._fsdp_spec = spec.encode()  # type: ignore[attr-defined]
    if leaf.is_floating_point() or leaf.is_complex():
        needs = leaf.requires_grad
        leaf.requires_grad_(True)
        leaf.register_post_accumulate_grad_hook(move_grad_hook(p, p._local_tensor.numel()))  # type: ignore[attr-defined]
        leaf.requires_grad_(needs)


def new_parameter(shard: Tensor, spec: ParamSpec, mesh: DeviceMesh, requires_grad: bool) -> nn.Parameter:
    """An ``nn.Parameter`` holding a DTensor whose local tensor is a view of ``shard``."""
    rank = mesh.get_local_rank()
    local = shard.detach()[: spec.local_numel(rank)].view(spec.local_shape(rank))
    stride, step = [], 1
    for d in reversed(spec.shape):
        stride.insert(0, step)
        step *= max(d, 1)
    placement = Shard(0) if spec.kind == "shard" else Replicate()
    shape = torch.Size(spec.shape)
    d = DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=tuple(stride))
    p = nn.Parameter(d, requires_grad=requires_grad)
    attach(p, shard, spec)
    return p


def adopt(p: Tensor | None) -> bool:
    """Give ``p`` a leaf again if something (``to``, ``load_state_dict(assign=True)``, ``deepcopy``) replaced its local tensor.

    Returns whether anything had to be done. Without it such a parameter would go on being read from its old storage and would
    train nothing, in silence."""
    if not isinstance(p, DTensor) or not hasattr(p, "_fsdp_spec"):
        return False
    local, leaf = p._local_tensor, getattr(p, "_fsdp_shard", None)
    spec = decode(p._fsdp_spec)
    same = leaf is not None and leaf.device == local.device and leaf.dtype == local.dtype
    if same and local.numel() and not local.is_meta:
        same = leaf.data_ptr() == local.data_ptr()
    if same and leaf.requires_grad == p.requires_grad:
        return False
    if local.dtype != spec.dtype:
        spec = _with_dtype(spec, local.dtype)
    if not same:
        with torch.no_grad():
            shard = torch.zeros(spec.shard_numel, dtype=local.dtype, device=local.device)
            shard[: local.numel()].copy_(local.reshape(-1))
            p._local_tensor = shard.detach()[: local.numel()].view(local.shape)
    else:
        assert leaf is not None
        shard = leaf.detach()
    attach(p, shard, spec)  # type: ignore[arg-type]
    return True


def _with_dtype(spec: ParamSpec, dtype: torch.dtype) -> ParamSpec:
    from dataclasses import replace

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


# --- Reading ----------------------------------------------------------------------------------------------------------


def _whole(p: Any) -> Tensor:
    """The whole parameter, differentiable. Traced by Dynamo: keep it to attribute reads and the one operator."""
    w = unshard(p._fsdp_shard, p._fsdp_spec)
    return w if p.requires_grad else w.detach()


def _reader(name: str) -> property:
    def read(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            p = self._parameters[name]
            return p if p is None else _whole(p)
        return _read_eager(self, name)

    return property(read)


def _read_eager(module: nn.Module, name: str) -> Any:
    if name not in module._parameters:
        return nn.Module.__getattr__(module, name)
    p = module._parameters[name]
    if not isinstance(p, DTensor) or not _in_forward(module):
        return p
    adopt(p)
    return _whole(p)


def _in_forward(module: nn.Module) -> bool:
    """Whether a module of the same sharded model is being called, further up on this thread's stack.

    Only ``nn.Module.__call__`` counts: initialisers, ``print`` and user loops that read a parameter get the DTensor."""
    state = state_of(module)
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _CALL_FRAMES or frame.f_code.co_name.startswith("torch_dynamo_resume_in_"):
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and state_of(caller) is state:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_CALL_FRAMES = frozenset({"_call_impl", "_wrapped_call_impl"})


class _Sharded:
    """Mixed into the class of each sharded module: keeps leaves in step with what replaces parameters."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)  # type: ignore[misc]
        _readopt(self)  # type: ignore[arg-type]
        return out

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _readopt(self)  # type: ignore[arg-type]


def _readopt(module: nn.Module) -> None:
    for name, p in module._parameters.items():
        if isinstance(p, DTensor) and not hasattr(p, "_fsdp_spec"):
            raise RuntimeError(
                f"parameter {name!r} of {type(module).__name__} was replaced by another DTensor; change its values in place instead"
            )
        adopt(p)


@functools.cache
def sharded_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """``cls`` with a property for each parameter name. Cached: the properties close over nothing but the names."""
    body: dict[str, Any] = {n: _reader(n) for n in names}
    body["__module__"] = cls.__module__
    body["__qualname__"] = f"FSDP{cls.__qualname__}"
    return type(f"FSDP{cls.__name__}", (_Sharded, cls), body)


def install(module: nn.Module, names: tuple[str, ...], state: FSDPState) -> None:
    """Switch ``module`` to its sharded class."""
    module.__dict__["_fsdp_state"] = state
    if names:
        module.__class__ = sharded_class(type(module), names)
        module.register_load_state_dict_post_hook(_after_load)


def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    _readopt(module)
