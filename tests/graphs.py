"""Forward and backward graphs with markers, and ranks that execute them in one process: no process group, no other process.

A `Program` is a function of parameters and inputs. `capture` traces it through AOTAutograd as the backend does, up to the passes.
`train` runs the passes and executes both graphs on simulated `Ranks`; `reference` is the same in plain eager PyTorch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsdp_compile.runtime.ops  # noqa: F401  (registers the operators)
import torch
import torch._functorch.config
from fsdp_compile.passes import markers
from fsdp_compile.passes.bucket import BucketPlan, bucket
from fsdp_compile.passes.exchange import exchange
from fsdp_compile.passes.graph_ops import REDUCE_GRAD, UNSHARD
from fsdp_compile.passes.insert import Inserted, insert
from fsdp_compile.passes.keep import kept as keep_of
from fsdp_compile.passes.pipeline import Plan, Scheduled, run_passes
from fsdp_compile.passes.schedule import SchedulePlan, schedule
from ranks import Ranks, reduce_
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compile import compat, compat_compile
from fsdp_compile.spec import ParamSpec

Read = Callable[[str], Any]


def spec(fqn: str, *shape: int, world: int = 2, dtype: torch.dtype = torch.float64, **kwargs: Any) -> ParamSpec:
    """A spec of group "g"; scalars are replicated."""
    given = {"compute_dtype": dtype, "reduce_dtype": dtype.to_real() if dtype.is_complex else dtype, "group": "g", **kwargs}
    return ParamSpec(fqn, shape, dtype, world=world, kind="shard" if shape else "replicate", **given)


@dataclass(frozen=True)
class Program:
    """``fn(read, *inputs)`` returns one tensor or a tuple; ``read(fqn)`` reads a parameter, as often as it likes."""

    fn: Callable[..., Any]
    specs: tuple[ParamSpec, ...]
    inputs: tuple[Tensor, ...] = ()
    frozen: frozenset[str] = frozenset()
    seed: int = 0

    @property
    def world(self) -> int:
        return self.specs[0].world

    def full(self) -> dict[str, Tensor]:
        """The whole parameters, the same on every call."""
        gen = torch.Generator().manual_seed(self.seed)
        return {s.fqn: torch.randn(s.shape, generator=gen, dtype=s.dtype) for s in self.specs}

    def inputs_of(self, rank: int) -> list[Tensor]:
        """Each rank's own inputs."""
        gen = torch.Generator().manual_seed(1000 + self.seed * 10 + rank)
        return [torch.randn(x.shape, generator=gen, dtype=x.dtype) for x in self.inputs]

    def shards(self, rank: int) -> list[Tensor]:
        """Rank's shards, padded with zeros."""
        return [shard(s, v, rank) for s, v in zip(self.specs, self.full().values())]


def shard(s: ParamSpec, value: Tensor, rank: int) -> Tensor:
    """One rank's padded shard of a whole parameter."""
    if s.kind == "replicate":
        return value.reshape(-1).clone()
    flat = torch.zeros(s.padded_numel, dtype=value.dtype)
    flat[: s.numel] = value.reshape(-1)
    return flat[rank * s.shard_numel : (rank + 1) * s.shard_numel].clone()


def unshard_all(s: ParamSpec, parts: Sequence[Tensor]) -> Tensor:
    """The whole parameter from all ranks' shards."""
    return parts[0].reshape(s.shape) if s.kind == "replicate" else torch.cat(list(parts))[: s.numel].reshape(s.shape)


# --- capture ----------------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """A program's graphs just before the passes. ``forward()`` and ``backward()`` give fresh copies."""

    escaping: frozenset[str] = frozenset()
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    joint: fx.Graph | None = None

    def forward(self) -> fx.GraphModule:
        return copy.deepcopy(self.graphs["forward"])

    def backward(self) -> fx.GraphModule:
        return copy.deepcopy(self.graphs["backward"])


def dynamo_graph(program: Program) -> fx.GraphModule:
    """The program as Dynamo would hand it over: shards and inputs are placeholders, each read is a marker."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    shards = {s.fqn: graph.placeholder(f"shard_{i}") for i, s in enumerate(program.specs)}
    inputs = [fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(program.inputs))]
    by_name = {s.fqn: s for s in program.specs}

    def read(fqn: str) -> fx.Proxy:
        w = fx.Proxy(graph.call_function(UNSHARD, (shards[fqn], by_name[fqn].encode())), tracer)
        return w.detach() if fqn in program.frozen else w

    out = program.fn(read, *inputs)
    graph.output(tuple(o.node for o in out) if isinstance(out, tuple) else (out.node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def capture(program: Program, style: str = "fx", grad: bool = True, keep_bytes: int = 0) -> Captured:
    """Trace ``program`` up to the passes. ``style``: "fx" (eager's kernels) or "inductor" (Inductor's decompositions)."""
    gm = dynamo_graph(program)
    markers.dedupe(gm)
    args = [x.requires_grad_(grad and s.fqn not in program.frozen) for s, x in zip(program.specs, program.shards(0))]
    got = Captured()

    def joint(graph: fx.Graph) -> None:
        got.joint = copy.deepcopy(graph)
        got.escaping = keep = markers.escaping(graph) | keep_of(graph, keep_bytes)
        markers.tag_joint(graph, compat.set_recompute, lambda s: s.reshard is False or s.fqn in keep)

    def transform(graph_module: fx.GraphModule, is_backward: bool) -> None:
        got.graphs["backward" if is_backward else "forward"] = copy.deepcopy(graph_module)

    def attach(payload: None, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    with compat.eager_backward_compile():
        if style == "fx":
            compat_compile.compile_fx_graphs(gm, args + program.inputs_of(0), transform, attach, joint)
        else:
            compat_compile.compile_inductor(gm, args + program.inputs_of(0), transform, attach, joint, compat_compile.Settings(lower=False))
    kept = frozenset(s.fqn for s in program.specs if s.reshard is False)
    if got.joint is None:
        got.escaping = markers.escaping(got.graphs["forward"].graph)
    got.escaping |= kept
    return got


def scheduled(gm: fx.GraphModule, direction: str, plan: Plan | None = None) -> Inserted:
    """insert, bucket and schedule: a good graph, still with its ``free`` nodes."""
    plan = plan or Plan()
    done = insert(gm.graph, direction)
    bucket(gm.graph, plan.bucket)
    if plan.transport != "native":
        exchange(gm.graph, plan.transport)
    schedule(gm.graph, plan.schedule)
    gm.graph.lint()
    return done


def plan_of(
    bucket_bytes: int = 25 << 20,
    mode: str = "coalesced",
    prefetch: int = 1,
    limit: int | None = None,
    labels: dict[str, str] | None = None,
    reduces: int | None = None,
    transport: str = "native",
) -> Plan:
    """A plan in one line."""
    buckets = BucketPlan(bucket_bytes, labels or {}, mode, limit, None if transport == "native" else "packed")
    return Plan(buckets, SchedulePlan(prefetch, limit, reduces), transport)


def text(graph: fx.Graph) -> str:
    """The graph's calls, one a line, without types and numbers of Inductor."""
    lines = []
    for n in graph.nodes:
        if n.op == "call_function":
            name = getattr(n.target, "__name__", str(n.target)).split(".")[0]
            lines.append(f"{n.name} = {name}({', '.join(a.name for a in n.all_input_nodes)})")
        elif n.op == "output":
            lines.append(f"return {', '.join(a.name for a in n.all_input_nodes)}")
    return "\n".join(lines) + "\n"


# --- running a program ------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """Outputs of each rank, the whole gradient of each parameter (None: none), and the passes' results."""

    outputs: list[list[Tensor]]
    grads: dict[str, Tensor | None]
    forward: Scheduled | None = None
    backward: Scheduled | None = None


def _passes(gm: fx.GraphModule, direction: str, plan: Plan, escaping: frozenset[str]) -> tuple[fx.GraphModule, Scheduled]:
    """All passes; returned is the graph before lowering (with frees, which the simulated ranks obey)."""
    seen: dict[str, fx.Graph] = {}

    def watch(stage: str, graph: fx.Graph) -> None:
        graph.lint()
        if stage == "verify":
            seen[stage] = copy.deepcopy(graph)

    done = run_passes(gm.graph, direction, plan, escaping, watch)
    return fx.GraphModule(gm, seen["verify"]), done


def train(program: Program, plan: Plan, captured: Captured | None = None, style: str = "fx") -> Trained:
    """Forward and backward on every rank, through all passes."""
    got = captured or capture(program, style)
    world = program.world
    fw, bw = got.forward(), got.backward() if "backward" in got.graphs else None
    names = [a.name if isinstance(a, fx.Node) else None for a in fw.graph.output_node().args[0]]
    fw, fw_done = _passes(fw, "forward", plan, got.escaping)
    outs = Ranks(fw, world).run([program.shards(r) + program.inputs_of(r) for r in range(world)])
    if bw is None:
        return Trained(outs, {}, fw_done)
    wants = [n.name for n in bw.graph.nodes if n.op == "placeholder"]
    count = sum(w.startswith("tangents") for w in wants)
    args = []
    for r in range(world):
        saved = dict(zip(names[count:], outs[r][count:]))
        saved.update({f"tangents_{i + 1}": t for i, t in enumerate(tangents(outs[r][:count]))})
        args.append([saved[w] for w in wants])
    bw, bw_done = _passes(bw, "backward", plan, got.escaping)
    back = Ranks(bw, world).run(args)
    grads: dict[str, Tensor | None] = {}
    for i, s in enumerate(program.specs):
        grads[s.fqn] = None if back[0][i] is None else unshard_all(s, [b[i] for b in back])
    return Trained([o[:count] for o in outs], grads, fw_done, bw_done)


def tangents(outs: Sequence[Tensor]) -> list[Tensor]:
    """Fixed gradients of the outputs."""
    gen = torch.Generator().manual_seed(7)
    return [torch.randn(o.shape, generator=gen, dtype=o.dtype) for o in outs]


def reference(program: Program) -> Trained:
    """Plain eager PyTorch on whole parameters; gradients are reduced over ranks in the reduce dtype."""
    outputs, found = [], []
    for r in range(program.world):
        full = {k: v.requires_grad_(k not in program.frozen) for k, v in program.full().items()}
        used = {s.fqn: full[s.fqn].to(s.compute_dtype) for s in program.specs}  # one cast, as one marker has
        out = program.fn(used.__getitem__, *program.inputs_of(r))
        outs = list(out) if isinstance(out, tuple) else [out]
        mids = [used[s.fqn] for s in program.specs if s.fqn not in program.frozen]
        grads = torch.autograd.grad(outs, mids, tangents(outs), allow_unused=True)
        found.append(dict(zip((s.fqn for s in program.specs if s.fqn not in program.frozen), grads)))
        outputs.append([o.detach() for o in outs])
    grads_of: dict[str, Tensor | None] = {}
    for s in program.specs:
        parts = [f.get(s.fqn) for f in found]
        if any(p is None for p in parts):
            grads_of[s.fqn] = None
        else:
            wire = s.dtype if s.dtype.is_complex else s.reduce_dtype
            grads_of[s.fqn] = reduce_((p.to(wire) for p in parts if p is not None), s.reduce_op).to(s.dtype)
    return Trained(outputs, grads_of)


def assert_same(got: Trained, want: Trained, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Outputs and gradients agree; parameters without a gradient agree on that."""
    for g, w in zip(got.outputs, want.outputs):
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol)
    assert {k: v is None for k, v in got.grads.items()} == {k: v is None for k, v in want.grads.items()}
    for fqn, w in want.grads.items():
        if w is not None:
            torch.testing.assert_close(got.grads[fqn], w, rtol=rtol, atol=atol, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


def chain(depth: int, width: int = 3, world: int = 2, per_layer: int = 1, tail: int = 0, **kwargs: Any) -> Program:
    """``x → tanh(x @ w0) → …``: ``depth`` layers of ``per_layer`` matrices ``width × width`` (the last row-count uneven)."""
    specs = tuple(spec(f"layer{i}.w{j}", width, width, world=world, **kwargs) for i in range(depth) for j in range(per_layer))

    def fn(read: Read, x: Any) -> Any:
        for i in range(depth):
            for j in range(per_layer):
                x = torch.tanh(x @ read(f"layer{i}.w{j}"))
        return x

    dtype = kwargs.get("compute_dtype", kwargs.get("dtype", torch.float64))
    return Program(fn, specs, (torch.empty(2, width, dtype=dtype),))


def synthetic(layers: int, per_layer: int, width: int = 4, world: int = 2) -> fx.Graph:
    """A graph like a backward's, written directly (tracing a thousand parameters takes a minute): each parameter is read and its
    gradient reduced."""
    graph = fx.Graph()
    mode = FakeTensorMode()
    specs = [spec(f"layer{i}.w{j}", width, width, world=world) for i in range(layers) for j in range(per_layer)]

    @functools.cache
    def value(*shape: int) -> Tensor:
        with mode:
            return torch.empty(shape, dtype=torch.float64)

    def add(node: fx.Node, *shape: int) -> fx.Node:
        node.meta["val"] = value(*shape)
        return node

    shards = [add(graph.placeholder(f"shard_{i}"), s.shard_numel) for i, s in enumerate(specs)]
    x = add(graph.placeholder("x"), width, width)
    grads = []
    for shard_node, s in zip(shards, specs):
        w = add(graph.call_function(UNSHARD, (shard_node, s.encode())), width, width)
        x = add(graph.call_function(torch.ops.aten.mm.default, (x, w)), width, width)
        grads.append(add(graph.call_function(REDUCE_GRAD, (x, s.encode())), s.shard_numel))
    graph.output((x, *grads))
    return graph
