"""The Dynamo backend: ``torch.compile(model, backend="fsdp", options={...})``."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_compile import compat

compat.check_torch_version()

from fsdp_compile.apart import check_step  # noqa: E402
from fsdp_compile.frame import Frame, specs_of  # noqa: E402
from fsdp_compile.logs import anybody_watches, backend_observer, configure, report_break  # noqa: E402
from fsdp_compile.oneliner import plain_parameters, refuse_other_sharding, shard_owner, shard_running  # noqa: E402
from fsdp_compile.options import Options, parse  # noqa: E402
from fsdp_compile.paths import module_paths  # noqa: E402
from fsdp_compile.runtime.early import after_step  # noqa: E402
from fsdp_compile.runtime.grads import release_followed, undelivered  # noqa: E402
from fsdp_compile.spec import decode  # noqa: E402

log = logging.getLogger("fsdp_compile")
_frames = itertools.count()
configure()


def fsdp(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph into a fully sharded one. Options: `fsdp_compile.options.Options`.

    At the first graph of a plain model it shards the model and asks Dynamo to trace again. Raises ValueError for bad options."""
    opts = parse(options)
    if mode not in (None, "default"):
        raise ValueError(f"mode={mode!r}: backend 'fsdp' takes options instead, such as options={{'inductor': {{'max_autotune': True}}}}")
    if compat.inside_ddp():
        raise ValueError(
            "DistributedDataParallel replicates the parameters that backend 'fsdp' shards: compile the model itself, without DDP around it"
        )
    plain = plain_parameters(gm)
    if shard_owner(plain, opts) if plain else shard_running(opts, fsdp):
        compat.restart_dynamo("fsdp_compile sharded the model")
    refuse_other_sharding(gm, opts, set(options or ()) if not isinstance(options, Options) else set())
    frame = Frame(next(_frames), opts, module_paths(specs_of(gm)), cached=opts.dump_graphs is None and not anybody_watches())
    frame.observe = backend_observer(frame.index, opts.dump_graphs)
    compiled = frame.compile(gm, example_inputs)
    gathers = [c.nbytes for done in frame.schedules for c in done.collectives if c.kind == "all_gather"]
    report_break(compat.graph_break_of(gm), frame.index, gathers[0] if gathers else 0)
    return compiled


_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # and how many parameters it had


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    release_followed()
    count = sum(len(g["params"]) for g in optimizer.param_groups)
    if _checked.get(optimizer) == count or len(args) > 1 or kwargs.get("closure") is not None:
        return  # a closure may be what calls the model for the first time
    for p in (p for g in optimizer.param_groups for p in g["params"]):
        if undelivered(p):
            raise RuntimeError(
                f"a gradient of parameter {decode(p._fsdp_spec).fqn!r} has been computed but not delivered to .grad: "
                "backend 'fsdp' does not support compiled autograd (torch._dynamo.config.compiled_autograd)"
            )
    plain = [p for g in optimizer.param_groups for p in g["params"] if type(p) is torch.nn.Parameter]
    moved = [p for p in plain if p.grad is not None and p.grad.any()]  # with zeros torch's `get_state_dict` makes an optimizer's state
    if moved:
        check_step(optimizer, plain, moved, fsdp)
    if moved or not plain:
        _checked[optimizer] = count


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        after_step(optimizer)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
