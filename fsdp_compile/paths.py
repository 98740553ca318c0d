"""Which modules stand around a parameter: module-based bucketing needs class names, which graphs do not carry."""

from __future__ import annotations

from fsdp_compile.runtime.sharding import states
from fsdp_compile.spec import ParamSpec


def module_paths(specs: list[ParamSpec]) -> dict[str, tuple[str, ...]]:
    """Parameter FQN → ``"fqn:ClassName"`` of its modules, outermost first: all parameters of the sharded models alive that hold one of
    these FQNs."""
    wanted = {s.fqn for s in specs}
    out: dict[str, tuple[str, ...]] = {}
    for state in states():
        if wanted & state.module_classes.keys():
            out.update(state.module_classes)
    return out
