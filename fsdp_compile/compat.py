"""Every private torch API that this project touches, in one place.

`compat_compile` and `compat_cache` are parts of it: compiling a graph, and subclasses of Inductor's classes.
Checked on torch 2.13.0. Versions in SUPPORTED use the same names as far as read; others are refused when the backend is imported.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.live import instances

CHECKED = ("2.13",)
SUPPORTED = ("2.11", "2.12", "2.13", "2.14")


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise ImportError, naming what is supported, unless ``version`` is a torch this project knows."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ImportError(
            f"fsdp-compile supports torch {', '.join(SUPPORTED)} (checked on {', '.join(CHECKED)}); this is torch "
            f"{version}. Install a supported one, for example: pip install 'torch==2.13.*'"
        )


# --- Dynamo ---------------------------------------------------------------------------------------------------------


def in_dynamo_trace() -> bool:
    """Whether Dynamo is converting a frame on this thread (so that a restart can be raised)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx() is not None
    except AttributeError:
        return False


def restart_dynamo(reason: str) -> None:
    """Make Dynamo trace the current frame anew. Always raises.

    The speculation log is cleared because the second trace takes another course than the first. TensorifyScalarRestartAnalysis is
    the one restart that Dynamo lets through from a backend (`output_graph.py`, `_call_user_compiler`).
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.root_tx.speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def frame_modules() -> list[nn.Module]:
    """The modules among the local variables of the frame that Dynamo converts just now (``self``, in a forward); none outside a trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        values = InstructionTranslator.current_tx().output.root_tx.f_locals.values()
    except AttributeError:
        return []
    return [v for v in values if isinstance(v, nn.Module)]


def frame_has_float_inputs() -> bool:
    """Whether the frame that Dynamo converts just now was given floating-point tensors, in whatever containers."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch.utils import _pytree as pytree

    try:
        values = list(InstructionTranslator.current_tx().output.root_tx.f_locals.values())
    except AttributeError:
        return False
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in pytree.tree_leaves(values))


def placeholder_values(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, Any]:
    """Placeholder of a Dynamo graph → the real value behind it (None where Dynamo did not keep one)."""
    out: dict[torch.fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            arg = node.meta.get("grapharg")
            example = None if arg is None or getattr(arg, "is_unspecialized", False) else arg.example
            out[node] = example
    return out


def graph_break_of(gm: torch.fx.GraphModule) -> str | None:
    """Why and where Dynamo ended this graph early; None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where = reason.user_stack[-1] if reason.user_stack else None
    what = str(reason.reason).strip().split("\n")[0]
    return f"{what}, {where.filename}:{where.lineno}" if where is not None else what


def compiled_modules(backend: Callable[..., Any] | None = None) -> Iterator[nn.Module]:
    """Modules that somebody compiled (with ``backend``, if given): inner modules of live `torch.compile(module)` objects, and
    `module.compile()` ones."""
    from torch._dynamo.eval_frame import OptimizedModule

    for obj in instances(nn.Module):
        with contextlib.suppress(ReferenceError):
            if issubclass(type(obj), OptimizedModule):
                if backend is None or _backend_of(obj.dynamo_ctx.callback) is backend:  # type: ignore[union-attr]
                    yield obj._orig_mod  # type: ignore[misc]
            elif (call := getattr(obj, "_compiled_call_impl", None)) is not None:
                if backend is None or _backend_of(inspect.getclosurevars(call).nonlocals.get("callback")) is backend:
                    yield obj


def _backend_of(callback: Any) -> Any:
    """The backend function inside the callback that Dynamo made of it."""
    from torch._dynamo.eval_frame import innermost_backend

    inner = innermost_backend(callback) if callback is not None else None
    return getattr(inner, "compiler_fn", inner)


def inside_ddp() -> bool:
    """Whether DistributedDataParallel's forward is running on this thread."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None


# --- Inductor and AOTAutograd -----------------------------------------------------------------------------------------


def set_recompute(node: torch.fx.Node, keep: bool, graph_id: int = 1 << 40) -> None:
    """Tag a joint-graph node for the partitioner: recompute it in backward, or (``keep``) save it.

    ``graph_id`` is larger than any activation-checkpoint region's, so that the partitioner never takes a weight for the output of
    one region that feeds the next (`cleanup_recompute_tags`).
    """
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = graph_id


def eager_backward_compile() -> Any:
    """Context: compile the backward graph together with the forward, not at the first backward call."""
    import torch._functorch.config

    return torch._functorch.config.patch(force_non_lazy_backward_lowering=True)


def backward_id() -> int:
    """The number of the backward that runs on this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def storage_ref(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's memory; ``.expired()`` once no tensor uses it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Call ``fn`` when the backward that runs on this thread has ended; if it fails, ``fn`` is only dropped."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)  # type: ignore[attr-defined]


def never_a_frame(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from compiling ``fn``, or what it calls, as frames of their own. Called from a frame that is traced, ``fn`` is
    inlined as ever, which `torch.compiler.disable` would forbid."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(fn.__code__, eval_frame._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
    return fn


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put ``text`` into torch's structured trace, where tlparse shows it."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


# --- Process groups -----------------------------------------------------------------------------------------------------


def cpu_backend_name(group: Any) -> str:
    """The name of the backend that carries ``group``'s CPU tensors; "" if none does."""
    import torch.distributed as dist

    names = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":", 1) for pair in names.split(",") if ":" in pair).get("cpu", "")


def default_store() -> Any:
    """The store of the default process group, which all ranks share."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_default_store()


def single_threaded_gloo(name: str, like: Any, ranks: list[int], group_name: str) -> Any:
    """A process group over ``ranks`` on gloo with one worker thread, with ``like``'s network devices and timeout; registered as
    backend ``name``. All ``ranks``, and no others, must call this with the same ``group_name``.

    Not `new_group`: the names that it gives depend on how many groups this process has made, which differs between ranks that are
    members of different meshes, and ranks with different names wait for each other in vain."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def create(opts: Any, given: Any) -> Any:
        return dist.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, given)

    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    backend = like._get_backend(torch.device("cpu"))
    theirs = getattr(backend, "wrapped_pg", backend).options  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads, options._devices, options._timeout = 1, theirs._devices, theirs._timeout
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(name),
        c10d._get_default_store(),
        group_name,  # type: ignore[arg-type]
        backend_options=options,
        timeout=theirs._timeout,
        group_desc="fsdp_compile",
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Let ``wait_tensor(tensor)`` wait for ``work``; several for one tensor are all waited for."""
    torch._C._distributed_c10d._register_work(tensor, work)  # type: ignore[arg-type]


# --- DTensor ----------------------------------------------------------------------------------------------------------


def dtensor_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A DTensor of ``like``'s mesh, placements and global shape around ``local``, without DTensor.from_local's checks (hot path)."""
    spec = like._spec  # type: ignore[attr-defined]
    if local.dtype != spec.tensor_meta.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return dtensor_of(local, spec)


# A DTensor around ``local``, by a spec whose dtype is ``local``'s: dtensor_of(local, spec). A partial, because a Python function around
# it would cost a fifth of it. __new__ alone: DTensor.__init__ only leaves Dynamo, at twice the cost of all the rest.
dtensor_of: Callable[[torch.Tensor, Any], torch.Tensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)  # type: ignore[arg-type]


def plain_attributes() -> Any:
    """Context: reading or setting an attribute of a DTensor (``grad``, ``requires_grad``) does not look for a ``__torch_function__``
    first, which DTensor has disabled anyhow: half the time. Not for code of the user's, whose own subclasses may have one."""
    return torch._C.DisableTorchFunctionSubclass()


def below_autograd() -> Any:
    """Context: operators go past their autograd kernels, which compiled graphs have no use for. Those of functional collectives and of
    custom operators are Python functions, called for each launch and each wait."""
    return torch._C._AutoDispatchBelowAutograd()


@contextlib.contextmanager
def outside_fake_mode() -> Iterator[None]:
    """Context: real tensors, whatever fake mode a tracer has active on this thread, and operators called as ever. AOTAutograd has all
    of them called through Python, also those that wait: they would hold Python's lock, which gloo's thread needs."""
    from torch._dispatch.python import no_python_dispatcher
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), no_python_dispatcher():
        yield


def is_optimized(module: nn.Module) -> bool:
    """Whether ``module`` is the wrapper that ``torch.compile(module)`` returns."""
    from torch._dynamo.eval_frame import OptimizedModule

    return issubclass(type(module), OptimizedModule)


# --- explain ------------------------------------------------------------------------------------------------------------


def original_module(module: nn.Module) -> nn.Module:
    """The module inside what ``torch.compile(module)`` returned; any other module itself."""
    return module._orig_mod if is_optimized(module) else module  # type: ignore[return-value]


def compile_isolated(fn: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(fn, backend=backend)`` with static shapes, whose cache entries count against no other compilation of the same
    code, where torch offers that, and that does not give up after a few recompilations."""
    own = {"isolate_recompiles": True, "recompile_limit": 1 << 12}
    known = inspect.signature(torch.compile).parameters
    return torch.compile(fn, backend=backend, dynamic=False, **{k: v for k, v in own.items() if k in known})  # type: ignore[call-overload]


def fake_shard(node: torch.fx.Node, numel: int, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """Make a Dynamo placeholder stand for a one-dimensional tensor of ``numel`` elements; returns the fake tensor to pass for it."""
    like = node.meta["example_value"]
    with like.fake_mode:
        fake = torch.empty(numel, dtype=dtype, device=like.device, requires_grad=requires_grad)
    node.meta["example_value"] = fake
    return fake


def leave_meta(gm: torch.fx.GraphModule, inputs: list[Any]) -> None:
    """Let a Dynamo graph traced on the meta device compute on (fake) CPU tensors, in place: Inductor takes a result on meta for one
    without data and drops all that computes it."""
    meta, cpu = torch.device("meta"), torch.device("cpu")
    for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        like = node.meta.get("example_value")
        if isinstance(like, torch.Tensor) and like.device == meta:
            with like.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
                fake = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=cpu)
            inputs[i] = node.meta["example_value"] = fake.requires_grad_(like.requires_grad)
    for module in [gm, *(m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm)]:
        for node in module.graph.nodes:
            node.args, node.kwargs = torch.utils._pytree.tree_map_only(
                torch.device, lambda d: cpu if d == meta else d, (node.args, node.kwargs)
            )
        module.recompile()


def become(p: torch.Tensor, new: torch.Tensor) -> None:
    """Make the DTensor parameter ``p`` hold what ``new`` holds, keeping the Python object, as ``module.to`` does for plain ones.

    `torch.utils.swap_tensors` refuses tensors with weak references, which ours and Dynamo's guards hold."""
    torch._C._swap_tensor_impl(p, new)
    p._local_tensor, p._spec = new._local_tensor, new._spec  # type: ignore[attr-defined]


# --- Costs --------------------------------------------------------------------------------------------------------------


def flop_formula(target: Any) -> Callable[..., Any] | None:
    """``formula(*args, **kwargs, out_val=result)`` → floating-point operations of a call of ``target`` (an operator overload or a
    higher-order operator), by shapes; None if torch has none. Attention on CPU, which torch's registry lacks, counts as elsewhere."""
    from torch.utils import flop_counter

    aten = torch.ops.aten
    key = getattr(target, "overloadpacket", target)
    if key is aten._scaled_dot_product_flash_attention_for_cpu:
        return lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)
    if key is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return lambda g, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
    try:
        return flop_counter.flop_registry.get(key)
    except TypeError:  # an unhashable target
        return None


def size_hint(n: Any) -> int:
    """The number behind a size: itself, or the example value of a SymInt (8192, as Inductor assumes, where only the data would tell)."""
    if isinstance(n, int):
        return int(n)
    return int(n.node.hint) if n.node.has_hint() else 8192


def size_expr(n: Any) -> Any:
    """A size as a number or a sympy expression over the symbols of its graph, which are named after the inputs that they are sizes
    of (``a0_dim1``: dimension 1 of the first argument) where Dynamo knows them."""
    if isinstance(n, int):
        return n
    expr, sources = n.node.expr, getattr(n.node.shape_env, "var_to_sources", {})
    named = {}
    for s in getattr(expr, "free_symbols", ()):
        name = str(getattr(next(iter(sources.get(s, ())), None), "name", ""))
        if m := re.fullmatch(r"L\['(\w)'\]\[(\d+|'\w+')\]\.size\(\)\[(\d+)\]", name):
            prefix = f"{m[1]}{m[2]}" if m[2].isdigit() else m[2].strip("'")
            named[s] = type(s)(f"{prefix}_dim{m[3]}", positive=True, integer=True)
    return expr.xreplace(named) if named else expr


def copy_marks(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Give ``dst`` what ``torch._dynamo.mark_dynamic`` wrote on ``src``."""
    dst.__dict__.update({k: v for k, v in src.__dict__.items() if k.startswith(("_dynamo_", "_has_dynamo_"))})
