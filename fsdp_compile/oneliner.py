"""The one-liner: a plain model compiled with ``backend="fsdp"`` shards itself at its first call."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fsdp_compile import compat
from fsdp_compile.api import policy_of, shard
from fsdp_compile.live import instances
from fsdp_compile.options import Options
from fsdp_compile.runtime.sharding import is_shard, state_behind, state_of

log = logging.getLogger("fsdp_compile")
by_function: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()  # classes of plain models that compiled functions have sharded


def plain_parameters(gm: fx.GraphModule) -> list[nn.Parameter]:
    """Parameters that a Dynamo graph takes as inputs and that no `fully_shard` has touched."""
    return [v for v in compat.placeholder_values(gm).values() if isinstance(v, nn.Parameter) and not is_shard(v)]


def shard_running(options: Options, backend: Callable[..., Any]) -> bool:
    """Shard the compiled model whose code Dynamo is converting, if it is plain still, although this graph reads none of its parameters
    (code that Dynamo leaves out may). Returns whether it did.

    Raises ValueError if that model has no parameters at all."""
    local = [m for m in compat.frame_modules() if state_of(m) is None]
    if not local:
        return False
    with torch.no_grad(), compat.outside_fake_mode():
        ignored = {id(p) for p in options.ignored_params or ()}
        for root in compat.compiled_modules(backend):
            inside = {id(m) for m in root.modules()}
            if all(id(m) not in inside for m in local) or any(state_of(m) is not None for m in root.modules()):
                continue
            params = [p for p in root.parameters() if id(p) not in ignored]
            if not any(True for _ in root.parameters()):
                raise ValueError(f"{type(root).__name__} has no parameters: there is nothing to shard; compile it with another backend")
            if params:
                _refuse_late_casts(options)
                shard(root, in_flight=True, **options.shard_args())
                return True
    return False


def _refuse_late_casts(options: Options) -> None:
    """Raise ValueError if the policy casts inputs or outputs of the call that is running: it began before the casts existed, so that
    its first result would have another dtype than all later ones."""
    policy = policy_of(options.mp_policy)
    casts = policy.param_dtype is not None and policy.cast_forward_inputs and compat.frame_has_float_inputs()
    if casts or policy.output_dtype is not None:
        raise ValueError(
            "option mp_policy casts inputs or outputs, and the first call of this model has begun without: call "
            "fsdp_compile.fully_shard(model, mp_policy=...) before torch.compile(model, backend='fsdp')"
        )


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
            _refuse_late_casts(options)
            if all(root is not m for m in compat.compiled_modules()):
                by_function.add(type(root))
            shard(root, in_flight=True, **options.shard_args())
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
            candidates = [m for m in instances(nn.Module) if not compat.is_optimized(m)]
        owning = [m for m in candidates if left & {id(p) for p in m.parameters()}]
        inner = {id(c) for m in owning for c in m.modules() if c is not m}
        for m in owning:
            if id(m) not in inner and all(m is not c for c in chosen):
                mine = {id(p) for p in m.parameters()}
                if mine & left:
                    chosen.append(m)
                    left -= mine
    return chosen


def refuse_other_sharding(gm: fx.GraphModule, options: Options, asked: set[str]) -> None:
    """Raise ValueError if ``options`` (those ``asked`` for by name) want another sharding than the one that the graph's model has."""
    asked = asked & {"mesh", "mp_policy", "reshard_after_forward", "ignored_params", "reduce_op"}
    for leaf in compat.placeholder_values(gm).values() if asked else ():
        state = state_behind([leaf])
        if state is None:
            continue
        for name in sorted(asked):
            value = wanted = getattr(options, name)
            if value is None:
                continue
            if name == "mp_policy":
                value = policy_of(value)
            elif name == "ignored_params":
                value = frozenset(id(p) for p in value)
            if value != state.given[name]:
                raise ValueError(
                    f"option {name}={wanted!r}, but the model is sharded already, with {name}={state.given[name]!r}: give it to "
                    "fully_shard instead, or leave it out here"
                )
        return
