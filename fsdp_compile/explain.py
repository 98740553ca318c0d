"""`explain`: what the backend would do to a model, without a process group, without running a step, on any number of ranks.

::

    model ── Dynamo ──► graph whose parameters are inputs
                          │  parameter → a fake 1-D shard and one unshard marker: what reading a sharded module traces to
                          ▼
                        Frame.compile, every stage kept as text, nothing lowered       ──►  Report
                          │
                          ▼
                        the graph as it was runs, so that code after a graph break is reached
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fsdp_compile import compat
from fsdp_compile.api import add_casts, module_classes, owners_of, policy_of, specs_for
from fsdp_compile.carried import Ledger
from fsdp_compile.frame import Frame
from fsdp_compile.options import Options, parse
from fsdp_compile.passes.cost import Work, work_of
from fsdp_compile.passes.graph_ops import UNSHARD
from fsdp_compile.passes.markers import is_marker
from fsdp_compile.passes.pipeline import op_counts
from fsdp_compile.passes.roles import nodes_of
from fsdp_compile.paths import module_paths
from fsdp_compile.report import BucketRow, GraphReport, Report, Stage
from fsdp_compile.runtime.layout import make_layout
from fsdp_compile.runtime.sharding import state_of
from fsdp_compile.spec import ParamSpec, decode
from fsdp_compile.text import readable

GROUP = "fsdp"  # the process group's name in the graphs


def explain(
    model: nn.Module,
    *inputs: Any,
    world_size: int = 8,
    input_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Compile ``model`` as ``torch.compile(model, backend="fsdp", options=options)`` would on ``world_size`` ranks; see the result.

    The model runs once, on copies of ``inputs`` and of its buffers; it is not changed, nothing communicates. A model on the meta
    device may be of any size (tensors among the inputs are moved to meta). A model that `fully_shard` has sharded is explained for
    its own group. Under ``torch.no_grad()`` the report holds inference graphs, else forward and backward. Where the machine is
    calibrated the backend may plan by itself: what is shown is ``plan="fixed"`` (`fsdp_compile.make_plan` shows the other).

    Raises ValueError and TypeError as `fully_shard` and the backend do for bad options or parameters, RuntimeError if Dynamo
    compiled nothing."""
    opts = parse(options)
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if opts.automatic:
        raise ValueError("explain knows no machine to plan for: make a plan with make_plan(model, *inputs, machine=...) and explain that")
    model = compat.original_module(model)
    subject = _sharded(model, opts) if state_of(model) is not None else _plain(model, opts, world_size)
    meta = any(p.is_meta for p in model.parameters())
    capture = _Capture(opts, subject)
    args, kwargs = _copies((inputs, dict(input_kwargs or {})), meta)
    with _untouched(model, meta), contextlib.ExitStack() as undo:
        for m, name, stand_in in subject.stand_ins:
            m._parameters[name] = stand_in
        for handle in add_casts(model, subject.casts):
            undo.callback(handle.remove)

        def call(*a: Any, **k: Any) -> Any:
            return model(*a, **k)

        try:
            compat.compile_isolated(call, capture)(*args, **kwargs)
        except Exception:
            if capture.error is not None:
                raise capture.error from None  # ours, without Dynamo's wrapping
            raise
    frames = [f for f in capture.frames if f.calls]
    if not frames:
        raise RuntimeError("Dynamo compiled no graph: torch.compile is disabled here, or the model holds no operation on tensors")
    return _report(type(model).__name__, subject, frames, opts)


@dataclass(frozen=True)
class _Subject:
    """What is known of the model before tracing. ``stand_ins``: parameters in their compute dtype, to be read in the trace."""

    world: int
    specs: dict[int, ParamSpec]  # by id of the parameter that the trace sees
    trainable: dict[str, bool]
    paths: dict[str, tuple[str, ...]] | None
    casts: Any
    shard_bytes: int
    sizes: tuple[ParamSpec, ...]
    stand_ins: tuple[tuple[nn.Module, str, nn.Parameter], ...] = ()


def _plain(model: nn.Module, opts: Options, world: int) -> _Subject:
    group = GROUP
    if opts.mesh is not None:
        group, world = opts.mesh.get_group().group_name, opts.mesh.size()
    owners = owners_of(model, {id(p) for p in opts.ignored_params or ()})
    policy = policy_of(opts.mp_policy)
    specs = specs_for(owners, group, world, policy, opts.reduce_op, opts.reshard_after_forward)
    seen, stand_ins = {}, []
    for i, (p, places) in owners.items():
        read = p
        if specs[i].compute_dtype != p.dtype:
            read = nn.Parameter(p.detach().to(specs[i].compute_dtype), requires_grad=p.requires_grad)
            stand_ins += [(m, name, read) for m, name, _ in places]
        seen[id(read)] = specs[i]
    trainable = {specs[i].fqn: p.requires_grad for i, (p, _) in owners.items()}
    kinds: dict[tuple[torch.dtype, bool], list[ParamSpec]] = {}
    for s in specs.values():
        kinds.setdefault((s.dtype, trainable[s.fqn]), []).append(s)
    nbytes = sum(make_layout(same).nbytes for same in kinds.values())
    return _Subject(world, seen, trainable, module_classes(model), policy, nbytes, tuple(specs.values()), tuple(stand_ins))


def _sharded(model: nn.Module, opts: Options) -> _Subject:
    state = state_of(model)
    assert state is not None
    specs = tuple(decode(p._fsdp_spec) for p in model.parameters() if hasattr(p, "_fsdp_spec"))
    return _Subject(state.mesh.size(), {}, {}, None, policy_of(None), state.buffer_bytes, specs)


@dataclass
class _Explained:
    """One captured frame."""

    stages: list[Stage] = field(default_factory=list)
    graphs: list[GraphReport] = field(default_factory=list)
    kept: frozenset[str] = frozenset()
    exchanged: frozenset[str] = frozenset()
    calls: int = 0


class _Capture:
    """The Dynamo backend of `explain`."""

    def __init__(self, opts: Options, subject: _Subject) -> None:
        self.opts, self.subject = opts, subject
        self.frames: list[_Explained] = []
        self.ledger = Ledger({s.fqn: s.gathered_bytes for s in subject.sizes})
        self.error: Exception | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return self._compile(gm, list(example_inputs))
        except Exception as e:
            self.error = e
            raise

    def _compile(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        run = _runnable(gm)
        if self.subject.specs:
            _insert_markers(gm, inputs, self.subject.specs)
        compat.leave_meta(gm, inputs)
        gm.recompile()
        paths = self.subject.paths
        if paths is None:
            paths = module_paths([decode(n.args[1]) for n in gm.graph.nodes if is_marker(n)])
        out = _Explained()
        keep = _Keeper(len(self.frames), out)
        frame = Frame(len(self.frames), self.opts, paths, observe=keep, lower=False, ledger=self.ledger)
        with compat.eager_backward_compile():
            frame.compile(gm, inputs)
        for ends, done in zip(keep.ends, frame.schedules):
            rows = tuple(
                BucketRow(
                    frame.index, done.direction, c.kind, c.bucket, c.params, c.nbytes, c.dtype, c.launch, c.wait, c.lead,
                    ends.frees.get(c.bucket, ends.last) if c.kind == "all_gather" else None,
                )
                for c in done.collectives
            )
            graph = GraphReport(frame.index, done.direction, ends.first, ends.last, rows, done.peak_gathered_bytes, ends.work)
            out.graphs.append(graph)
        out.kept = frame.kept
        out.exchanged = frozenset(s.fqn for done in frame.schedules for s in done.exchanged)
        self.frames.append(out)

        def runner(*args: Any) -> Any:
            out.calls += 1
            return run(*args)

        return runner


@dataclass(frozen=True)
class _Ends:
    """Of one verified graph: positions of its first operation and its output, bucket → position of its last free, and its cost."""

    first: int
    last: int
    frees: dict[str, int]
    work: Work


class _Keeper:
    """Observer that keeps each stage. Its own work does not count into the passes' times."""

    def __init__(self, frame: int, out: _Explained) -> None:
        self.frame, self.out = frame, out
        self.ends: list[_Ends] = []
        self.since = time.perf_counter()

    def __call__(self, stage: str, graph: fx.Graph, direction: str) -> None:
        took = time.perf_counter() - self.since
        self.out.stages.append(Stage(self.frame, direction, stage, readable(graph), dict(op_counts(graph)), took))
        if stage == "verify":
            inputs = sum(1 for _ in itertools.takewhile(lambda n: n.op in ("placeholder", "get_attr"), graph.nodes))
            at = {n: i for i, n in enumerate(graph.nodes)}
            frees = {r.bucket: at[n] for n, r in nodes_of(graph, "free")}
            self.ends.append(_Ends(inputs, len(at) - 1, frees, work_of(graph, direction)))
        self.since = time.perf_counter()


# --- From a plain graph to one with markers -------------------------------------------------------------------------------


def _insert_markers(gm: fx.GraphModule, inputs: list[Any], specs: Mapping[int, ParamSpec]) -> None:
    """Each parameter among the placeholders becomes a fake shard, read through one marker before its first use."""
    graph = gm.graph
    at = {n: i for i, n in enumerate(graph.nodes)}
    # A marker inside a no_grad region would cut the gradients of uses after it.
    barrier = next((n for n in graph.nodes if n.target is torch._C._set_grad_enabled), None)
    for i, (node, value) in enumerate(compat.placeholder_values(gm).items()):
        spec = specs.get(id(value)) if isinstance(value, nn.Parameter) else None
        if spec is None or not node.users:
            continue
        first = min((*node.users, *([barrier] if barrier is not None else [])), key=at.__getitem__)
        users = list(node.users)
        with graph.inserting_before(first):
            whole = graph.call_function(UNSHARD, (node, spec.encode()))
            whole.meta["example_value"] = node.meta["example_value"]
            if not value.requires_grad:
                whole = graph.call_method("detach", (whole,))
        for u in users:
            u.replace_input_with(node, whole)
        inputs[i] = compat.fake_shard(node, spec.shard_numel, spec.dtype, value.requires_grad)


def _runnable(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph to run, of its own graphs but with the same tensors. Markers of a sharded model deliver zeros:
    nothing communicates."""
    out = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for n in out.graph.nodes:
        if is_marker(n):
            n.target = _zeros_for
    for name, child in list(out.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(out, name, _runnable(child))
    out.recompile()
    return out


def _zeros_for(shard: Tensor, text: str) -> Tensor:
    spec = decode(text)
    return shard.detach().new_zeros(spec.shape, dtype=spec.compute_dtype).requires_grad_(shard.requires_grad)


# --- Leaving the model alone ----------------------------------------------------------------------------------------------


def _copies(tree: Any, meta: bool) -> Any:
    def one(t: Tensor) -> Tensor:
        new = t.detach().to("meta") if meta else t.detach().clone()
        compat.copy_marks(t, new)
        return new.requires_grad_(t.requires_grad)

    return pytree.tree_map_only(Tensor, one, tree)


@contextlib.contextmanager
def _untouched(model: nn.Module, meta: bool) -> Iterator[None]:
    """Inside, the model works on copies of its buffers (on the meta device if ``meta``) and whatever it sets on its modules is
    undone; the random state, too."""
    names = ("_parameters", "_buffers", "_modules")
    kept = [(m, dict(m.__dict__), {k: dict(m.__dict__[k]) for k in names}) for m in model.modules()]
    copies: dict[int, Tensor] = {}
    for m, _, _ in kept:
        m.__dict__.pop("_compiled_call_impl", None)
        for name, b in m._buffers.items():
            if b is not None:
                m._buffers[name] = copies.setdefault(id(b), b.detach().to("meta") if meta else b.detach().clone())
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for m, attributes, inner in kept:
            m.__dict__.clear()
            m.__dict__.update(attributes)
            for k, v in inner.items():
                m.__dict__[k].clear()
                m.__dict__[k].update(v)


def _report(name: str, subject: _Subject, frames: list[_Explained], opts: Options) -> Report:
    written = opts.written({})
    stages: list[Stage] = []
    graphs: list[GraphReport] = []
    for i, f in enumerate(frames):  # frames that never ran have been dropped: number the others anew
        stages += [replace(s, frame=i) for s in f.stages]
        graphs += [replace(g, frame=i, buckets=tuple(replace(b, frame=i) for b in g.buckets)) for g in f.graphs]
    return Report(
        model=name,
        world_size=subject.world,
        parameters=sum(s.numel for s in subject.sizes),
        parameter_bytes=sum(s.numel * s.dtype.itemsize for s in subject.sizes),
        shard_bytes=subject.shard_bytes,
        stages=tuple(stages),
        graphs=tuple(graphs),
        calls=tuple(f.calls for f in frames),
        limit_gathers=opts.limit_all_gathers if written.limit_all_gathers is None else written.limit_all_gathers,
        prefetch={d: written.prefetch.get(d, (opts.prefetch,)) for d in ("forward", "backward")},
        kept=frozenset().union(*(f.kept for f in frames)),
        exchanged=frozenset().union(*(f.exchanged for f in frames)),
    )
