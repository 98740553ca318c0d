"""How a report is drawn: a summary, a table of buckets, and a timeline of each graph. Characters only."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_compile.text import human_bytes

if TYPE_CHECKING:
    from fsdp_compile.report import BucketRow, GraphReport, Report

WIDTH = 72  # columns of a timeline
MOST_ROWS = 48  # of a table or a timeline; the middle of longer ones is left out

RULE = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
LEGEND = "> all_gather in flight   # gathered and in use   < reduction in flight"


def view(report: Report) -> Group:
    """The whole report as rich renderables."""
    parts: list[RenderableType] = [Text(summary(report)), bucket_table(report)]
    drawn = [g for g in report.graphs if g.buckets]
    parts += [Text(timeline(g, len(report.calls) > 1) + "\n") for g in drawn]
    if drawn:
        parts.append(Text(LEGEND))
    return Group(*parts)


def summary(report: Report) -> str:
    """The figures, one on a line."""
    counts: Counter[str] = Counter()
    for b in report.buckets:
        counts[b.kind] += report.calls[b.frame]
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    lines = {
        "parameters": f"{report.parameters:,}, {human_bytes(report.parameter_bytes)}; "
        f"{human_bytes(report.shard_bytes)} on each of {report.world_size} ranks",
        "collectives": f"{report.collectives_per_step} in a step" + (f": {kinds}" if kinds else ""),
        "traffic": f"{human_bytes(report.bytes_per_step)} sent by each rank in a step",
        "peak gathered": human_bytes(report.peak_gathered_bytes),
    }
    if report.exchanged:
        lines["rows"] = f"of {_names(tuple(sorted(report.exchanged)))}: exchanged as the batch names them, not counted above"
    if len(report.calls) > 1:
        lines["frames"] = f"{len(report.calls)}, called {', '.join(map(str, report.calls))} times"
    return "\n".join([report.model, *(f"  {k:<14} {v}" for k, v in lines.items())])


def bucket_table(report: Report) -> Table:
    """One row for each collective."""
    several = len(report.calls) > 1
    table = Table(box=RULE, pad_edge=False)
    for name in (["frame"] if several else []) + ["graph", "collective", "bucket"]:
        table.add_column(name)
    for name in ("bytes", "launch", "wait", "lead"):
        table.add_column(name, justify="right")
    table.add_column("dtype")
    table.add_column("parameters", ratio=1)
    rows = report.buckets
    for row in _ends(rows):
        if row is None:
            table.add_row(*([".."] * len(table.columns)))
            continue
        place = [str(row.frame)] if several else []
        numbers = [human_bytes(row.bytes), str(row.launch), str(row.wait), str(row.lead)]
        table.add_row(*place, row.direction, row.kind, row.bucket, *numbers, row.dtype, _names(row.parameters))
    return table


def timeline(graph: GraphReport, name_frame: bool = False) -> str:
    """Which buckets are in flight or alive at which position, left to right in the order of execution::

        forward: 14 operations, peak gathered 3.2 KiB
          ag1 >>>>######
          ag2 >>>>>>>>>>####
    """
    where = f"frame {graph.frame} " if name_frame else ""
    head = f"{where}{graph.direction}: {graph.last - graph.first} operations, peak gathered {human_bytes(graph.peak_gathered_bytes)}"
    label = max((len(r.bucket) for r in graph.buckets), default=0)
    lines = [head]
    for row in _ends(list(graph.buckets)):
        lines.append("  .." if row is None else f"  {row.bucket:<{label}} |{_bar(row, graph)}|")
    return "\n".join(lines)


def _bar(row: BucketRow, graph: GraphReport) -> str:
    span = max(1, graph.last - graph.first)
    width = min(WIDTH, span)

    def column(position: int) -> int:
        return min(width - 1, (position - graph.first) * width // span)

    cells = [" "] * width
    gather = row.kind == "all_gather"
    for i in range(column(row.launch), column(row.wait) + 1):
        cells[i] = ">" if gather else "<"
    if gather and row.free is not None:
        for i in range(max(column(row.wait), column(row.launch) + 1), column(row.free) + 1):
            cells[i] = "#"
    return "".join(cells)


def _ends(rows: list[BucketRow]) -> list[BucketRow | None]:
    """All rows, or the first and the last of them with None between."""
    if len(rows) <= MOST_ROWS:
        return [*rows]
    return [*rows[: MOST_ROWS // 2], None, *rows[len(rows) - MOST_ROWS // 2 :]]


def _names(params: tuple[str, ...]) -> str:
    """``layers.0.q.weight, layers.0.k.weight, ..`` → ``layers.0.* (9)``."""
    if len(params) <= 3:
        return ", ".join(params)
    shared = os.path.commonprefix(params).rpartition(".")[0]  # noqa: RUF071 (dots, not paths)
    return f"{shared}.* ({len(params)})" if shared else f"{params[0]} .. {params[-1]} ({len(params)})"
