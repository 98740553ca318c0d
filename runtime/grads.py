"""Gradients: from the leaf that a graph differentiates to the DTensor that the user sees on ``p.grad``.

The leaf is a one-dimensional padded shard; autograd accumulates the reduced gradient there. When the backward ends, however it ends, what
has arrived at leaves is moved to ``p.grad`` as a DTensor, or added to what is there::

    backward graph, or eager `unshard`'s backward   ─► expect()   queues, once for each backward, `deliver` for its end
    any leaf                                        ─► deliver()  moves its gradient: half the time of a hook on each leaf
    leaf of a p with post-accumulate hooks          ─► its hook   moves it at once and calls them, once, with the reduced shard
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import compat

from .accumulation import reduced


class Move:
    """Moves gradients from the leaf of ``p``, whose first ``local_numel`` elements are this rank's part."""

    __slots__ = ("as_it_is", "hooked", "leaf", "local_numel", "local_shape", "owner", "spec")

    def __init__(self, p: nn.Parameter, leaf: nn.Parameter) -> None:
        local = p._local_tensor  # type: ignore[attr-defined]
        self.leaf, self.owner = weakref.ref(leaf, _forget), weakref.ref(p)
        self.local_shape, self.local_numel = local.shape, local.numel()
        self.as_it_is = local.shape == leaf.shape
        like = p._spec  # type: ignore[attr-defined]
        self.spec = like if like.tensor_meta.dtype == leaf.dtype else None  # of a gradient's DTensor, if `p` still has it by then
        self.hooked = False
        _moves[self.leaf] = self

    def __call__(self, leaf: Tensor) -> None:
        """Move what is on ``leaf.grad``; a post-accumulate hook of the leaf's, too."""
        g, owner = leaf.grad, self.owner()
        if g is None:  # the hook also fires when a graph gave no gradient
            return
        leaf.grad = None
        if owner is None:
            return
        if "_fsdp_pending" in owner.__dict__:
            reduced(owner)
        if not owner.requires_grad:
            # Frozen since the graph was compiled: drop this gradient, and let the next read go through the parameter itself.
            for module in owner._fsdp_owners:  # type: ignore[attr-defined]
                module._fsdp_leaves.update({n: None for n, q in module._parameters.items() if q is owner})
            return
        if self.hooked or owner.grad is not None or owner._backward_hooks:  # type: ignore[attr-defined]
            accumulate(owner, self.part(g))
        else:
            owner.grad = compat.dtensor_like(self.part(g), owner)

    def part(self, g: Tensor) -> Tensor:
        """This rank's part of ``g``, without the padding, in the parameter's shape."""
        return g if self.as_it_is else (g if g.numel() == self.local_numel else g[: self.local_numel]).view(self.local_shape)


_moves: dict[weakref.ref[nn.Parameter], Move] = {}
_expected: set[int] = set()  # backwards that `deliver` is queued for


def _forget(leaf: weakref.ref[nn.Parameter]) -> None:
    _moves.pop(leaf, None)


class _End:
    """Queued on a backward: called at its end, or dropped when it fails."""

    def __init__(self, backward: int) -> None:
        self.backward = backward
        _expected.add(backward)

    def __call__(self) -> None:
        if self.backward in _expected:
            _expected.discard(self.backward)
            deliver()

    __del__ = __call__


def expect() -> None:
    """In a backward: gradients are about to arrive at leaves."""
    backward = compat.backward_id()
    if backward in _expected:
        return
    with compat.plain_attributes():
        for move in list(_moves.values()):
            owner = move.owner()
            if owner is not None and owner._post_accumulate_grad_hooks and not move.hooked:  # type: ignore[attr-defined]
                leaf = move.leaf()
                if leaf is not None:
                    move.hooked = True
                    leaf.register_post_accumulate_grad_hook(move)
    compat.at_end_of_backward(_End(backward))


def deliver() -> None:
    """Move every gradient that has arrived: first, in one go, those that only need a DTensor made of them; then, outside of
    `plain_attributes`, those that may call the user's hooks."""
    rest, make = [], compat.dtensor_of
    with compat.plain_attributes():
        for move in list(_moves.values()):
            leaf = move.leaf()
            if leaf is None or (g := leaf.grad) is None:
                continue
            p: Any = move.owner()
            plain = p is not None and not move.hooked and p._spec is move.spec and p.requires_grad
            if not plain or p.grad is not None or p._backward_hooks or "_fsdp_pending" in p.__dict__:
                rest.append((move, leaf))
                continue
            leaf.grad = None
            p.grad = make(g if move.as_it_is else move.part(g), move.spec)
    for move, leaf in rest:
        move(leaf)


def undelivered(p: Tensor) -> bool:
    """Whether a gradient of ``p`` has arrived that no backward will deliver any more."""
    leaf = p.__dict__.get("_fsdp_shard")
    return leaf is not None and leaf.grad is not None


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


@torch.no_grad()
def reduce_into(p: Any, grad: Tensor) -> None:
    """Reduce a whole gradient of ``p`` at once and `accumulate` this rank's part."""
    local = p._local_tensor
    part = torch.ops.fsdp_compile.reduce_grad(grad, p._fsdp_spec)
    accumulate(p, part[: local.numel()].view(local.shape))


def follow(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let gradients that still arrive at ``old``, which ``new`` has replaced in the middle of a forward, go to ``new``, reduced."""
    ref = weakref.ref(new)

    def hook(p: Tensor) -> None:
        grad = Tensor.grad.__get__(p)  # type: ignore[union-attr]  # not `p.grad`: a replaced parameter refuses that
        Tensor.grad.__set__(p, None)  # type: ignore[union-attr]
        owner = ref()
        if grad is not None and owner is not None and owner.requires_grad:
            reduce_into(owner, grad)

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
