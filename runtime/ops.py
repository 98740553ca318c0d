"""The operators that mark a sharded parameter in a graph: schema, fake kernel, eager kernel and autograd rule, side by side. Importing
this registers the others', too: those that passes put into graphs (`early`, `local`, `wire`).

    unshard(Tensor shard, str spec) -> Tensor         [shard_numel] → spec.shape, in spec.compute_dtype
    reduce_grad(Tensor grad, str spec) -> Tensor      spec.shape → [shard_numel], in spec.dtype
    collect(Tensor w, Tensor into) -> Tensor          w; its gradient accumulates on the leaf `into`, whole and unreduced
    held(Tensor whole, str spec) -> Tensor            whole, once it has arrived: gathered before the graph, by `hold`
    with_pending(Tensor w, Tensor grad, Tensor ticket) -> Tensor      w; adds `grad`, collected earlier, to its gradient
    add_pending(Tensor grad, Tensor earlier, Tensor ticket) -> Tensor grad + earlier, for the first of a backward to ask (`claim`)

In a compiled graph both are only markers: the passes replace them by scheduled collectives. The eager kernels below serve code that
Dynamo leaves out (after a graph break, in a disabled helper); they communicate at once and wait.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.spec import ParamSpec, decode

from . import early as _early  # noqa: F401  # its operator, as of the next three
from . import local as _local  # noqa: F401
from . import rows as _rows  # noqa: F401
from . import wire as _wire  # noqa: F401
from .accumulation import claim
from .grads import expect
from .order import same_on_all_ranks

TIMEOUT_S = 600.0  # for the other ranks, in code that runs outside graphs; option timeout_s is for graphs

_LIB = torch.library.Library("fsdp_compile", "DEF")
_LIB.define("unshard(Tensor shard, str spec) -> Tensor")
_LIB.define("reduce_grad(Tensor grad, str spec) -> Tensor")
_LIB.define("collect(Tensor w, Tensor into) -> Tensor")
_LIB.define("held(Tensor whole, str spec) -> Tensor")
_LIB.define("with_pending(Tensor w, Tensor grad, Tensor ticket) -> Tensor")
_LIB.define("add_pending(Tensor grad, Tensor earlier, Tensor ticket) -> Tensor")
# Ends the life of a gathered buffer in a graph; exists only between the passes (lowering turns it into liveness).
_LIB.define("free(Tensor buffer) -> ()")


def shard_to_wire(shard: Tensor, spec: ParamSpec) -> Tensor:
    """The tensor that is sent for a shard: cast to the compute dtype, complex numbers as pairs."""
    x = shard.to(spec.compute_dtype)
    return torch.view_as_real(x).flatten() if spec.compute_dtype.is_complex else x


def wire_to_param(full: Tensor, spec: ParamSpec) -> Tensor:
    """Gathered ``[padded_numel * wire_factor]`` → the logical parameter (a view)."""
    if spec.compute_dtype.is_complex:
        full = torch.view_as_complex(full.view(-1, 2))
    return full[: spec.numel].view(spec.shape)


def grad_to_wire(grad: Tensor, spec: ParamSpec) -> Tensor:
    """A whole gradient → the input of the reduce-scatter, ``[padded_numel * wire_factor]`` in ``reduce_dtype``."""
    if spec.compute_dtype.is_complex:
        grad = torch.view_as_real(grad.to(spec.dtype).resolve_conj().contiguous())
    flat = grad.to(spec.reduce_dtype).reshape(-1)
    if spec.kind == "replicate":
        return flat.repeat(spec.world)
    return torch.nn.functional.pad(flat, (0, spec.padded_numel * spec.wire_factor - flat.numel()))


def wire_to_grad(part: Tensor, spec: ParamSpec) -> Tensor:
    """This rank's reduced part → its shard of the gradient in the parameter's dtype."""
    if spec.compute_dtype.is_complex:
        return torch.view_as_complex(part.view(-1, 2)).to(spec.dtype)
    return part.to(spec.dtype)


def check_world(spec: ParamSpec) -> None:
    """Raise RuntimeError unless the spec's process group is alive and has the size that the parameter was sharded over."""
    try:
        size = dist.distributed_c10d._resolve_process_group(spec.group).size()  # type: ignore[arg-type]
    except (ValueError, RuntimeError, KeyError) as e:
        raise RuntimeError(
            f"parameter {spec.fqn!r} was sharded over {spec.world} ranks, in process group {spec.group!r}, which no longer exists; "
            "build the model anew, shard it after the new init_process_group and load a checkpoint"
        ) from e
    if size != spec.world:
        raise RuntimeError(
            f"parameter {spec.fqn!r} was sharded over {spec.world} ranks but group {spec.group!r} now has {size}; "
            "load a checkpoint into a freshly sharded model instead"
        )


def _compare(kind: str, spec: ParamSpec) -> None:
    """Before a collective of code that Dynamo left out: do all ranks come to the same one?"""
    check_world(spec)
    group = dist.distributed_c10d._resolve_process_group(spec.group)  # type: ignore[arg-type]
    same_on_all_ranks(group, f"eager {kind} of {spec.fqn}", (f"{kind} of {spec.fqn} {spec.encode()}",), TIMEOUT_S)


def _unshard_eager(shard: Tensor, text: str) -> Tensor:
    spec = decode(text)
    wire = shard_to_wire(shard, spec)
    if spec.world == 1 or not wire.numel():
        return wire_to_param(wire, spec).clone()
    _compare("gather", spec)
    out = torch.ops._c10d_functional.all_gather_into_tensor(wire.contiguous(), spec.world, spec.group)
    return wire_to_param(torch.ops._c10d_functional.wait_tensor(out), spec)


def _reduce_grad_eager(grad: Tensor, text: str) -> Tensor:
    spec = decode(text)
    wire = grad_to_wire(grad, spec)
    if spec.world > 1 and wire.numel():
        _compare("reduction", spec)
        out = torch.ops._c10d_functional.reduce_scatter_tensor(wire, spec.reduce_op, spec.world, spec.group)
        wire = torch.ops._c10d_functional.wait_tensor(out)
    part = wire_to_grad(wire, spec)
    return part.clone() if part.data_ptr() == grad.data_ptr() else part


def _unshard_fake(shard: Tensor, text: str) -> Tensor:
    spec = decode(text)
    return shard.new_empty(spec.shape, dtype=spec.compute_dtype)


def _reduce_grad_fake(grad: Tensor, text: str) -> Tensor:
    spec = decode(text)
    return grad.new_empty((spec.shard_numel,), dtype=spec.dtype)


def _unshard_setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.spec = inputs[1]


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    if not torch.compiler.is_compiling():
        expect()
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"parameter {decode(ctx.spec).fqn!r} has a sparse gradient ({grad.layout}), which cannot be reduced into "
            "shards: build its embedding with sparse=False"
        )
    return torch.ops.fsdp_compile.reduce_grad(grad, ctx.spec), None


def _no_double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    raise RuntimeError(
        f"the gradient of sharded parameter {decode(ctx.spec).fqn!r} was differentiated again (create_graph=True): "
        "double backward through sharded parameters is not supported"
    )


def _identity(w: Tensor, *others: Any) -> Tensor:
    return w.clone()  # an operator must not return its input; in compiled graphs all are taken out (`markers.erase_identities`)


def _identity_fake(w: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(w)


def _held(whole: Tensor, spec: str) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(whole).clone()


def _collect_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.dtype = inputs[1].dtype


def _collect_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    return None, grad.to(ctx.dtype)


def _pending_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _pending_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.fsdp_compile.add_pending(grad, *ctx.saved_tensors), None, None


def _add_pending(grad: Tensor, earlier: Tensor, ticket: Tensor) -> Tensor:
    if claim(*ticket.tolist()):
        return grad.to(earlier.dtype) + earlier
    return grad.to(earlier.dtype, copy=True)


for _name, _fn, _fake in (
    ("collect", _identity, _identity_fake),
    ("with_pending", _identity, _identity_fake),
    ("held", _held, _identity_fake),
    ("add_pending", _add_pending, lambda grad, earlier, ticket: torch.empty_like(grad, dtype=earlier.dtype)),
    ("unshard", _unshard_eager, _unshard_fake),
    ("reduce_grad", _reduce_grad_eager, _reduce_grad_fake),
):
    _LIB.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_compile::{_name}", _fake, lib=_LIB)
_LIB.impl("free", lambda buffer: None, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_compile::free", lambda buffer: None, lib=_LIB)
torch.library.register_autograd("fsdp_compile::unshard", _unshard_backward, setup_context=_unshard_setup, lib=_LIB)
torch.library.register_autograd("fsdp_compile::reduce_grad", _no_double_backward, setup_context=_unshard_setup, lib=_LIB)
torch.library.register_autograd("fsdp_compile::collect", _collect_backward, setup_context=_collect_setup, lib=_LIB)
torch.library.register_autograd("fsdp_compile::with_pending", _pending_backward, setup_context=_pending_setup, lib=_LIB)

unshard = torch.ops.fsdp_compile.unshard.default
reduce_grad = torch.ops.fsdp_compile.reduce_grad.default
collect = torch.ops.fsdp_compile.collect.default
held = torch.ops.fsdp_compile.held.default
with_pending = torch.ops.fsdp_compile.with_pending.default
