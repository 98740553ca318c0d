"""Re-point optimizers that were built before a model was sharded: parameter groups and state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def repoint(new_of: Mapping[int, nn.Parameter], shard_state: Callable[[Tensor, nn.Parameter], Tensor]) -> int:
    """In every live optimizer replace old parameters by new ones; returns how many references changed.

    ``new_of``: ``id(old)`` → new. ``shard_state(tensor, new)`` turns a state tensor of the old parameter's shape into its shard."""
    changed = 0
    for obj in gc.get_objects():
        if not issubclass(type(obj), torch.optim.Optimizer):
            continue
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
