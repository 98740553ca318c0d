"""Gradients: from the leaf that a graph differentiates to the DTensor that the user sees on ``p.grad``.

The leaf is a one-dimensional padded shard; autograd accumulates the reduced gradient there. A post-accumulate hook moves it to
``p.grad`` as a DTensor, adds to what is there, and calls the user's own hooks on ``p``, once, with the reduced shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import compat

from .accumulation import reduced


def move_grad_hook(p: nn.Parameter, local_numel: int) -> Callable[[Tensor], None]:
    """The hook for the leaf of ``p``, whose first ``local_numel`` elements are this rank's part."""
    ref = weakref.ref(p)
    local_shape = p._local_tensor.shape  # type: ignore[attr-defined]
    like = compat.dtensor_like

    def hook(leaf: Tensor) -> None:
        g, owner = leaf.grad, ref()
        leaf.grad = None
        if g is None or owner is None:  # the hook also fires when a graph gave no gradient
            return
        if "_fsdp_pending" in owner.__dict__:
            reduced(owner)
        if not owner.requires_grad:
            # Frozen since the graph was compiled: drop this gradient, and let the next read go through the parameter itself.
            for module in owner._fsdp_owners:  # type: ignore[attr-defined]
                module._fsdp_leaves.update({n: None for n, q in module._parameters.items() if q is owner})
            return
        if g.shape != local_shape:
            g = (g if g.numel() == local_numel else g[:local_numel]).view(local_shape)
        if owner.grad is None and not owner._backward_hooks and not owner._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            owner.grad = like(g, owner)  # the hot path
        else:
            accumulate(owner, g)

    return hook


@torch.no_grad()
def accumulate(p: nn.Parameter, local_grad: Tensor) -> None:
    """Add this rank's part of the reduced gradient to ``p.grad`` and run the user's hooks on ``p``."""
    grad: Tensor = compat.dtensor_like(local_grad, p)
    for fn in tuple((p._backward_hooks or {}).values()):
        out = fn(grad)
        if out is not None:
            grad = out
    if p.grad is None:
        p.grad = grad
    elif isinstance(p.grad, DTensor) and isinstance(grad, DTensor):
        p.grad._local_tensor.add_(grad._local_tensor)
    else:
        p.grad.add_(grad)
    for fn in tuple((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()):
        fn(p)


def follow(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let gradients that still arrive at ``old``, which ``new`` has replaced in the middle of a forward, go to ``new``, reduced."""
    ref = weakref.ref(new)

    def hook(p: Tensor) -> None:
        grad = Tensor.grad.__get__(p)  # type: ignore[union-attr]  # not `p.grad`: a replaced parameter refuses that
        Tensor.grad.__set__(p, None)  # type: ignore[union-attr]
        owner = ref()
        if grad is not None and owner is not None and owner.requires_grad:
            local = owner._local_tensor  # type: ignore[attr-defined]
            part = torch.ops.fsdp_compile.reduce_grad(grad, owner._fsdp_spec)  # type: ignore[attr-defined]
            accumulate(owner, part[: local.numel()].view(local.shape))

    old.register_post_accumulate_grad_hook(hook)
    _followed.append(weakref.ref(old))


_followed: list[weakref.ref[nn.Parameter]] = []  # replaced in the middle of a forward: a graph may still need their values


def release_followed() -> None:
    """Take the memory of parameters that were replaced in the middle of a forward, whoever still holds them. For the first optimizer
    step after it: whatever backward needed of them is over."""
    for ref in _followed:
        if (old := ref()) is not None:
            old.data = old.data.new_empty(0)
    _followed.clear()
