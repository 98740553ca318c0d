"""What `explain` returns: every graph before and after every pass, the buckets, and what they cost."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group

from fsdp_compile import report_view
from fsdp_compile.passes.cost import Work
from fsdp_compile.passes.machine import Machine
from fsdp_compile.passes.pipeline import op_difference
from fsdp_compile.passes.simulate import Timeline, simulate
from fsdp_compile.passes.totals import Cost, total
from fsdp_compile.passes.written import write
from fsdp_compile.text import unified_diff

DIRECTIONS = ("joint", "forward", "backward")
OPTIMIZER_PASSES = {"none": 0, "sgd": 3, "adamw": 7}  # reads and writes of tensors as large as a rank's shards (SGD: p, g; p)
KINDS = ("all_gather", "reduce_scatter", "all_to_all")  # the last is a reduction, too: its sum runs as compute


@dataclass(frozen=True)
class Stage:
    """One graph after one step: ``direction`` is "joint" (before partitioning), "forward" or "backward"; ``seconds`` is what
    the step took (joint: including Dynamo or AOTAutograd before it)."""

    frame: int
    direction: str
    name: str
    text: str
    ops: Mapping[str, int]
    seconds: float

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {DIRECTIONS}, got {self.direction!r}")
        if self.seconds < 0:
            raise ValueError(f"stage {self.name}: negative time {self.seconds}")


@dataclass(frozen=True)
class BucketRow:
    """One collective. Positions count the nodes of the scheduled graph, inputs included.

    ``bytes``: of the gathered buffers, or of the reduction's input. ``lead``: the program's own operations between launch and
    first wait. ``free``: position after the last use of a gathered bucket (the end if it leaves the graph); None for reductions.
    """

    frame: int
    direction: str
    kind: str
    bucket: str
    parameters: tuple[str, ...]
    bytes: int
    dtype: str
    launch: int
    wait: int
    lead: int
    free: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"bucket {self.bucket}: unknown collective {self.kind!r}")
        if not self.launch < self.wait <= (self.wait if self.free is None else self.free):
            raise ValueError(f"bucket {self.bucket}: launch {self.launch}, wait {self.wait}, free {self.free} are out of order")


@dataclass(frozen=True)
class GraphReport:
    """One scheduled graph. ``first``, ``last``: positions of its first operation and of its output. ``work``: its cost."""

    frame: int
    direction: str
    first: int
    last: int
    buckets: tuple[BucketRow, ...]
    peak_gathered_bytes: int
    work: Work

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"{self.direction} graph: first operation {self.first}, last {self.last}")


@dataclass(frozen=True)
class Report:
    """The whole model. ``calls[i]``: how often frame ``i`` ran in one forward. Bytes: ``parameter_bytes`` of all sharded
    parameters, ``shard_bytes`` of one rank's share with its padding. ``limit_gathers``: option limit_all_gathers, or the plan's.
    ``prefetch``: direction → how many buckets ahead (one number for all, or one for each). ``kept``: FQNs of weights that stay gathered
    from forward to backward (`passes.keep`); ``exchanged``: of embeddings whose rows are exchanged at their use (`passes.rows`): how many
    bytes that takes depends on the batch; of the figures here only `simulate` counts them."""

    model: str
    world_size: int
    parameters: int
    parameter_bytes: int
    shard_bytes: int
    stages: tuple[Stage, ...]
    graphs: tuple[GraphReport, ...]
    calls: tuple[int, ...]
    limit_gathers: int | None = None
    prefetch: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"forward": (2,), "backward": (2,)})
    kept: frozenset[str] = frozenset()
    exchanged: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        bad = [g.frame for g in self.graphs if not 0 <= g.frame < len(self.calls)]
        if bad:
            raise ValueError(f"graphs of unknown frames {bad}; there are {len(self.calls)} frames")

    # --- Cost ---------------------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> list[BucketRow]:
        """Every collective, by graph, in launch order."""
        return [row for g in self.graphs for row in g.buckets]

    @property
    def plan(self) -> dict[str, Any]:
        """What was decided, written down: option ``plan`` takes it, as it is, changed by hand, or from a JSON file."""
        return write(((b.direction, b.kind, b.parameters) for b in self.buckets), self.prefetch, self.kept, self.limit_gathers)

    @property
    def collectives_per_step(self) -> int:
        """How many collectives one forward and backward launch."""
        return sum(self.calls[b.frame] for b in self.buckets)

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank sends in one forward and backward: (world - 1) / world of each gathered buffer and of each
        reduction's input, as a ring or an exchange does it."""
        return sum(self.calls[b.frame] * b.bytes for b in self.buckets) * (self.world_size - 1) // self.world_size

    @property
    def peak_gathered_bytes(self) -> int:
        """Most bytes of gathered parameters alive at once, over all graphs."""
        return max((g.peak_gathered_bytes for g in self.graphs), default=0)

    @property
    def cost(self) -> Cost:
        """FLOPs, bytes moved and bytes sent of one rank's step, as formulas: ``report.cost.subs(world=64)``. For formulas over a batch or
        a sequence length, too, mark those sizes before `explain`: ``torch._dynamo.mark_dynamic(x, 0)``; ``report.cost.symbols``
        has their names."""
        return total(g.work for g in self.graphs for _ in range(self.calls[g.frame]))

    def simulate(self, machine: Machine, optimizer: str = "adamw") -> Timeline:
        """Predict one step on ``machine`` (`fsdp_compile.devices.device`, `fsdp_compile.calibrate.load_machine`): every frame's forward, as
        often as it is called, then their backwards the other way round, then the optimizer ("adamw", "sgd" with momentum excluded, or
        "none"). Graph breaks, the loss and what stands outside compiled frames count nothing. Raises ValueError for another optimizer."""
        if optimizer not in OPTIMIZER_PASSES:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZER_PASSES)}, got {optimizer!r}")
        works = self.works
        moved = OPTIMIZER_PASSES[optimizer] * self.shard_bytes if any(w.direction == "backward" for w in works) else 0
        return simulate(works, machine, moved, self.limit_gathers)

    @property
    def works(self) -> list[Work]:
        """What a step does: every frame's forward, as often as it is called, then their backwards the other way round."""
        forward = [g.work for g in self.graphs if g.direction == "forward" for _ in range(self.calls[g.frame])]
        backward = [g.work for g in self.graphs if g.direction == "backward" for _ in range(self.calls[g.frame])]
        return [*forward, *reversed(backward)]

    @property
    def pass_seconds(self) -> dict[str, float]:
        """Pass → seconds, over all forward and backward graphs."""
        total: dict[str, float] = {}
        for s in self.stages:
            if s.direction != "joint" and s.name != "markers":
                total[s.name] = total.get(s.name, 0.0) + s.seconds
        return total

    # --- Graphs -------------------------------------------------------------------------------------------------------

    def stage(self, direction: str, stage: str, frame: int = 0) -> Stage:
        """One stage. Raises ValueError, with what there is, for an unknown one."""
        return self._pair(direction, stage, frame)[1]

    def graph(self, direction: str, stage: str, frame: int = 0) -> str:
        """The text of one graph after one stage, for example ``graph("forward", "schedule")``."""
        return self.stage(direction, stage, frame).text

    def diff(self, stage: str, direction: str = "forward", frame: int = 0) -> str:
        """What one stage did to a graph: operators added and removed, then a unified diff from the stage before it.

        Raises ValueError for an unknown stage, or for the first of its direction."""
        before, after = self._pair(direction, stage, frame)
        if before is None:
            raise ValueError(f"{stage!r} is the first stage of the {direction} graph: there is nothing to compare it with")
        change = op_difference(Counter(before.ops), Counter(after.ops))
        body = unified_diff(before.text, after.text, (f"{direction}/{before.name}", f"{direction}/{stage}"))
        return f"# {stage}: {change}\n{body}"

    def _pair(self, direction: str, stage: str, frame: int) -> tuple[Stage | None, Stage]:
        mine = [s for s in self.stages if (s.direction, s.frame) == (direction, frame)]
        for before, s in zip([None, *mine], mine):
            if s.name == stage:
                return before, s
        if not 0 <= frame < len(self.calls):
            raise ValueError(f"frame {frame} does not exist; there are {len(self.calls)}")
        if not mine:
            there = sorted({s.direction for s in self.stages if s.frame == frame})
            raise ValueError(f"frame {frame} has no {direction!r} graph; it has: {', '.join(there)}")
        raise ValueError(f"no stage {stage!r} of the {direction} graph; there are: {', '.join(s.name for s in mine)}")

    def save(self, folder: str | Path) -> list[Path]:
        """Write every graph as text, ``frame0_forward_3_schedule.txt``, and ``summary.txt``; returns the files."""
        to = Path(folder)
        to.mkdir(parents=True, exist_ok=True)
        seen: Counter[tuple[int, str]] = Counter()
        files = {"summary.txt": str(self)}
        for s in self.stages:
            files[f"frame{s.frame}_{s.direction}_{seen[s.frame, s.direction]}_{s.name}.txt"] = s.text
            seen[s.frame, s.direction] += 1
        for name, text in files.items():
            (to / name).write_text(text)
        return [to / name for name in files]

    # --- Showing ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graphs' texts, ready for JSON; sizes in bytes, times in seconds."""
        return {
            "model": self.model,
            "world_size": self.world_size,
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "shard_bytes": self.shard_bytes,
            "collectives_per_step": self.collectives_per_step,
            "bytes_per_step": self.bytes_per_step,
            "peak_gathered_bytes": self.peak_gathered_bytes,
            "pass_seconds": self.pass_seconds,
            "calls": list(self.calls),
            "plan": self.plan,
            "exchanged": sorted(self.exchanged),
            "graphs": [
                {
                    "frame": g.frame,
                    "direction": g.direction,
                    "operations": g.last - g.first,
                    "peak_gathered_bytes": g.peak_gathered_bytes,
                }
                for g in self.graphs
            ],
            "buckets": [{**vars(b), "parameters": list(b.parameters)} for b in self.buckets],
            "stages": [
                {"frame": s.frame, "direction": s.direction, "stage": s.name, "seconds": s.seconds, "ops": dict(s.ops)}
                for s in self.stages
            ],
        }

    def __rich__(self) -> Group:
        return report_view.view(self)

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=120, color_system=None, force_terminal=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
