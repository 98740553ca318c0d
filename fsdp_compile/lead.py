"""Rank 0 decides a plan, the others follow: what option ``plan="auto"`` comes to, through the store.

::

    rank 0    once: calibrated? ──► tell     each topic:  (measure, with all) ──► decide, or find in the cache ──► tell
    others                          hear                  (measure, with all) ─────────────────────────────────►  hear

Ranks may see batches of other sizes, and one may compile again where the others do not. So nothing is decided twice: a decision is kept
by its topic, a digest of what a graph asks to communicate, in which no size of an activation has a part.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_compile import compat
from fsdp_compile.guarded import group_of
from fsdp_compile.passes.machine import Machine, from_json
from fsdp_compile.passes.pipeline import Decision
from fsdp_compile.runtime.agree import RankMismatch, agree

log = logging.getLogger("fsdp_compile")
SOON_S = 30.0  # whoever waits longer for rank 0 says so
QUICK = {"repeats": 2, "sizes": 6, "largest": 4 << 20, "dtypes": ("float32",)}  # of a calibration that nobody asked for


class Lead:
    """The decisions for one process group, which it does not keep alive (compiled code, which Dynamo keeps, knows its `Lead`).
    ``calibration``: rank 0's, as JSON; "" if there is none.

    Raises `RankMismatch` if rank 0 does not come to its first graph within ``timeout_s`` seconds."""

    def __init__(self, group: dist.ProcessGroup, device: str, timeout_s: float) -> None:
        self._name, self._rank, self._device, self.timeout_s = group.group_name, group.rank(), device, timeout_s
        self._alone = dist.get_backend(group) == "fake"  # no peers, and a store that keeps nothing
        self._leads = self._rank == 0 or self._alone
        self._decisions: dict[str, Decision] = {}
        self._refused: Counter[str] = Counter()
        self.calibration = self._tell("calibration", _calibration(group, device)) if self._leads else self._hear("calibration")
        self._machine = from_json(self.calibration) if self.calibration else None

    def decision(self, topic: str, decide: Callable[[Machine], Decision]) -> Decision:
        """What rank 0 has decided on ``topic``; ``decide``, for the first time there, on the machine as calibrated or else measured now.

        Raises its ValueError on every rank, and `RankMismatch` if rank 0 has nothing to say within ``timeout_s`` seconds."""
        return self._settled(topic, lambda: decide(self._known_machine()), measures=self._machine is None)

    def cached(self, topic: str, found: Decision) -> Decision:
        """What rank 0 has decided on ``topic``: what it found in its cache, if it had nothing to decide."""
        return self._settled(topic, lambda: found, measures=False)

    def _settled(self, topic: str, decide: Callable[[], Decision], measures: bool) -> Decision:
        if topic in self._decisions:
            return self._decisions[topic]
        key = f"{topic}/{self._refused[topic]}"
        self._refused[topic] += 1  # unless it is decided
        if self._leads:
            found = self._lead(key, decide, measures)
        else:
            try:
                if self._hear(f"{key}/measures"):
                    self._known_machine()
                found = _read(self._hear(f"{key}/decision"))
            except RankMismatch:  # nothing was said yet
                self._refused[topic] -= 1
                raise
        self._decisions[topic] = found
        return found

    def _lead(self, key: str, decide: Callable[[], Decision], measures: bool) -> Decision:
        self._tell(f"{key}/measures", "yes" if measures else "")
        try:
            found = decide()
        except Exception as refusal:
            text = str(refusal) if isinstance(refusal, ValueError) else f"rank 0 failed to plan this graph: {refusal!r}"
            self._tell(f"{key}/decision", json.dumps({"refusal": text}))
            raise
        self._tell(f"{key}/decision", json.dumps({**vars(found), "keep": sorted(found.keep)}))
        return found

    def _known_machine(self) -> Machine:
        if self._machine is None:
            group = group_of(self._name)
            assert group is not None
            agree(group, "machine", ["measure"], self.timeout_s)
            if self._leads:
                command = f"fsdp-compile calibrate --nproc {group.size()} --device {self._device}"
                log.warning("measuring this machine, for 10 to 20 seconds, at each start without a cache; once and for all: %s", command)
            with compat.outside_fake_mode():
                self._machine = _measured(group, self._device)
        return self._machine

    def _tell(self, key: str, text: str) -> str:
        if not self._alone:
            self._store().set(key, f"={text}")  # a file store takes an empty value for a deleted key
        return text

    def _hear(self, key: str) -> str:
        store = self._store()
        try:
            with contextlib.suppress(dist.DistStoreError, RuntimeError):
                store.wait([key], datetime.timedelta(seconds=min(SOON_S, self.timeout_s)))
            if self.timeout_s > SOON_S and not store.check([key]):
                log.warning("rank %d waits for rank 0 to plan a graph, for at most %g s (option timeout_s)", self._rank, self.timeout_s)
            store.wait([key], datetime.timedelta(seconds=max(0.001, self.timeout_s - SOON_S)))
        except (dist.DistStoreError, RuntimeError) as e:
            raise RankMismatch(
                f"rank 0 of group {self._name!r} has not planned the graph that rank {self._rank} compiles within "
                f"{self.timeout_s:g} s: it has failed, runs another model, or is still compiling (option timeout_s)"
            ) from e
        return store.get(key).decode().removeprefix("=")

    def _store(self) -> dist.Store:
        return dist.PrefixStore(f"fsdp_compile/{self._name}/plan", compat.default_store())


_leads: weakref.WeakKeyDictionary[dist.ProcessGroup, Lead] = weakref.WeakKeyDictionary()


def lead_of(group: dist.ProcessGroup, device: str, timeout_s: float) -> Lead:
    """The one `Lead` of ``group``, on "cpu" or "cuda"; made when it is first asked for, by all ranks alike."""
    if group not in _leads:
        _leads[group] = Lead(group, device, timeout_s)
    _leads[group].timeout_s = timeout_s
    return _leads[group]


def _read(text: str) -> Decision:
    said = json.loads(text)
    if "refusal" in said:
        raise ValueError(said["refusal"])
    return Decision(**{**said, "keep": frozenset(said["keep"])})


def _calibration(group: dist.ProcessGroup, device: str) -> str:
    from fsdp_compile import calibrate

    try:
        return calibrate.load_machine(group.size(), device, "gloo" if device == "cpu" else "nccl").to_json()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        log.warning("this machine's calibration is not used: %s", error)
        return ""


def _measured(group: dist.ProcessGroup, device: str) -> Machine:
    from rich.progress import Progress

    from fsdp_compile import calibrate
    from fsdp_compile.calibrate_worker import Calibration

    config = calibrate.CalibrateConfig(group.size(), device, torch.get_num_threads(), **QUICK)  # type: ignore[arg-type]
    own = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    with torch.no_grad():
        found = calibrate.machine_of(config, *Calibration(config, own, group, Progress(disable=True), group).run())
    _trim()
    return found


def _trim() -> None:
    """Let glibc give back what has been freed: it would keep some 450 MB that the probes took."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
