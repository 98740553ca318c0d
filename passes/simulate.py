"""A step on paper: one compute lane, one communication lane for each process group, first in, first out.

::

    compute   | k1 k2 k3 ···· k4 k5 |      a wait stops it until the collective has ended: that time is exposed
    comm      | ag1 ag2   ag3  rs1  |      a collective starts when it is launched and the lane is free

The lanes share nothing but, on machines whose network needs the processor, `Machine.interference`: while something is on the wire,
compute runs at (1 - interference) of its speed. Starting a collective takes `Machine.posting` of the compute lane.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .cost import Free, Kernel, Launch, Wait, Work
from .machine import Machine

WHY = {
    "head": "launched at the graph's entry: nothing ran yet to hide it",
    "tail": "a reduction after the last operation: nothing is left to hide it",
    "limit": "a limit on bytes in flight delayed the launch, or forced the wait",
    "lane": "the lane was still busy with earlier collectives",
    "rows": "an embedding exchanges rows where it reads them: nothing runs meanwhile",
    "lead": "not enough compute between launch and wait",
}


@dataclass(frozen=True)
class Span:
    """Something that takes ``start`` to ``end`` (seconds) of a lane: "compute", or "comm GROUP". ``graph``: index of the work."""

    lane: str
    name: str
    kind: str
    start: float
    end: float
    graph: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"{self.name}: from {self.start} to {self.end}")


@dataclass(frozen=True)
class Exposed:
    """Compute stood still for ``seconds``, waiting for ``bucket``; ``why``: a key of `WHY`."""

    graph: int
    direction: str
    bucket: str
    kind: str
    seconds: float
    why: str

    def __post_init__(self) -> None:
        if self.why not in WHY:
            raise ValueError(f"why must be one of {', '.join(WHY)}, got {self.why!r}")


@dataclass(frozen=True)
class Timeline:
    """A simulated step; times in seconds. ``gathered``: (time, bytes of gathered weights alive from then on)."""

    machine: str
    forward: float
    backward: float
    optimizer: float
    compute_busy: float
    comm_busy: float
    spans: tuple[Span, ...]
    exposed: tuple[Exposed, ...]
    gathered: tuple[tuple[float, int], ...]

    @property
    def step(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward + self.backward + self.optimizer

    @property
    def exposed_seconds(self) -> float:
        """How long compute waits for communication."""
        return sum(e.seconds for e in self.exposed)

    @property
    def peak_gathered_bytes(self) -> int:
        """Most bytes of gathered weights alive at once."""
        return max((b for _, b in self.gathered), default=0)

    @property
    def peak_at(self) -> float:
        """When that peak is first reached."""
        return max(self.gathered, key=lambda x: x[1], default=(0.0, 0))[0]

    @property
    def exposed_by_reason(self) -> dict[str, float]:
        """Reason → seconds, the largest first."""
        total: dict[str, float] = {}
        for e in self.exposed:
            total[e.why] = total.get(e.why, 0.0) + e.seconds
        return dict(sorted(total.items(), key=lambda x: -x[1]))


@dataclass
class _Flight:
    launch: Launch
    launched: float
    start: float
    end: float
    entry: bool  # launched before any of its graph's own kernels
    limited: bool  # a gather that had no room until the free before it
    kernels: int  # its graph's own kernels that had run at the launch


@dataclass
class _Lanes:
    """The state of a simulation."""

    machine: Machine
    limit_gathers: int | None
    now: float = 0.0
    compute_busy: float = 0.0
    alive: int = 0
    before_free: int = 0  # bytes alive before the frees since the last kernel
    free_at: dict[str, float] = field(default_factory=dict)
    on_wire: deque[tuple[float, float]] = field(default_factory=deque)  # (start, end) of what is or will be sent, by start
    spans: list[Span] = field(default_factory=list)
    exposed: list[Exposed] = field(default_factory=list)
    gathered: list[tuple[float, int]] = field(default_factory=list)

    def compute(self, kernel: Kernel, graph: int) -> None:
        work = self.machine.rates.seconds(kernel.flops, kernel.nbytes, kernel.dtype)
        end = self._ends(work)
        self.spans.append(Span("compute", kernel.name, "kernel", self.now, end, graph))
        self.compute_busy += end - self.now
        self.now = end
        self.before_free = self.alive

    def _ends(self, work: float) -> float:
        """When ``work`` seconds of undisturbed compute that start now are done."""
        slow = 1.0 - self.machine.interference
        t = self.now
        if slow == 1.0 or not work:
            return t + work
        while self.on_wire and self.on_wire[0][1] <= t:
            self.on_wire.popleft()
        for start, end in self.on_wire:
            if start > t:
                if work <= start - t:
                    return t + work
                work -= start - t
                t = start
            if end > t:
                if work <= (end - t) * slow:
                    return t + work / slow
                work -= (end - t) * slow
                t = end
        return t + work

    def launch(self, e: Launch, graph: int, kernels: int) -> _Flight:
        lane = f"comm {e.group}"
        if self.machine.posting:
            self.spans.append(Span("compute", f"start {e.bucket}", "kernel", self.now, self.now + self.machine.posting, graph))
            self.compute_busy += self.machine.posting
            self.now += self.machine.posting
        start = max(self.now, self.free_at.get(lane, 0.0))
        end = start + self.machine.collective_seconds(e.kind, e.lowering, e.dtype, e.nbytes, e.world)
        self.free_at[lane] = end
        bisect.insort(self.on_wire, (start, end))
        self.spans.append(Span(lane, e.bucket, e.kind, start, end, graph))
        limited = False
        if e.kind == "all_gather":
            limited = self.limit_gathers is not None and self.before_free + e.nbytes > self.limit_gathers
            self._alive(e.nbytes)
        return _Flight(e, self.now, start, end, kernels == 0, limited, kernels)

    def wait(self, flight: _Flight, work: Work, graph: int, kernels: int, more_reductions: bool) -> None:
        if flight.end <= self.now:
            return
        e, seconds = flight.launch, flight.end - self.now
        queued = flight.start - flight.launched >= seconds / 2
        if e.kind == "all_gather":
            why = "head" if flight.entry else "limit" if flight.limited else "lane" if queued else "lead"
        else:
            why = "limit" if more_reductions else "tail" if flight.kernels == kernels else "lane" if queued else "lead"
        self.exposed.append(Exposed(graph, work.direction, e.bucket, e.kind, seconds, why))
        self.now = flight.end

    def exchange(self, e: Launch, work: Work, graph: int, kernels: int) -> None:
        flight = self.launch(e, graph, kernels)
        self.exposed.append(Exposed(graph, work.direction, e.bucket, e.kind, flight.end - self.now, "rows"))
        self.now = flight.end

    def free(self, e: Free) -> None:
        self._alive(-e.nbytes)

    def _alive(self, change: int) -> None:
        self.alive += change
        self.gathered.append((self.now, self.alive))

    def run(self, work: Work, graph: int) -> float:
        """One graph; returns how long it took."""
        began = self.now
        flights: dict[str, _Flight] = {}
        kernels = 0
        reductions = sum(e.kind != "all_gather" for e in work.launches)
        self.before_free = self.alive
        for e in work.events:
            if isinstance(e, Kernel):
                self.compute(e, graph)
                if e.exchange is not None:
                    self.exchange(e.exchange, work, graph, kernels)
                kernels += not e.ours
            elif isinstance(e, Launch):
                flights[e.bucket] = self.launch(e, graph, kernels)
                reductions -= e.kind != "all_gather"
            elif isinstance(e, Wait):
                self.wait(flights[e.bucket], work, graph, kernels, reductions > 0)
            else:
                self.free(e)
        return self.now - began


def simulate(works: Iterable[Work], machine: Machine, optimizer_bytes: int = 0, limit_gathers: int | None = None) -> Timeline:
    """Run ``works`` (see `cost.work_of`) one after the other, as a step does: forward graphs, then backward graphs.

    ``optimizer_bytes``: what the optimizer reads and writes, at the memory rate (Adam: 7 times a rank's shards: reads parameter,
    gradient and two moments, writes all but the gradient). ``limit_gathers``: the limit that the schedule was made under, to tell
    what it costs. Gathered buffers that leave a graph stay alive to the end of the step. Raises ValueError if ``machine`` does
    not know a collective."""
    if optimizer_bytes < 0:
        raise ValueError(f"optimizer_bytes must not be negative, got {optimizer_bytes}")
    lanes = _Lanes(machine, limit_gathers)
    seconds = {"forward": 0.0, "backward": 0.0}
    for i, work in enumerate(works):
        seconds[work.direction] += lanes.run(work, i)
    optimizer = optimizer_bytes / machine.rates.memory
    if optimizer:
        lanes.spans.append(Span("compute", "optimizer", "optimizer", lanes.now, lanes.now + optimizer, -1))
    return Timeline(
        machine=machine.name,
        forward=seconds["forward"],
        backward=seconds["backward"],
        optimizer=optimizer,
        compute_busy=lanes.compute_busy + optimizer,
        comm_busy=sum(s.end - s.start for s in lanes.spans if s.lane != "compute"),
        spans=tuple(lanes.spans),
        exposed=tuple(lanes.exposed),
        gathered=tuple(lanes.gathered),
    )
