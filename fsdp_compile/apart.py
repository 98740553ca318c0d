"""Plain parameters that an optimizer is about to update on each rank alone: refused at its first step, or said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import compat
from fsdp_compile.live import instances
from fsdp_compile.oneliner import by_function
from fsdp_compile.runtime.sharding import state_of, states

log = logging.getLogger("fsdp_compile")


def check_step(
    optimizer: torch.optim.Optimizer, plain: Iterable[nn.Parameter], moved: Iterable[nn.Parameter], backend: Callable[..., Any]
) -> None:
    """Look at an optimizer's ``plain`` parameters, of which ``moved`` have gradients. Each rank would train a copy of its own, in silence:

    * of a model that was compiled with ``backend`` but never sharded, because Dynamo found nothing in it to trace or compiles no more:
      RuntimeError, naming a parameter;
    * of what lies beside the sharded parts of a model, such as the embedding where only blocks were compiled: RuntimeError, naming a
      parameter, unless it is among ``ignored_params`` or in DistributedDataParallel's hands;
    * of a model that is like others which a compiled function has sharded, or of anything else in one optimizer with sharded parameters
      (a loss): that may be meant, and is said in a warning."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _refuse_unsharded({id(p) for p in plain}, backend)
    left = {id(p) for p in moved}
    left -= {i for s in states() for i in s.ignored}
    if not left or not (by_function or any(s.mesh.size() > 1 for s in states())):
        return
    modules = [m for m in instances(nn.Module) if not compat.is_optimized(m)]
    left -= {id(p) for m in modules if isinstance(m, DistributedDataParallel) for p in m.parameters()}
    inner = {id(c) for m in modules for c in m.children()}
    found = [(m, [n for n, p in m.named_parameters() if id(p) in left]) for m in modules if id(m) not in inner]
    said = not any(hasattr(p, "_fsdp_spec") for g in optimizer.param_groups for p in g["params"])
    for root, names in found:
        if names:
            _refuse_beside(root, names)
            said = _warn_of_class(root, names) or said
    if left and not said:
        first = next((names[0] for _, names in found if names), "(of no module)")
        log.warning(
            "this optimizer updates %d plain parameters, such as %r, on each rank alone, beside sharded ones: average their gradients "
            "(DistributedDataParallel, or fully_shard for their module), or name them in ignored_params if you do so already",
            len(left),
            first,
        )


def _refuse_unsharded(plain: set[int], backend: Callable[..., Any]) -> None:
    for root in compat.compiled_modules(backend):
        if any(state_of(m) is not None for m in root.modules()):
            continue
        for name, p in root.named_parameters():
            if id(p) in plain:
                raise RuntimeError(
                    f"{type(root).__name__} was compiled with backend='fsdp' but is not sharded: Dynamo found nothing to trace in it, or "
                    "gave up at config.recompile_limit (it has warned then: each model of a class takes one compilation), or it was not "
                    f"called; and this step would update {name!r} on each rank alone. Call fsdp_compile.fully_shard(model) first, which "
                    "needs no trace, and lets models of a class share their compiled code (or torch.compile(..., isolate_recompiles=True))"
                )


def _refuse_beside(root: nn.Module, names: list[str]) -> None:
    sharded = next((n for n, m in root.named_modules() if (s := state_of(m)) is not None and s.mesh.size() > 1), None)
    if sharded is not None:
        raise RuntimeError(
            f"parameter {names[0]!r} of {type(root).__name__} is not sharded although {sharded or 'the rest'!r} is ({len(names)} such "
            "parameters): this step would update it on each rank alone. Call fsdp_compile.fully_shard on the whole model before any part "
            "of it is compiled, or compile the whole; or, if you reduce its gradient yourself, name it in ignored_params"
        )


def _warn_of_class(root: nn.Module, names: list[str]) -> bool:
    if type(root) in by_function:
        log.warning(
            "this step updates parameter %r of a %s on each rank alone. Other models of this class have been sharded by a compiled "
            "function; if this one was to be, too, Dynamo has given up compiling for more of them (config.recompile_limit; it has "
            "warned then): call fsdp_compile.fully_shard(model) first, or torch.compile(..., isolate_recompiles=True)",
            names[0],
            type(root).__name__,
        )
    return type(root) in by_function
