"""What held parameters before a model was sharded: optimizers are re-pointed, anything else fails loudly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fsdp_compile.live import instances


def repoint(new_of: Mapping[int, nn.Parameter], shard_state: Callable[[Tensor, nn.Parameter], Tensor]) -> int:
    """In every live optimizer replace old parameters by new ones; returns how many references changed.

    ``new_of``: ``id(old)`` → new. ``shard_state(tensor, new)`` turns a state tensor of the old parameter's shape into its shard."""
    changed = 0
    for obj in instances(torch.optim.Optimizer):
        for group in obj.param_groups:
            for i, p in enumerate(group["params"]):
                new = new_of.get(id(p))
                if new is None:
                    continue
                group["params"][i] = new
                changed += 1
                if p in obj.state:
                    state = obj.state.pop(p)
                    like = {k for k, v in state.items() if isinstance(v, Tensor) and v.dim() and v.shape == new.shape}
                    obj.state[new] = {k: shard_state(v, new) if k in like else v for k, v in state.items()}
    return changed


class ReplacedParameter(nn.Parameter):
    """A parameter from before sharding that somebody still holds: reading its gradient raises, so that clipping or stepping a stale
    list cannot do nothing in silence."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        raise RuntimeError(
            f"parameter {self._fsdp_replaced!r} was replaced when the model was sharded (by fully_shard, or by the first call of the "  # type: ignore[attr-defined]
            "compiled model) and this is the old one: take model.parameters() again, or call fsdp_compile.fully_shard(model) first"
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(f"parameter {self._fsdp_replaced!r} was replaced when the model was sharded")  # type: ignore[attr-defined]


def retire(old: nn.Parameter, fqn: str) -> None:
    """Mark ``old`` as replaced."""
    old._fsdp_replaced = fqn  # type: ignore[attr-defined]
    old.__class__ = ReplacedParameter
