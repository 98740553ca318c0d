"""Which modules stand around a parameter: module-based bucketing needs class names, which graphs do not carry."""

from __future__ import annotations

import gc

from torch import nn

from fsdp_compile.runtime.sharding import state_of
from fsdp_compile.spec import ParamSpec


def module_paths(specs: list[ParamSpec]) -> dict[str, tuple[str, ...]]:
    """Parameter FQN → ``"fqn:ClassName"`` of its modules, outermost first: all parameters of the sharded models alive that hold one of
    these FQNs."""
    wanted = {s.fqn for s in specs}
    out: dict[str, tuple[str, ...]] = {}
    seen: set[int] = set()
    for obj in gc.get_objects():
        if issubclass(type(obj), nn.Module) and (state := state_of(obj)) is not None and id(state) not in seen:
            seen.add(id(state))
            if wanted & state.module_classes.keys():
                out.update(state.module_classes)
    return out
