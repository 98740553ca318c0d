"""The one-liner: a plain model compiled with ``backend="fsdp"`` shards itself at its first call."""

from __future__ import annotations

import gc
import logging

import torch
from torch import fx, nn

from fsdp_compile import compat
from fsdp_compile.api import fully_shard
from fsdp_compile.options import Options
from fsdp_compile.runtime.sharding import is_shard, state_of

log = logging.getLogger("fsdp_compile")


def plain_parameters(gm: fx.GraphModule) -> list[nn.Parameter]:
    """Parameters that a Dynamo graph takes as inputs and that no `fully_shard` has touched."""
    return [v for v in compat.placeholder_values(gm).values() if isinstance(v, nn.Parameter) and not is_shard(v)]


def refuse_empty() -> None:
    """Raise ValueError if Dynamo is converting the forward of a compiled module that has no parameters."""
    module = compat.frame_module()
    if module is not None and next(module.parameters(), None) is None and any(m is module for m in compat.compiled_modules()):
        raise ValueError(f"{type(module).__name__} has no parameters: there is nothing to shard; compile it with another backend")


def shard_owner(params: list[nn.Parameter], options: Options) -> bool:
    """Shard the model that owns ``params`` in place. Returns False if they are parameters that a sharded model ignores on purpose.

    Raises RuntimeError if no live module owns them."""
    with torch.no_grad(), compat.outside_fake_mode():
        wanted = {id(p) for p in params}
        ignored = {id(p) for p in options.ignored_params or ()}
        roots = _roots(wanted - ignored)
        if not roots:
            return False
        done = False
        for root in roots:
            states = [s for m in root.modules() if (s := state_of(m)) is not None]
            if states:
                _refuse_added(root, wanted - ignored - {i for s in states for i in s.ignored})
                continue
            fully_shard(root, **options.shard_args())
            done = True
        return done


def _refuse_added(root: nn.Module, wanted: set[int]) -> None:
    """Parameters that came into a sharded model afterwards would train on each rank alone: refuse them, by name."""
    added = [n for n, p in root.named_parameters() if id(p) in wanted]
    if added:
        raise RuntimeError(
            f"parameter {added[0]!r} of {type(root).__name__} is not sharded although the rest of the model is ({len(added)} such "
            "parameters): it was added after sharding. Build the whole model before its first call, or name it in ignored_params"
        )


def _roots(wanted: set[int]) -> list[nn.Module]:
    """Topmost modules that own the wanted parameters: compiled ones if there are any, else any that nobody else contains."""
    chosen: list[nn.Module] = []
    left = set(wanted)
    for candidates in (list(compat.compiled_modules()), None):
        if not left:
            break
        if candidates is None:
            candidates = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and not compat.is_optimized(m)]
        owning = [m for m in candidates if left & {id(p) for p in m.parameters()}]
        inner = {id(c) for m in owning for c in m.modules() if c is not m}
        for m in owning:
            if id(m) not in inner and all(m is not c for c in chosen):
                mine = {id(p) for p in m.parameters()}
                if mine & left:
                    chosen.append(m)
                    left -= mine
    return chosen
