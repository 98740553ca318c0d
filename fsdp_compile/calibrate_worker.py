"""What each rank of `fsdp-compile calibrate` runs. All ranks measure at the same time, as they compute at the same time in a step."""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile.runtime.communicator import communicator, is_gloo

from .calibrate import CalibrateConfig, Point, device_name
from .launcher import process_group

c10d = torch.ops._c10d_functional
COALESCED = 4  # tensors in a coalesced collective
VARIANTS = (
    ("all_gather", "coalesced"),
    ("all_gather", "packed"),
    ("reduce_scatter", "coalesced"),
    ("reduce_scatter", "packed"),
    ("all_to_all", "packed"),
)
SIDES = (256, 512, 1024)  # of the matrices on CPU; times eight on CUDA
COLLECTIVE_SECONDS = 40.0  # for all of them; fewer rounds if they would take longer
MATMUL_SECONDS = 0.6  # for each dtype
STREAM_BYTES = 32 << 20  # larger than a cache
SHARED_SECONDS = 0.4  # of collectives and of compute, run beside each other
PROBE_BYTES = 4 << 20  # of the collective for that, and for traffic without pauses
STEADY_SECONDS = 0.6  # of such traffic, after as much that is not timed; less with fewer than 5 repeats
IN_FLIGHT = 4


class Calibration:
    """One rank's measurements. ``group``: the communicator that a model's collectives would run on; ``control``: where ranks meet between
    measurements (None: the default group)."""

    def __init__(
        self, config: CalibrateConfig, device: torch.device, group: dist.ProcessGroup, progress: Progress, control: Any = None
    ) -> None:
        self.config, self.device, self.group, self.progress, self.control = config, device, group, progress, control
        self.world = config.nproc

    def run(self) -> tuple[list[Point], dict[str, Any]]:
        """Points, and the rest as `calibrate.machine_of` takes it; the same on every rank."""
        dtypes = [(name, getattr(torch, name)) for name in self.config.dtypes]
        rounds = self.config.repeats
        bar = self.progress.add_task("", total=len(VARIANTS) * len(dtypes) * (rounds + 1) + len(dtypes) + 2 + 2 * len(VARIANTS))
        mine = self._collectives(dtypes, bar)
        steady, posting = [], []
        for kind, lowering in {(p.kind, p.lowering): None for p in mine}:
            for nbytes in (self._probe_bytes // 8, self._probe_bytes):
                self.progress.update(bar, description=f"{kind} {lowering} without a pause", advance=1)
                seconds, post = self._steady(kind, lowering, nbytes)
                steady.append(Point(kind, lowering, "float32", nbytes, seconds))
                posting.append(post)
        flops = {}
        for name, dtype in dtypes:
            self.progress.update(bar, description=f"matmul {name}")
            flops[name] = self._matmul(dtype)
            self.progress.advance(bar)
        self.progress.update(bar, description="memory")
        memory, launch = self._stream(), self._launch()
        self.progress.advance(bar)
        self.progress.update(bar, description="compute beside collectives")
        shared = self._interference()
        self.progress.advance(bar)
        ranks: list[Any] = [None] * self.world
        timed = [*mine, *steady]
        found = ([p.seconds for p in timed], flops, memory, launch, shared, statistics.median(posting))
        dist.all_gather_object(ranks, found, group=self.control)
        slowest = [max(each) for each in zip(*(r[0] for r in ranks))]
        points = [Point(p.kind, p.lowering, p.dtype, p.nbytes, s) for p, s in zip(timed, slowest)]
        measured = {
            "device": device_name(self.device.type),
            "flops": {name: min(r[1][name] for r in ranks) for name in flops},
            "memory": min(r[2] for r in ranks),
            "launch": max(r[3] for r in ranks),
            "interference": statistics.mean(r[4] for r in ranks),
            "posting": max(r[5] for r in ranks),
            "steady": points[len(mine) :],
        }
        return points[: len(mine)], measured

    # --- Collectives ------------------------------------------------------------------------------------------------------

    def _collectives(self, dtypes: list[tuple[str, torch.dtype]], bar: Any) -> list[Point]:
        """This rank's medians. Every size is visited once a round, so that what else the machine does for a second or two spoils one
        sample of many sizes, not all samples of one. The first round warms up and is not counted."""
        seen: dict[tuple[str, str, str, int], list[float]] = {}
        refused: set[tuple[str, str, str]] = set()
        began = time.perf_counter()
        for turn in range(self.config.repeats + 1):
            for kind, lowering in VARIANTS:
                for name, dtype in dtypes:
                    self.progress.update(bar, description=f"round {turn} of {self.config.repeats}: {kind} {lowering} {name}", advance=1)
                    for nbytes in self.config.nbytes():
                        if (kind, lowering, name) in refused:
                            break
                        seconds = self._collective(kind, lowering, dtype, nbytes)
                        if seconds is None:
                            refused.add((kind, lowering, name))
                        elif turn:
                            seen.setdefault((kind, lowering, name, nbytes), []).append(seconds)
            if turn >= 2 and self._agreed(time.perf_counter() - began) * (turn + 2) / (turn + 1) > COLLECTIVE_SECONDS:
                break  # a slow or busy machine: two rounds must do
        return [Point(*key, statistics.median(times)) for key, times in seen.items()]

    def _call(self, kind: str, lowering: str, dtype: torch.dtype, nbytes: int) -> Callable[[], Any]:
        """Launches one collective of ``nbytes`` (all of it: a gather's output, a reduction's input); the result is to be waited for."""
        world, name = self.world, self.group.group_name
        numel = nbytes // dtype.itemsize
        numel -= numel % (world * COALESCED)  # each of a coalesced collective's tensors is cut over the ranks
        own = is_gloo(self.group)  # what option transport="auto" takes
        if kind == "all_gather":
            parts = self._tensors(numel // world, lowering, dtype)
            if own:
                return lambda: torch.ops.fsdp_compile.all_gather_coalesced(parts, world, name)
            if lowering == "coalesced":
                return lambda: c10d.all_gather_into_tensor_coalesced(parts, world, name)
            return lambda: [c10d.all_gather_into_tensor(parts[0], world, name)]
        parts = self._tensors(numel, lowering, dtype)
        if kind == "all_to_all":
            if own:
                return lambda: [torch.ops.fsdp_compile.all_to_all(parts[0], world, name)]
            split = [numel // world] * world
            return lambda: [c10d.all_to_all_single(parts[0], split, split, name)]
        if lowering == "coalesced":
            return lambda: c10d.reduce_scatter_tensor_coalesced(parts, "avg", world, name)
        return lambda: [c10d.reduce_scatter_tensor(parts[0], "avg", world, name)]

    def _tensors(self, numel: int, lowering: str, dtype: torch.dtype) -> list[Tensor]:
        count = COALESCED if lowering == "coalesced" else 1
        return [torch.ones(numel // count, dtype=dtype, device=self.device) for _ in range(count)]

    def _collective(self, kind: str, lowering: str, dtype: torch.dtype, nbytes: int) -> float | None:
        """Seconds; None where the backend cannot do it (every rank alike)."""
        start = self._call(kind, lowering, dtype, nbytes)

        def once() -> None:
            for x in start():
                c10d.wait_tensor(x)

        try:
            return self._timed(once)
        except RuntimeError as error:
            if "imeout" in str(error) or "onnection" in str(error):
                raise
            return None

    @property
    def _probe_bytes(self) -> int:
        return min(self.config.largest, PROBE_BYTES)

    def _steady(self, kind: str, lowering: str, nbytes: int) -> tuple[float, float]:
        """Seconds of each of many collectives, and of starting it; some of them are always in flight, as in a step that is limited by
        communication. Links that let a burst through after each pause, and lanes that take turns, show only then what they carry."""
        start = self._call(kind, lowering, torch.float32, nbytes)

        def land(flight: Any) -> None:
            for x in flight:
                c10d.wait_tensor(x)

        def train(count: int, flying: collections.deque[Any]) -> float:
            posting = 0.0
            for _ in range(count):
                began = time.perf_counter()
                flying.append(start())
                posting += time.perf_counter() - began
                if len(flying) > IN_FLIGHT:
                    land(flying.popleft())
            return posting / count

        flying: collections.deque[Any] = collections.deque()
        one = self._agreed(self._timed(lambda: train(2 * IN_FLIGHT, flying)) / (2 * IN_FLIGHT))
        count = max(1, min(1000, round(STEADY_SECONDS * min(1.0, self.config.repeats / 5) / one)))
        train(count, flying)
        self._finish()
        began = time.perf_counter()
        posting = train(count, flying)
        self._finish()
        seconds = (time.perf_counter() - began) / count
        for flight in flying:
            land(flight)
        return seconds, posting

    def _timed(self, action: Callable[[], Any]) -> float:
        """Seconds of an action that all ranks start together."""
        dist.barrier(self.control)
        self._finish()
        began = time.perf_counter()
        action()
        self._finish()
        return time.perf_counter() - began

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # --- Kernels ----------------------------------------------------------------------------------------------------------

    def _matmul(self, dtype: torch.dtype) -> float:
        """FLOP/s: the median over sizes of each size's median. A product of n x n matrices takes 2 n^3. As in a model, no product finds
        its operands in a cache: each takes others, so many that they do not fit there."""
        rates, spent = [], 0.0
        for side in self._sides():
            product = self._products(side, dtype)
            product()
            times = [self._timed(product) for _ in range(self.config.repeats)]
            spent += sum(times)
            rates.append(2 * side**3 / statistics.median(times))
            spent = max(self._agreed(spent), spent)
            if spent > MATMUL_SECONDS / 4:  # the next size takes eight times as long
                break
        return statistics.median(rates)

    def speed(self, name: str) -> tuple[float, float]:
        """FLOP/s in one dtype and bytes/s of memory, of the slowest rank: the part of a calibration that changes from minute to minute
        on a machine that others use, too."""
        ranks: list[Any] = [None] * self.world
        dist.all_gather_object(ranks, (self._matmul(getattr(torch, name)), self._stream()), group=self.control)
        flops, memory = map(min, zip(*ranks))
        return flops, memory

    def _products(self, side: int, dtype: torch.dtype) -> Callable[[], Any]:
        """One product of matrices at each call, of others each time."""
        count = max(2, STREAM_BYTES // (3 * side * side * dtype.itemsize))
        sets = itertools.cycle([tuple(torch.ones(side, side, dtype=dtype, device=self.device) for _ in range(3)) for _ in range(count)])

        def product() -> None:
            a, b, out = next(sets)
            torch.mm(a, b, out=out)

        return product

    def _sides(self) -> Iterator[int]:
        yield from (side * (8 if self.device.type == "cuda" else 1) for side in SIDES)

    def _agreed(self, seconds: float) -> float:
        """The largest of all ranks' values: they must take the same branches."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, seconds, group=self.control)
        return max(values)

    def _stream(self) -> float:
        """Bytes/s read and written by an element-wise operation on tensors that no cache holds."""
        x = torch.ones(STREAM_BYTES // 4, device=self.device)
        y = torch.empty_like(x)
        torch.add(x, 1, out=y)
        return 2 * STREAM_BYTES / statistics.median(self._timed(lambda: torch.add(x, 1, out=y)) for _ in range(2 * self.config.repeats))

    def _launch(self) -> float:
        """Seconds of a kernel that has next to nothing to do, in a row of them."""
        x = torch.ones(8, device=self.device)
        count = 200

        def row() -> None:
            for _ in range(count):
                x.add_(1)

        row()
        return statistics.median(self._timed(row) for _ in range(self.config.repeats)) / count

    def _interference(self) -> float:
        """How much longer collectives and as long a computation take together than each alone: 0 for perfect overlap, 1 for none.
        The collectives run one after the other on the communicator's own thread or stream."""
        start = self._call("all_gather", "packed", torch.float32, self._probe_bytes)
        multiply = self._products(512 if self.device.type == "cpu" else 4096, torch.float32)

        def send(count: int) -> list[Tensor]:
            return [x for _ in range(count) for x in start()]

        def compute(count: int) -> None:
            for _ in range(count):
                multiply()

        def land(flying: list[Tensor]) -> None:
            for x in flying:
                c10d.wait_tensor(x)

        def both() -> None:
            flying = send(sends)
            compute(products)
            land(flying)

        one = self._agreed(self._timed(lambda: land(send(4))) / 4)
        sends = max(1, min(64, round(SHARED_SECONDS / one)))
        product = self._agreed(self._timed(lambda: compute(20)) / 20)
        products = max(1, round(sends * one / product))
        longer = []
        for _ in range(min(5, self.config.repeats + 1)):  # side by side: the machine's speed changes in seconds
            alone = max(self._timed(lambda: land(send(sends))), self._timed(lambda: compute(products)))
            longer.append(self._timed(both) / alone - 1.0)
        return min(1.0, max(0.0, statistics.median(longer)))


def worker(config: CalibrateConfig) -> tuple[list[Point], dict[str, Any]]:
    """Entry point of a launched rank."""
    with process_group(config.device, config.threads, config.timeout) as device:
        group = communicator(init_device_mesh(config.device, (config.nproc,)), config.timeout)
        with rank_progress() as progress:
            return Calibration(config, device, group, progress).run()


@contextlib.contextmanager
def rank_progress() -> Iterator[Progress]:
    """A progress bar on rank 0; elsewhere one that shows nothing."""
    rank = dist.get_rank()
    console = Console(stderr=True, quiet=rank != 0)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=rank != 0, transient=True) as progress:
        yield progress
