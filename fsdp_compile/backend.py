"""The Dynamo backend: ``torch.compile(model, backend="fsdp", options={...})``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fsdp_compile import compat

compat.check_torch_version()

from fsdp_compile.frame import Frame, specs_of  # noqa: E402
from fsdp_compile.logs import backend_observer, configure  # noqa: E402
from fsdp_compile.oneliner import plain_parameters, refuse_empty, shard_owner  # noqa: E402
from fsdp_compile.options import parse  # noqa: E402
from fsdp_compile.paths import module_paths  # noqa: E402

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
    plain = plain_parameters(gm)
    if plain and shard_owner(plain, opts):
        compat.restart_dynamo("fsdp_compile sharded the model")
    if not plain:
        refuse_empty()
    frame = Frame(next(_frames), opts, module_paths(specs_of(gm)))
    frame.observe = backend_observer(frame.index, opts.dump_graphs)
    return frame.compile(gm, example_inputs)
