"""One Dynamo frame: markers → AOTAutograd → passes → lowering → a callable that has been agreed between ranks."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile import compat, compat_compile, passes, runtime
from fsdp_compile.autoplan import Automatic, decide
from fsdp_compile.carried import WHOLE, Ledger, Share, ledger_of
from fsdp_compile.guarded import Guarded, group_of
from fsdp_compile.lead import Lead, lead_of
from fsdp_compile.options import AUTO, ROWS_FROM, Options
from fsdp_compile.passes import graph_ops, markers
from fsdp_compile.passes.keep import kept
from fsdp_compile.passes.machine import Machine
from fsdp_compile.passes.pipeline import Decision, Observer, Plan, Scheduled, run_passes
from fsdp_compile.passes.rows import rows
from fsdp_compile.passes.written import Written
from fsdp_compile.runtime import hold
from fsdp_compile.runtime.agree import digest
from fsdp_compile.runtime.communicator import is_gloo
from fsdp_compile.spec import ParamSpec
from fsdp_compile.text import human_bytes

log = logging.getLogger("fsdp_compile.passes")

DIRECTIONS = ("forward", "backward")


@dataclass
class Frame:
    """A frame while it is compiled and run. ``observer(stage, graph, direction)`` sees every graph."""

    index: int
    options: Options
    module_path: dict[str, tuple[str, ...]]
    observe: Callable[[str, fx.Graph, str], None] = lambda stage, graph, direction: None
    lower: bool = True
    cached: bool = False  # AOTAutograd's cache may know the graph: then no pass runs and nothing is observed
    escaping: frozenset[str] | None = None  # whose whole value may leave the graph; None: no joint graph was seen (inference)
    written: Written = field(default_factory=Written)  # option plan
    kept: frozenset[str] = frozenset()  # carried from forward to backward
    lead: Lead | None = None  # with option plan="auto": who decides
    held: int = 0  # bytes of gathered weights that no_sync(keep_bytes=...) holds
    ledger: Ledger | None = None  # of what the model's graphs carry; None: that of the sharded model that the graph reads
    share: Share = WHOLE  # of this graph
    decision: Decision | None = None  # what came of it
    ends_early: bool = False  # at a graph break: what it uses last is not what backward uses first
    schedules: list[Scheduled] = field(default_factory=list)

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a Dynamo graph whose parameters are markers."""
        self.observe("dynamo", gm.graph, "joint")
        self.ends_early = compat.graph_break_of(gm) is not None
        markers.refuse_writes(gm)
        markers.dedupe(gm)
        self.observe("dedupe", gm.graph, "joint")
        specs = markers.marker_specs(gm)
        on_gloo = _on_gloo(specs, inputs)
        written = self.written = self.options.written(self.module_path)
        least = self.options.embedding_rows
        if least is None:
            least = ROWS_FROM if _group_over(specs) is not None and _on_cpu(inputs) else 0
        if least and rows(gm, least, written.fqns):
            self.observe("rows", gm.graph, "joint")
        plan = self.options.passes_plan(self.module_path, on_gloo)
        plan = replace(plan, lift=self.options.early_gathers and _on_cpu_ranks(specs, inputs))
        self._find_lead(specs, inputs)
        ledger, reads, mode = self.ledger or ledger_of(gm), frozenset(s.fqn for s in specs), (torch.is_grad_enabled(), self.held)
        self.share = ledger.share(reads, mode)
        if self.lead:
            self._budget()  # before anybody waits for a plan
        topic = _topic(gm, plan, self)

        def decided(graphs: Callable[[], list[tuple[str, fx.Graph]]], escaping: frozenset[str], usual: frozenset[str] | None) -> Decision:
            def run(machine: Machine) -> Decision:
                automatic = Automatic(machine, self._budget(), self.held, self.share)
                found = decide(graphs(), plan, automatic, escaping, usual)
                return found if usual is not None else replace(found, keep=self.kept)

            assert self.lead is not None
            found = self.lead.decision(topic, run)
            size = "the default size" if found.bucket_bytes is None else human_bytes(found.bucket_bytes)
            counts = found.prefetch, len(found.keep)
            log.info("graph %d as rank 0 planned: buckets of %s, prefetch %d, %d weights kept", self.index, size, *counts)
            return found

        def transform(graph_module: fx.GraphModule, is_backward: bool) -> Scheduled:
            direction = "backward" if is_backward else "forward"
            markers.erase_identities(graph_module.graph)  # inference: there was no joint graph
            observer: Observer = lambda stage, g: self.observe(stage, g, direction)  # noqa: E731
            escaping = self._may_escape(graph_module)
            if self.lead and self.decision is None:  # inference again
                self.decision = decided(lambda: [(direction, graph_ops.copied(graph_module.graph))], escaping, None)
            mine = self.decision.applied(plan) if self.decision else written.applied(plan, direction)
            budget = self.options.memory_budget
            try:
                done = run_passes(graph_module.graph, direction, mine, escaping, observer)
            except ValueError as error:
                if budget is None or self.decision is None:
                    raise
                raise ValueError(f"option memory_budget: what was planned for a graph that reads alike cannot be: {error}") from error
            graph_module.recompile()
            room = (budget, self.decision.left) if budget is not None and self.decision and not self.held else None
            return replace(done, decision=self.decision, room=room, carried=self.kept)

        def divide(joint: fx.GraphModule, cut: compat_compile.Cut) -> tuple[fx.GraphModule, fx.GraphModule]:
            escaping = self._may_escape(joint)
            if self.options.memory_budget is None:  # weights are kept by rule
                parts = cut(joint)
                if self.decision is None:
                    graphs = lambda: [(d, graph_ops.copied(g.graph)) for d, g in zip(DIRECTIONS, parts)]  # noqa: E731
                    self.decision = decided(graphs, escaping, None)
                return parts
            if self.decision is None:
                again = lambda: cut(fx.GraphModule(joint, graph_ops.copied(joint.graph)))  # noqa: E731
                may_keep = not self.ends_early and not any(s.reshard for s in specs)
                usual = kept(joint.graph, None) if may_keep else None
                self.decision = decided(lambda: [(d, g.graph) for d, g in zip(DIRECTIONS, again())], escaping, usual)
            self._keep(joint.graph, self.decision.keep)
            return cut(joint)

        def attach(done: Scheduled, fn: Callable[..., Any]) -> Callable[..., Any]:
            if self.lead and self.decision is None and done.decision is not None:  # from AOTAutograd's cache
                self.decision = self.lead.cached(topic, done.decision)
            if done.decision != self.decision:  # what rank 0 decided when this was compiled
                raise compat_compile.cache_miss()
            ledger.carry(reads, done.carried, mode)
            self.schedules.append(done)
            return Guarded(self.index, done, self.options.timeout_s, plan.lift, fn).wrapped()

        if self.options.lowering == "fx":
            return compat_compile.compile_fx_graphs(gm, inputs, transform, attach, self._joint, divide if self.lead else None)
        alone = all(s.world == 1 for s in specs)  # no schedule that Inductor's own order could undo
        machine = (self.lead.calibration or "measured", self._budget(), self._share()) if self.lead else None
        settings = compat_compile.Settings(
            {**({"reorder_for_peak_memory": True} if alone else {}), **self.options.inductor},
            f"{sources_digest()} {plan} {written} {machine} {self._keep_bytes()} {self.ends_early}" if self.cached else "",
            self.cached,
            self.lower,
        )
        return compat_compile.compile_inductor(gm, inputs, transform, attach, self._joint, settings, divide if self.lead else None)

    def _find_lead(self, specs: list[ParamSpec], inputs: Sequence[Any]) -> None:
        """Whether the plan is decided now: wished, or else possible and this machine calibrated."""
        group = _group_over(specs) if self.options.automatic or self.options.may_plan else None
        if group is None or group.size() == 1 or not self.lower:
            return
        device = next((t.device.type for t in inputs if isinstance(t, torch.Tensor)), "cpu")
        lead = lead_of(group, device, self.options.timeout_s)
        if self.options.automatic or lead.calibration:
            self.options = replace(self.options, plan=AUTO)
            self.lead, self.held = lead, hold.held_bytes(group) if self.options.memory_budget is not None else 0

    def _budget(self) -> int | None:
        """What is left of option memory_budget. Raises ValueError if nothing is."""
        budget, held, carried = self.options.memory_budget, self.held, self.share.carried
        if budget is None:
            return None
        if held >= budget:
            raise ValueError(f"option memory_budget: no_sync(keep_bytes=...) holds {held} bytes of weights already, of {budget}")
        if held + carried >= budget:
            raise ValueError(f"option memory_budget: earlier graphs of this model keep {carried} bytes for backward, of {budget}")
        return budget - held - carried

    def _share(self) -> Share | None:
        """The share that is decided by: only a budget has any."""
        return None if self.options.memory_budget is None else self.share

    def _keep_bytes(self) -> int | None:
        """What is left of option keep_bytes."""
        nbytes = self.options.kept_bytes
        return nbytes if nbytes is None else max(0, nbytes - self.share.carried)

    def _joint(self, graph: fx.Graph) -> None:
        self.observe("joint", graph, "joint")
        markers.erase_identities(graph)
        self.kept = kept(graph, 0 if self.ends_early else self._keep_bytes(), self.written.keep)
        self._keep(graph, self.kept)
        self.observe("tagged", graph, "joint")

    def _keep(self, graph: fx.Graph, kept: frozenset[str]) -> None:
        """Let the partitioner carry these from forward to backward, and what the program returns or the user wishes; nothing else."""
        self.kept = kept
        keep = self.escaping = markers.escaping(graph) | kept
        markers.tag_joint(graph, compat.set_recompute, lambda spec: spec.reshard is False or spec.fqn in keep)

    def _may_escape(self, gm: fx.GraphModule) -> frozenset[str]:
        """Parameters whose whole value may leave the graph: returned by the program, or kept for backward by the user's wish."""
        wished = frozenset(s.fqn for s in markers.marker_specs(gm) if s.reshard is False)
        return wished | (markers.escaping(gm.graph) if self.escaping is None else self.escaping)


def _topic(gm: fx.GraphModule, plan: Plan, frame: Frame) -> str:
    """A digest of what a Dynamo graph reads, in order, and with a memory budget of the order in which it uses that. What it computes, and
    on tensors of what sizes, has no part in it: that may differ between ranks, and from one compilation to the next."""
    reads: dict[fx.Node, int] = {}
    seen: list[Any] = []
    for n in gm.graph.nodes:
        used = [reads[a] for a in n.all_input_nodes if a in reads]
        if markers.is_marker(n):
            reads[n] = len(reads)
            seen.append((n.args[1], markers.frozen(n)))
        elif n.target == "detach" and used:
            reads[n] = used[0]
        elif used and frame.options.memory_budget is not None:
            seen.append(used)
    asked = repr((seen, plan, frame.options.memory_budget, frame._share(), frame.ends_early, torch.is_grad_enabled()))
    return digest([re.sub(r" at 0x[0-9a-f]+", "", asked)])  # an unnamed callable says where it lies


def _on_cpu_ranks(specs: list[ParamSpec], inputs: Sequence[Any]) -> bool:
    """Whether these parameters are on CPU ranks (not so in `explain`, which has no ranks). Raises ValueError if they are elsewhere."""
    group = _group_over(specs)
    if group is None or group.size() == 1:
        return False
    if not _on_cpu(inputs):
        raise ValueError("option early_gathers is for CPU ranks: whether a shard has been written since is seen on the host")
    return True


def _on_gloo(specs: list[ParamSpec], inputs: Sequence[Any]) -> bool:
    """Whether gloo carries these parameters' collectives (not so in `explain`, which has no group)."""
    group = _group_over(specs)
    return group is not None and is_gloo(group) and _on_cpu(inputs)


def _group_over(specs: list[ParamSpec]) -> dist.ProcessGroup | None:
    """The group of these parameters' collectives, if there are ranks."""
    return group_of(specs[0].group) if specs and dist.is_initialized() else None


def _on_cpu(inputs: Sequence[Any]) -> bool:
    return all(t.device.type == "cpu" for t in inputs if isinstance(t, torch.Tensor))


@functools.cache
def sources_digest() -> str:
    """Hash of this package's source code: what another version of it compiled is not used."""
    root = Path(passes.__file__).parent
    sources = sorted(f for folder in (Path(__file__).parent, root, Path(runtime.__file__).parent) for f in folder.glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in sources)).hexdigest()[:16]


def dump_to(folder: str, frame: int) -> Callable[[str, fx.Graph, str], None]:
    """An observer that writes each stage's graph as text: ``folder/frame0_forward_3_schedule.txt``. Rank 0 only."""
    counts: dict[str, int] = {}

    def observe(stage: str, graph: fx.Graph, direction: str) -> None:
        if dist.is_initialized() and dist.get_rank():
            return
        os.makedirs(folder, exist_ok=True)
        n = counts[direction] = counts.get(direction, -1) + 1
        with open(os.path.join(folder, f"frame{frame}_{direction}_{n}_{stage}.txt"), "w") as f:
            f.write(graph_text(graph))

    return observe


def graph_text(graph: fx.Graph) -> str:
    """A graph as text: its Python code, the same on every rank."""
    return graph.python_code("self").src


def specs_of(gm: fx.GraphModule) -> list[ParamSpec]:
    """Specs of the markers of a Dynamo graph."""
    return markers.marker_specs(gm)
