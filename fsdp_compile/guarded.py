"""What stands around each compiled graph: before a run ranks compare what it communicates, early gathers are taken over and started,
and an error names the collective that it struck."""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp_compile import compat
from fsdp_compile.passes.pipeline import Scheduled
from fsdp_compile.runtime.early import Early, early_of
from fsdp_compile.runtime.grads import expect
from fsdp_compile.runtime.hold import leave
from fsdp_compile.runtime.ops import check_world
from fsdp_compile.runtime.order import fingerprint, same_on_all_ranks

_COLLECTIVE = re.compile(r"ops\._c10d_functional\.|ops\.fsdp_compile\.(all_|entry_)")


class Guarded:
    """Around a compiled graph, the ``index``-th of the process. ``lifted``: its gathers at the entry may start before it."""

    def __init__(self, index: int, schedule: Scheduled, timeout_s: float, lifted: bool, fn: Callable[..., Any]) -> None:
        self.schedule, self.fn, self.timeout_s, self.lifted = schedule, fn, timeout_s, lifted
        specs = (*((*schedule.gathered, *schedule.reduced) if schedule.collectives else ()), *schedule.exchanged)
        self.backward = schedule.direction == "backward"
        self.title = f"{schedule.direction} graph {index}"
        # By group: one of its parameters, and what the graph will do there. The title has no part in what is compared.
        sent = [(c.group, c.signature()) for c in schedule.collectives]
        sent += [(s.group, f"exchange of rows (option embedding_rows) of {s.encode()}") for s in schedule.exchanged]
        self.turns = {s.group: (s, tuple(line for group, line in sent if group == s.group)) for s in specs}
        self.entries = {name: tuple(e for e in schedule.entries if e.group == name) for name in self.turns}
        self.events = {name: (self.backward, fingerprint(lines)) for name, (_, lines) in self.turns.items()}
        # Weak: compiled code outlives its groups (Dynamo leaves it in the globals of the module), and a group has threads.
        self.known: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()

    def wrapped(self) -> Callable[..., Any]:
        fn, backward, room = self.fn, self.backward, self.schedule.room

        def run(args: Any) -> Any:
            if backward:
                expect()
            elif room is not None:
                leave(args, *room)
            early = [(name, early, self._compare_early(name, early, args)) for name, early in self._early()]
            if not early:
                for name in self.turns:
                    self._compare(name)
            try:
                with compat.below_autograd():
                    out = fn(args)
            except BaseException as e:
                for _, gathers, _ in early:
                    gathers.failed()
                if isinstance(e, RuntimeError):
                    raise self._explain(e) from e
                raise
            for name, gathers, start in early:
                gathers.passed(self.events[name], start, backward)
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _early(self) -> list[tuple[str, Early]]:
        return [(name, early_of(self._group(name), self.timeout_s)) for name in self.turns] if self.lifted else []

    def _group(self, name: str) -> dist.ProcessGroup:
        found = group_of(name)
        if found is None or self.known.get(name) is not found:
            check_world(self.turns[name][0])
            assert found is not None
            self.known[name] = found
        return found

    def _compare(self, name: str, offers: tuple[int, int] = (0, 0)) -> tuple[bool, ...]:
        return same_on_all_ranks(self._group(name), self.title, self.turns[name][1], self.timeout_s, offers)

    def _compare_early(self, name: str, early: Early, args: Any) -> bool:
        """Compare, take over what has been started, and return whether to start what comes next at the end of this graph."""
        have = early.entering(self.entries[name], args, self.backward)
        start, take = self._compare(name, (early.offer(self.events[name]), have))
        early.settle(take)
        return start

    def _explain(self, e: RuntimeError) -> RuntimeError:
        hit = _failed_collective(e, self.schedule)
        if hit is None:
            return e
        return RuntimeError(f"{self.title}: {hit} failed (a peer has died or hangs): {e}")


def group_of(name: str) -> dist.ProcessGroup | None:
    """The process group of this name; None if there is none (any more)."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (ValueError, RuntimeError, KeyError):
        return None


def _failed_collective(e: BaseException, schedule: Scheduled) -> str | None:
    """Which collective an exception came from, read off the line of generated code (or of an FX graph) that raised it."""
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        line = frame.line or ""
        if "ops.fsdp_compile.embed_rows" in line:
            return f"the exchange of rows of {', '.join(dict.fromkeys(s.fqn for s in schedule.exchanged))}"
        if not _COLLECTIVE.search(line):
            continue
        source = _source_above(frame)
        if "wait_tensor" in line and (m := re.search(r"wait_tensor(?:\.default)?\((\w+)", line)):
            launches = [s for s in source if _COLLECTIVE.search(s) and "wait_tensor" not in s]
            name = m[1]
            for s in reversed(source):  # follow getitems back to the launch that delivers `name`
                got = re.match(rf"\s*{name} = (\w+)\[\d+\]", s) or re.match(rf"\s*{name} = (\w+);", s)
                if got:
                    name = got[1]
            nth = next((i for i, s in enumerate(launches) if re.match(rf"\s*{name} = ", s)), len(launches) - 1)
        else:
            nth = sum(1 for s in source if _COLLECTIVE.search(s) and "wait_tensor" not in s) - 1
        if 0 <= nth < len(schedule.collectives):
            c = schedule.collectives[nth]
            return f"{c.kind} of bucket {c.bucket} ({', '.join(c.params[:3])}{', …' if len(c.params) > 3 else ''})"
    return None


def _source_above(frame: traceback.FrameSummary) -> list[str]:
    import linecache

    lines = linecache.getlines(frame.filename)[: frame.lineno or 0]
    start = max((i for i, s in enumerate(lines) if re.match(r"\s*def \w+\(", s)), default=0)
    return lines[start:]
