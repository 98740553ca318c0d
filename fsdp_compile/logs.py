"""Seeing the passes at work: log lines, graphs in the log, graphs in torch's structured trace.

``FSDP_COMPILE_LOGS=passes`` prints a line for each pass (name, time, operators added and removed), ``graphs`` the graph after
each pass as well; ``passes,graphs`` is the same as ``graphs`` alone. torch's own switch works too: ``TORCH_LOGS=fsdp_compile``
(INFO of every logger below it). ``TORCH_TRACE=folder`` puts each stage's graph where ``tlparse`` shows it, as
``fsdp_forward_3_schedule``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from itertools import count

import torch.distributed as dist
from torch import fx

from fsdp_compile import compat
from fsdp_compile.frame import dump_to
from fsdp_compile.text import human_bytes, readable

Observe = Callable[[str, fx.Graph, str], None]

LOGS = ("passes", "graphs")
VARIABLE = "FSDP_COMPILE_LOGS"
log = logging.getLogger("fsdp_compile")
passes_log = logging.getLogger("fsdp_compile.passes")
graphs_log = logging.getLogger("fsdp_compile.graphs")


def configure(setting: str | None = None) -> None:
    """Switch on the logs that ``setting`` (None: the environment's ``FSDP_COMPILE_LOGS``) names, on stderr.

    Raises ValueError, with the valid names, for another one. Logs that are not named stay as the program configured them."""
    wanted = {w for w in (os.environ.get(VARIABLE, "") if setting is None else setting).replace(",", " ").split()}
    for word in sorted(wanted - set(LOGS)):
        raise ValueError(f"{VARIABLE}: unknown log {word!r}; valid: {', '.join(LOGS)}")
    if wanted:
        _enable(passes_log)
    if "graphs" in wanted:
        _enable(graphs_log)


_breaks: set[str] = set()


def report_break(why: str | None, graph: int, first_gather: int) -> None:
    """Say once for each place, on rank 0, that a model runs as several graphs, and what that costs. ``first_gather``: bytes."""
    if why is None or why in _breaks or not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_rank():
        return
    _breaks.add(why)
    log.warning(
        "graph %d ends at a graph break (%s); what follows runs as another graph, the %d. break so far. Each graph gathers its first "
        "bucket (%s here) and reduces its last while nothing computes; fullgraph=True makes a break an error",
        graph, why, len(_breaks), human_bytes(first_gather),
    )


def _enable(log: logging.Logger) -> None:
    log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        log.addHandler(handler)


def anybody_watches() -> bool:
    """Whether someone wants to see the passes at work, and not only their result from a cache."""
    return passes_log.isEnabledFor(logging.INFO) or graphs_log.isEnabledFor(logging.INFO) or "TORCH_TRACE" in os.environ


def backend_observer(frame: int, dump_graphs: str | None) -> Observe:
    """What the backend shows each stage to: the structured trace, the log, the dump folder. Builds no text that nobody wants."""
    numbers: dict[str, count[int]] = {}
    dump = dump_to(dump_graphs, frame) if dump_graphs else None

    def observe(stage: str, graph: fx.Graph, direction: str) -> None:
        n = next(numbers.setdefault(direction, count()))
        compat.trace_artifact(f"fsdp_{direction}_{n}_{stage}", lambda: readable(graph))
        if graphs_log.isEnabledFor(logging.INFO):
            graphs_log.info("frame %d %s graph, %d %s:\n%s", frame, direction, n, stage, readable(graph))
        if dump is not None:
            dump(stage, graph, direction)

    return observe
