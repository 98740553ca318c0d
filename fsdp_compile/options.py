"""Options of the backend: ``torch.compile(model, backend="fsdp", options={...})``."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.arguments import check_inductor, check_shard_args
from fsdp_compile.passes.bucket import BucketPlan
from fsdp_compile.passes.exchange import TRANSPORTS
from fsdp_compile.passes.pipeline import Plan
from fsdp_compile.passes.schedule import SchedulePlan
from fsdp_compile.passes.written import Written, read

PACKED_LIMIT = (
    "limit_all_gathers and collective='packed' exclude each other: while a packed bucket is copied out it exists twice; use "
    "collective='coalesced'"
)
WHOLE_NUMBERS = ("bucket_bytes", "min_num_params", "prefetch", "limit_all_gathers", "limit_reduce_scatters", "keep_bytes")
AUTO, FIXED = "auto", "fixed"
ROWS_FROM = 1 << 20  # bytes of a table: three small messages take about as long as gathering that many
ON_GLOO = {"transport": "own", "embedding_rows": ROWS_FROM}  # what "auto" and None stand for on CPU ranks with gloo
DECIDED = (*WHOLE_NUMBERS, "bucket_modules")  # by a planner


@dataclass(frozen=True)
class Options:
    """All options, validated.

    How the one-liner shards (`fsdp_compile.fully_shard` takes the same):
      mesh, mp_policy, reshard_after_forward, ignored_params, reduce_op, sync_module_states

    What travels together:
      bucket_bytes            most bytes of gathered weights in one collective; None: a sixteenth of the model, 1 to 25 MiB
      bucket_modules          class names or FQN patterns: one bucket for each such module, whatever its size
      min_num_params          FSDP1's size policy: a bucket of about this many (fp32) parameters
      collective              "coalesced" (no copies) or "packed" (one flat buffer)
      transport               "native": the backend's own collectives; "all_to_all": reductions built on all-to-all, fewer bytes
                              where the backend's own sends more than it must; "own": so, and every collective on what suits
                              the measured link (gloo only); "auto": "own" on gloo, else "native"
      embedding_rows          embeddings exchange the rows that the batches name, at their use, instead of gathering the table and
                              reducing a gradient of its size: fewer bytes, by far if a batch names few of many rows. True: every
                              trainable table that its graph reads by one ordinary lookup and nothing else, and that no plan names;
                              a number: of these, tables of at least so many bytes; None: of at least 1 MiB, on CPU ranks (elsewhere
                              the host would have to wait for the device)

    When it travels:
      prefetch                how many buckets ahead a gather is launched
      limit_all_gathers       most bytes of gathered weights alive at once in one graph, beside those that it is handed
      limit_reduce_scatters   most bytes of reductions in flight
      keep_bytes              most bytes of gathered weights carried from forward to backward, by all graphs of a model together:
                              those used last, which backward uses first (0: every weight is gathered again; None: as many as one
                              rank's shards take, or 0 where reshard_after_forward is True, a plan is given, gathers are limited or
                              packed)
      early_gathers           the gathers that a graph waits for first start before it: at the end of the forward graph those of
                              backward, after the optimizer's step those of the next forward. These weights then stay gathered in
                              between; what was started before a shard was written is dropped. On CPU ranks

      plan                    all this written down, for single parameters: a dict or a JSON file (`fsdp_compile.passes.written`),
                              as `explain(...).plan` has it; "auto": buckets and prefetch (with memory_budget also what is kept
                              for backward) decided on rank 0, by simulating the step on this machine, as
                              `fsdp-compile calibrate` has measured it (measured in some seconds, if not); "fixed": by the options
                              above. None: "auto" where the machine is calibrated and, under the last two headings,
                              nothing is given but transport and embedding_rows; else "fixed"
      memory_budget           with plan="auto", which it implies: most bytes of gathered weights alive at once, in all graphs of a
                              model together; what it leaves is used to keep weights for backward. None: what plan="fixed" takes

    The rest:
      lowering                "inductor" or "fx" (runs the scheduled graph as it stands, with eager's kernels)
      timeout_s               seconds to wait for the other ranks while comparing models and plans
      dump_graphs             folder for the graphs of every stage
      inductor                a dict of torch._inductor.config values
    """

    mesh: DeviceMesh | None = None
    mp_policy: MixedPrecisionPolicy | torch.dtype | None = None
    reshard_after_forward: bool | None = None
    ignored_params: Iterable[nn.Parameter] | None = None
    reduce_op: str = "avg"
    sync_module_states: bool = True
    bucket_bytes: int | None = None
    bucket_modules: tuple[str, ...] = ()
    min_num_params: int | None = None
    prefetch: int = 2
    limit_all_gathers: int | None = None
    limit_reduce_scatters: int | None = None
    keep_bytes: int | None = None
    early_gathers: bool = False
    embedding_rows: bool | int | None = None
    plan: Mapping[str, Any] | str | os.PathLike[str] | None = None
    memory_budget: int | None = None
    collective: str = "coalesced"
    transport: str = "auto"
    lowering: str = "inductor"
    timeout_s: float = 600.0
    dump_graphs: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lowering not in ("inductor", "fx"):
            raise ValueError(f"option lowering must be 'inductor' or 'fx', got {self.lowering!r}")
        if self.transport not in ("auto", *TRANSPORTS):
            raise ValueError(f"option transport must be 'auto' or one of {TRANSPORTS}, got {self.transport!r}")
        if self.limit_all_gathers is not None and self.collective == "packed":
            raise ValueError(f"options {PACKED_LIMIT}")
        check_shard_args(prefix="option ", **self.shard_args())
        self._check_types()
        if not isinstance(self.early_gathers, bool):
            raise TypeError(f"option early_gathers must be True or False, got {self.early_gathers!r}")
        if self.embedding_rows is not None and (not isinstance(self.embedding_rows, int) or self.embedding_rows < 0):
            raise TypeError(f"option embedding_rows must be True, False or a number of bytes, got {self.embedding_rows!r}")
        check_inductor(self.inductor)
        if self.keep_bytes is not None and self.keep_bytes < 0:
            raise ValueError(f"option keep_bytes must not be negative, got {self.keep_bytes}")
        if self.bucket_bytes is not None and self.min_num_params is not None:
            raise ValueError("options bucket_bytes and min_num_params exclude each other")
        patterns = (self.bucket_modules,) if isinstance(self.bucket_modules, str) else tuple(self.bucket_modules)
        object.__setattr__(self, "bucket_modules", patterns)
        self.passes_plan({})  # validates the schedule options
        if self.plan is not None and not isinstance(self.plan, (Mapping, str, os.PathLike)):
            raise TypeError(f"option plan must be {AUTO!r}, {FIXED!r}, a dict or the name of a JSON file, got {self.plan!r}")
        if self.memory_budget is not None and self.plan is None:
            object.__setattr__(self, "plan", AUTO)
        object.__setattr__(self, "_written", Written() if self.plan in (None, AUTO, FIXED) else read(self.plan))
        self._refuse_twice(self._written)  # type: ignore[attr-defined]

    @property
    def automatic(self) -> bool:
        """Whether the plan is made when a graph is compiled."""
        return self.plan == AUTO

    @property
    def may_plan(self) -> bool:
        """Whether nothing that a planner decides is said, so that it may decide where the machine is calibrated."""
        scheduling = (*DECIDED, "plan", "reshard_after_forward", "collective", "early_gathers")
        return all(getattr(self, name) == getattr(Options, name) for name in scheduling)

    @property
    def kept_bytes(self) -> int | None:
        """``keep_bytes`` for `keep.kept`; None: one rank's shards. Not so where something else decides, and not with packed buckets,
        which what is kept cannot share with what is freed."""
        by_rule = self.plan in (None, FIXED) or (self.automatic and self.memory_budget is None)
        decided = self.reshard_after_forward or not by_rule or self.limit_all_gathers is not None
        if self.keep_bytes is None and (decided or self.collective == "packed"):
            return 0
        return self.keep_bytes

    def _refuse_twice(self, written: Written) -> None:
        """What the plan says, no option may say, too."""
        if self.memory_budget is not None:
            if not self.automatic:
                raise ValueError(f"option memory_budget is for plan={AUTO!r}, not for a plan that is written or fixed")
            if self.memory_budget <= 0:
                raise ValueError(f"option memory_budget must be positive, got {self.memory_budget}")
            if self.collective == "packed":
                raise ValueError("option memory_budget: while a packed bucket is copied out it exists twice; use collective='coalesced'")
        planned = f"plan={AUTO!r}" if self.memory_budget is None else f"memory_budget (that is, plan={AUTO!r})"
        for name in DECIDED if self.automatic else ():
            if getattr(self, name) != getattr(Options, name):
                raise ValueError(f"options {name} and {planned} both decide this: leave {name} out")
        both = {
            "limit_all_gathers": self.limit_all_gathers is not None and written.limit_all_gathers is not None,
            "keep_bytes": bool(self.keep_bytes) and bool(written.keep),
            "bucket_modules": bool(self.bucket_modules) and bool(written.buckets),
            "prefetch": self.prefetch != Options.prefetch and bool(written.prefetch),
        }
        for name, twice in both.items():
            if twice:
                raise ValueError(f"options {name} and plan both decide this: leave {name} out, or that part of the plan")
        if written.limit_all_gathers is not None and self.collective == "packed":
            raise ValueError(f"option plan: {PACKED_LIMIT}")

    def _check_types(self) -> None:
        for name in (*WHOLE_NUMBERS, "memory_budget"):
            value = getattr(self, name)
            if name != "prefetch" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"option {name} must be a whole number, got {value!r}" + as_bytes(value))
        patterns = self.bucket_modules
        if isinstance(patterns, bytes) or not isinstance(patterns, Iterable) or not all(isinstance(x, str) for x in patterns):
            raise TypeError(f"option bucket_modules must be class names or patterns of module names, got {patterns!r}")
        if self.dump_graphs is not None and not isinstance(self.dump_graphs, str | os.PathLike):
            raise TypeError(f"option dump_graphs must be a folder's name, got {self.dump_graphs!r}")

    def passes_plan(self, module_path: Mapping[str, tuple[str, ...]], on_gloo: bool = False) -> Plan:
        """The passes' plan. ``module_path``: parameter FQN → ``"fqn:ClassName"`` of the modules around it, outermost first.
        Raises ValueError for a ``bucket_modules`` entry that matches none of them.
        ``on_gloo``: gloo carries the collectives (decides options left at "auto")."""
        transport = ("own" if on_gloo else "native") if self.transport == "auto" else self.transport
        limit = self.bucket_bytes if self.min_num_params is None else 4 * self.min_num_params  # FSDP1 counted fp32 parameters
        labels: dict[str, str] = {}
        unused = set(self.bucket_modules)
        for fqn, path in module_path.items():
            for where in reversed(path):
                name, _, cls = where.rpartition(":")
                if hits := {pat for pat in self.bucket_modules if cls == pat or fnmatchcase(name, pat)}:
                    unused -= hits
                    labels.setdefault(fqn, name)
        if unused and module_path:
            classes = sorted({where.rpartition(":")[2] for path in module_path.values() for where in path})
            raise ValueError(
                f"option bucket_modules: {sorted(unused)[0]!r} is neither the class of a module with parameters nor a pattern of its "
                f"name; classes here: {', '.join(classes)}"
            )
        return Plan(
            BucketPlan(limit, labels, self.collective, self.limit_all_gathers, None if transport == "native" else "packed"),
            SchedulePlan(self.prefetch, self.limit_all_gathers, self.limit_reduce_scatters),
            transport,
        )

    def written(self, module_path: Mapping[str, tuple[str, ...]]) -> Written:
        """Option ``plan``, read. Raises ValueError if it names what is none of the parameters in ``module_path``."""
        written: Written = self._written  # type: ignore[attr-defined]
        unknown = sorted(written.fqns - module_path.keys()) if module_path else []
        if unknown:
            near = difflib.get_close_matches(unknown[0], module_path, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"option plan: the model has no parameter {unknown[0]!r}{hint} (a tied one is known by its first name)")
        return written

    def shard_args(self) -> dict[str, Any]:
        """The arguments for `fully_shard`."""
        names = ("mesh", "mp_policy", "reshard_after_forward", "ignored_params", "reduce_op", "sync_module_states", "timeout_s")
        return {n: getattr(self, n) for n in names}


def as_bytes(value: Any) -> str:
    """A hint for sizes given as "25MB"."""
    found = re.fullmatch(r"\s*(\d+)\s*([KMG])i?B?\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    if found is None:
        return ""
    return f" (write {int(found[1]) * 1024 ** ('KMG'.index(found[2].upper()) + 1)})"


def parse(options: Mapping[str, Any] | Options | None) -> Options:
    """A dict of options → `Options`. Raises ValueError for an unknown name (with the valid ones) or a bad value."""
    if isinstance(options, Options):
        return options
    valid = [f.name for f in fields(Options)]
    for name in options or {}:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown option {name!r}.{hint} Valid options: {', '.join(valid)}")
    return Options(**(options or {}))
