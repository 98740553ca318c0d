"""What a graph does, in order, as amounts: kernels with their FLOPs and bytes, launches, waits, frees. No machine yet.

Matmuls, convolutions and attention (what torch has a FLOP formula for) and operators that are not torch's own are kernels by
themselves. Everything else is fused as Inductor does it, by a simple rule::

    mm                       a run of light operations ends at each heavy one, and at a collective that sends one of its results
    ┌──────────────────┐
    │ mul → add → sum  │     within a run, what is connected through values (views are free and carry through) is one kernel:
    │       └→ cast    │     it reads each outside buffer once and writes only what is used outside
    └──────────────────┘
    mm

A kernel stands where its last member stands: all that it reads, a gathered weight too, has then arrived.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fsdp_compile import compat
from fsdp_compile.spec import decode, dtype_name

from .exchange import ALL_TO_ALLS
from .graph_ops import alias_closure, aten, c10d, is_alias_op, output_of, positions, sources, world_of
from .keep import deaths
from .roles import role_of
from .rows import EMBED, EMBED_GRAD

log = logging.getLogger("fsdp_compile.passes")

_LAUNCHES = ("gather", "reduce")
_WAITS = ("wait_gather", "wait_reduce")
_COALESCED = (
    c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor_coalesced.default,
    torch.ops.fsdp_compile.all_gather_coalesced.default,
)
# Read about as much of their first input as they write, not the whole of it.
_PICK = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default, EMBED}
_EXCHANGES = (EMBED, EMBED_GRAD)
_OURS = ("aten", "prims", "prim", "fsdp_compile")


@dataclass(frozen=True)
class Kernel:
    """Compute. ``flops`` (0: not a matmul) and ``nbytes`` read and written, by the sizes seen when compiling; ``flops_expr`` and
    ``bytes_expr`` are the same as sympy expressions (numbers where shapes are static). ``ours``: nothing of the program's is in it,
    only casts and copies around collectives. ``exchange``: a collective that it starts and waits for (`passes.rows`)."""

    name: str
    flops: int
    nbytes: int
    dtype: str
    flops_expr: Any = 0
    bytes_expr: Any = 0
    ours: bool = False
    exchange: Launch | None = None

    def __post_init__(self) -> None:
        if self.flops < 0 or self.nbytes < 0:
            raise ValueError(f"kernel {self.name}: negative cost, {self.flops} FLOPs, {self.nbytes} bytes")


@dataclass(frozen=True)
class Launch:
    """A collective starts. ``nbytes``: of a gather's output, of a reduction's input; ``lowering``: "coalesced" or "packed"; ``params``:
    FQNs of what travels."""

    bucket: str
    kind: str
    lowering: str
    dtype: str
    group: str
    world: int
    nbytes: int
    params: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Compute needs what ``bucket`` delivers."""

    bucket: str


@dataclass(frozen=True)
class Free:
    """``nbytes`` of gathered buffers of ``bucket`` are no longer needed; of what forward left to backward: ``"kept FQN"``."""

    bucket: str
    nbytes: int


Event = Kernel | Launch | Wait | Free


@dataclass(frozen=True)
class Work:
    """One graph: its direction and its events in order. Gathered buffers that leave the graph have no `Free`."""

    direction: str
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        flying: set[str] = set()
        for e in self.events:
            if isinstance(e, Launch):
                flying.add(e.bucket)
            elif isinstance(e, Wait) and e.bucket not in flying:
                raise ValueError(f"{self.direction} graph: bucket {e.bucket} is waited for before its launch")

    @property
    def kernels(self) -> list[Kernel]:
        """The compute, in order."""
        return [e for e in self.events if isinstance(e, Kernel)]

    @property
    def launches(self) -> list[Launch]:
        """The collectives, in launch order."""
        return [e for e in self.events if isinstance(e, Launch)]


def work_of(graph: fx.Graph, direction: str) -> Work:
    """Read a scheduled graph, before or after `lower`. Nodes without a fake value (``node.meta["val"]``) cost nothing."""
    at = positions(graph)
    events: list[tuple[int, int, Event]] = [(at[k[-1]], 1, _kernel(k)) for k in _kernels(graph, at)]
    for n in graph.nodes:
        role = role_of(n)
        if role is None:
            continue
        if role.kind in _LAUNCHES:
            events.append((at[n], 0, _launch(n)))
        elif role.kind in _WAITS:
            events.append((at[n], 0, Wait(role.bucket)))
    events += [(place, 2, free) for place, free in _frees(graph, at)]
    return Work(direction, tuple(e for _, _, e in sorted(events, key=lambda x: x[:2])))


def _launch(node: fx.Node) -> Launch:
    role = role_of(node)
    assert role is not None
    reduce = "all_to_all" if node.target in ALL_TO_ALLS else "reduce_scatter"
    return Launch(
        bucket=role.bucket,
        kind="all_gather" if role.kind == "gather" else reduce,
        lowering="coalesced" if node.target in _COALESCED else "packed",
        dtype=dtype_of(sources(node)[0].meta["val"]),
        group=str(node.args[-1]),
        world=world_of(node),
        nbytes=role.nbytes,
        params=role.params,
    )


def _frees(graph: fx.Graph, at: dict[fx.Node, int]) -> Iterable[tuple[int, Free]]:
    """Where each gathered buffer dies: at its ``free``, or in a lowered graph after the last use of any view of it, as one that
    forward has kept does."""
    out = output_of(graph)
    freed = set()
    for n in graph.nodes:
        role = role_of(n)
        if role is not None and role.kind == "free":
            freed.add(role.bucket)
            yield at[n], Free(role.bucket, role.nbytes)
    yield from ((place, Free(f"kept {kept.fqn}", kept.nbytes)) for kept, place in deaths(graph, at.__getitem__).items())
    for n in graph.nodes:
        role = role_of(n)
        if role is None or role.kind != "wait_gather" or role.bucket in freed:
            continue
        users = {u for a in alias_closure([n]) for u in (a, *a.users)}
        if out not in users:
            yield max(at[u] for u in users), Free(role.bucket, compat.size_hint(nbytes_of(n.meta["val"])))


# --- Kernels ------------------------------------------------------------------------------------------------------------


def is_free(node: fx.Node) -> bool:
    """Whether a call moves no data: a view, a getitem, a reshape of contiguous memory."""
    if node.target is aten.reshape.default:
        value = node.all_input_nodes[0].meta.get("val")
        return not isinstance(value, Tensor) or value.is_contiguous()
    return is_alias_op(node)


def is_heavy(node: fx.Node) -> bool:
    """Whether a call is a kernel of its own, which nothing is fused into."""
    namespace = getattr(node.target, "namespace", None)
    own = node.target in _EXCHANGES or namespace not in _OURS
    return compat.flop_formula(node.target) is not None or (own and node.target is not operator.getitem)


def _computes(node: fx.Node) -> bool:
    if node.op != "call_function" or not any(isinstance(v, Tensor) for v in pytree.tree_leaves(node.meta.get("val"))):
        return False
    role = role_of(node)
    return (role is None or role.kind in ("cast", "unpack", "pack", "grad")) and not is_free(node)


def _kernels(graph: fx.Graph, at: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """The graph's kernels, each a list of nodes in graph order."""
    out: list[list[fx.Node]] = []
    run: dict[fx.Node, fx.Node] = {}  # light node of the current run → representative of its kernel

    def find(n: fx.Node) -> fx.Node:
        while run[n] is not n:
            n = run[n]
        return n

    def end_run() -> None:
        groups: dict[fx.Node, list[fx.Node]] = {}
        for n in run:
            groups.setdefault(find(n), []).append(n)
        out.extend(groups.values())
        run.clear()

    for n in graph.nodes:
        role = role_of(n)
        if role is not None and role.kind in _LAUNCHES:
            if any(s in run for s in _bases(n)):
                end_run()
        elif _computes(n):
            if is_heavy(n):
                end_run()
                out.append([n])
            else:
                run[n] = n
                for base in _bases(n):
                    if base in run:
                        run[find(base)] = n
    end_run()
    return sorted(out, key=lambda k: at[k[-1]])


def _bases(node: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """Inputs by the node that made their memory: through views, waits and getitems."""
    out: dict[fx.Node, list[fx.Node]] = {}
    for a in node.all_input_nodes:
        base = a
        while base.op == "call_function" and _made_no_memory(base) and base.all_input_nodes:
            base = base.all_input_nodes[0]
        out.setdefault(base, []).append(a)
    return out


def _made_no_memory(node: fx.Node) -> bool:
    return is_free(node) and not (node.target is operator.getitem and is_heavy(node.args[0]))  # type: ignore[arg-type]


def _kernel(nodes: Sequence[fx.Node]) -> Kernel:
    members = set(nodes)
    read: dict[fx.Node, dict[fx.Node, Any]] = {}  # buffer → view of it → bytes
    written: Any = 0
    for n in nodes:
        for base, views in _bases(n).items():
            if base not in members:
                picks = n.target in _PICK and views[0] is n.args[0]
                read.setdefault(base, {}).update((v, nbytes_of((n if picks else v).meta.get("val"))) for v in views)
        if not _stays_inside(n, members):
            written = written + nbytes_of(n.meta.get("val"))
    flops = _flops(nodes[0]) if len(nodes) == 1 else 0
    moved = written
    for base, views_of in read.items():  # overlapping views are not read twice: never more than the whole buffer
        moved = moved + _least(sum(views_of.values()), nbytes_of(base.meta.get("val")))
    name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name}..{nodes[-1].name}"
    dtype = _operand_dtype(nodes[0])
    ours = all(role_of(n) is not None for n in nodes)
    exchange = _exchange(nodes[0]) if nodes[0].target in _EXCHANGES else None
    return Kernel(name, _size(flops), _size(moved), dtype, compat.size_expr(flops), compat.size_expr(moved), ours, exchange)


def _exchange(node: fx.Node) -> Launch:
    """What an embedding sends, if its batch names no row twice."""
    _, indices, text, _ = node.args
    assert isinstance(indices, fx.Node)
    spec = decode(text)  # type: ignore[arg-type]
    dtype = spec.compute_dtype if node.target is EMBED else spec.reduce_dtype
    nbytes = min(_size(indices.meta["val"].numel()), spec.shape[0]) * spec.row_numel * dtype.itemsize
    return Launch(f"rows of {spec.fqn}", "all_to_all", "packed", dtype_name(dtype), spec.group, spec.world, nbytes, (spec.fqn,))


def _stays_inside(node: fx.Node, members: set[fx.Node]) -> bool:
    """Whether a value is only used, through views, by its own kernel."""
    todo, seen = [node], {node}
    while todo:
        for u in todo.pop().users:
            if u in members or u in seen:
                continue
            if u.op == "call_function" and is_free(u):
                seen.add(u)
                todo.append(u)
            else:
                return False
    return True


def _least(a: Any, b: Any) -> Any:
    return a if _size(a) <= _size(b) else b


def _size(n: Any) -> int:
    return compat.size_hint(n)


def _flops(node: fx.Node) -> Any:
    formula = compat.flop_formula(node.target)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    try:
        return formula(*args, **kwargs, out_val=node.meta["val"])
    except Exception as error:  # torch's formulas assume ordinary shapes; a cost must never be why a model cannot be explained
        log.debug("no FLOPs for %s: %s", node.format_node(), error)
        return 0


def _operand_dtype(node: fx.Node) -> str:
    """What a kernel computes in: the dtype of its first floating-point input, else of its result."""
    values = [a.meta.get("val") for a in node.all_input_nodes] + pytree.tree_leaves(node.meta.get("val"))
    tensors = [v for v in values if isinstance(v, Tensor)]
    return dtype_of(next((v for v in tensors if v.dtype.is_floating_point), tensors[0]))


def dtype_of(value: Tensor) -> str:
    """``torch.float32`` → ``"float32"``."""
    return str(value.dtype).removeprefix("torch.")


def nbytes_of(value: Any) -> Any:
    """Bytes of all tensors in a fake value; an int or a SymInt. Broadcast dimensions (stride 0) count once."""
    total: Any = 0
    for t in pytree.tree_leaves(value):
        if isinstance(t, Tensor):
            n: Any = t.element_size()
            for size, stride in zip(t.shape, t.stride()) if t.layout == torch.strided else []:
                if not (isinstance(stride, int) and stride == 0):
                    n = n * size
            total = total + n
    return total
