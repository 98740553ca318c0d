"""The part of `compat` that compiles a Dynamo graph: through AOTAutograd and Inductor, or as FX graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# transform(graph_module, is_backward) rewrites a graph in place and returns a payload (picklable, if AOTAutograd's cache is used), from
# which attach(payload, function) makes what belongs around the function compiled from that graph.
Transform = Callable[[torch.fx.GraphModule, bool], Any]
Attach = Callable[[Any, Callable[..., Any]], Callable[..., Any]]
# divide(joint, cut) partitions the joint graph by cut(joint) → forward, backward, after tagging it, or trying out on a copy.
Cut = Callable[[torch.fx.GraphModule], tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
Divide = Callable[[torch.fx.GraphModule, Cut], tuple[torch.fx.GraphModule, torch.fx.GraphModule]]


@dataclass(frozen=True)
class Settings:
    """``config``: torch._inductor.config values. ``cached``: AOTAutograd's cache may skip all passes; ``decided_by`` names everything that
    they decide by beside the graph and ``config``. ``lower=False``: stop before Inductor and run the graphs as FX (for `explain`)."""

    config: dict[str, Any] = field(default_factory=dict)
    decided_by: str = ""
    cached: bool = False
    lower: bool = True


def compile_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    transform: Transform,
    attach: Attach,
    joint_pass: Callable[[torch.fx.Graph], None],
    settings: Settings,
    divide: Divide | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph through AOTAutograd and Inductor.

    ``transform(graph_module, is_backward)`` rewrites each forward, backward or inference graph in place before Inductor sees it, so
    that the FX graph cache is keyed by the transformed graph. ``joint_pass`` runs on the joint graph before partitioning.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from fsdp_compile import compat_cache

    register_collectives()

    class _JointPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            joint_pass(graph)

        def uuid(self) -> str:
            return f"fsdp_compile {settings.decided_by}"

    def inner(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        payload = transform(graph_module, bool(kwargs.get("is_backward", False)))
        if not settings.lower:
            return attach(payload, make_boxed(graph_module))
        with compat_cache.unbundled():
            return compat_cache.Sealed(compile_fx_inner(graph_module, example_inputs, **kwargs), payload, attach)

    patches = {
        # The final FX order is the schedule; the memory reorder would undo the prefetch exactly when weights are freed early.
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        "reorder_for_compute_comm_overlap": False,
        **settings.config,
        "joint_custom_pre_pass": _JointPass(),
        **({"custom_partitioner_fn": compat_cache.Partitioner(functools.partial(_partition, divide))} if divide else {}),
    }
    with compat_cache.bundled(settings.cached and settings.lower), compat_cache.attaching(attach):
        return compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)  # type: ignore[arg-type,return-value]


def cache_miss() -> Exception:
    """What ``attach`` raises for a payload from AOTAutograd's cache that is of no use: the graph is compiled anew."""
    from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss

    return FXGraphCacheMiss()


@functools.cache
def register_collectives() -> None:
    """Teach Inductor our own collectives: as torch's, their inputs stay untouched until the wait."""
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    def lowering(op: Any) -> Callable[..., Any]:
        def lower(x: Any, world: int, group: str, *how: Any) -> Any:
            out = ir._CollectiveKernel.create_out_of_place(op, x, world, group, *how)
            return torch.utils._pytree.tree_map(ir.TensorBox.create, out)

        return lower

    ours = torch.ops.fsdp_compile
    for op in (ours.all_gather.default, ours.all_gather_coalesced.default, ours.all_to_all.default, ours.entry_gather.default):
        add_layout_constraint(op, constrain_to_fx_strides)
        register_lowering(op, type_promotion_kind=None)(lowering(op))


def make_boxed(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """``gm`` as AOTAutograd calls it: one list of arguments, emptied as they are taken, so that each is freed after its last use. (Called
    with its arguments one by one, the tuples of the callers would hold them all to the end: what is kept for backward, too.)"""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Any:
        return gm(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compile_fx_graphs(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    transform: Transform,
    attach: Attach,
    joint_pass: Callable[[torch.fx.Graph], None],
    divide: Divide | None = None,
) -> Callable[..., Any]:
    """Like `compile_inductor`, but run the transformed graphs as they stand, with eager's own kernels and no decomposition."""
    from torch._dynamo.backends.common import aot_autograd

    def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        joint_pass(joint.graph)
        joint.recompile()
        return _partition(divide, joint, joint_inputs, **kwargs)

    def compiler(is_backward: bool) -> Callable[..., Any]:
        def run(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
            payload = transform(graph_module, is_backward)
            return attach(payload, make_boxed(graph_module))

        return run

    with torch._functorch.config.patch(enable_autograd_cache=False):
        return aot_autograd(
            fw_compiler=compiler(False),
            bw_compiler=compiler(True),
            inference_compiler=compiler(False),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, list(inputs))


def _partition(divide: Divide | None, joint: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    cut: Cut = lambda graph: min_cut_rematerialization_partition(graph, joint_inputs, **kwargs)  # noqa: E731
    return cut(joint) if divide is None else divide(joint, cut)
