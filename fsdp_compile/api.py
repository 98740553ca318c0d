"""`fully_shard`: shard a whole model, in place, before or after its optimizer is built."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from fsdp_compile.arguments import check_shard_args
from fsdp_compile.runtime.agree import agree
from fsdp_compile.runtime.grads import follow
from fsdp_compile.runtime.layout import make_layout
from fsdp_compile.runtime.mesh import resolve_mesh
from fsdp_compile.runtime.optimizers import repoint, retire
from fsdp_compile.runtime.reading import install
from fsdp_compile.runtime.sharding import FSDPState, fill, local_rows, make_flat, new_parameter, slot_view, state_of
from fsdp_compile.spec import ParamSpec, decode

log = logging.getLogger("fsdp_compile")


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | torch.dtype | None = None,
    reshard_after_forward: bool | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    reduce_op: str = "avg",
    sync_module_states: bool = True,
    timeout_s: float = 600.0,
    shard_placement_fn: Any = None,
    offload_policy: Any = None,
) -> nn.Module:
    """Shard every parameter of ``module`` over ``mesh`` and return the module (changed in place).

    Same arguments as torch's ``torch.distributed.fsdp.fully_shard``, but called once, on the whole model. Parameters become
    DTensors ``Shard(0)`` (scalars: ``Replicate``); FQNs, ties and Python attributes stay; optimizers built earlier are re-pointed.

    mesh: one-dimensional; None: all ranks. mp_policy: as torch's, or just the compute dtype. reshard_after_forward: True frees
    all gathered weights after forward, None (the default) all but the last, which backward needs first: as many as one rank's shards
    take; False keeps all for backward. ignored_params: left as they are, neither sharded
    nor reduced. reduce_op: "avg" (over ranks) or "sum". sync_module_states: start from rank 0's parameters and buffers;
    False: each rank's own. timeout_s: seconds to wait for the other ranks while comparing models.

    Raises ValueError for a model without parameters, one that is sharded already, or a mesh that does not fit; TypeError for a
    parameter that cannot be sharded (integers, tensor subclasses), by name; RankMismatch if ranks hold different models."""
    if shard_placement_fn is not None:
        raise NotImplementedError("shard_placement_fn: parameters are always sharded on dimension 0")
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise NotImplementedError(f"offload_policy {type(offload_policy).__name__}: shards stay on the device")
    if isinstance(ignored_params, Iterator):
        ignored_params = list(ignored_params)
    given: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": ignored_params,
        "reduce_op": reduce_op,
        "sync_module_states": sync_module_states,
        "timeout_s": timeout_s,
    }
    check_shard_args(**given)
    return shard(module, **given)


def shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy | torch.dtype | None,
    reshard_after_forward: bool | None,
    ignored_params: Iterable[nn.Parameter] | None,
    reduce_op: str,
    sync_module_states: bool,
    timeout_s: float,
    in_flight: bool = False,
) -> nn.Module:
    """`fully_shard` without its checks of arguments. ``in_flight``: a forward of the module is running, whose backward may still give
    gradients to the parameters that are replaced here."""
    policy = policy_of(mp_policy)
    ignored = frozenset(id(p) for p in ignored_params or ())
    owners = owners_of(module, set(ignored))
    mesh, group = resolve_mesh(mesh, _device_type(owners), timeout_s)
    specs = specs_for(owners, group.group_name, mesh.size(), policy, reduce_op, reshard_after_forward)
    described = [s.encode() + f" trainable={owners[i][0].requires_grad}" for i, s in specs.items()]
    agree(group, "model", described + _buffer_lines(module), timeout_s)
    if sync_module_states:
        _warn_if_seeds_differ(mesh, owners, timeout_s)
    new_of, nbytes, padding = _build(owners, specs, mesh, sync_module_states)
    if sync_module_states and mesh.size() > 1:
        _broadcast_buffers(module, mesh)
    given = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": ignored,
        "reduce_op": reduce_op,
    }
    sizes = {s.fqn: s.gathered_bytes for s in specs.values()}
    state = FSDPState(mesh, ignored, module_classes(module), nbytes, padding, given, sizes)
    names_of: dict[nn.Module, list[str]] = {}
    for i, (_, places) in owners.items():
        for m, name, _fqn in places:
            m._parameters[name] = new_of[i]
            names_of.setdefault(m, []).append(name)
    for m in module.modules():
        install(m, tuple(names_of.get(m, ())), state, root=m is module)
    repoint(new_of, lambda t, new: _shard_like(t, new, mesh))
    for i, (p, _) in owners.items():
        _carry_over(p, new_of[i], mesh, in_flight)
    add_casts(module, policy)
    return module


_Places = list[tuple[nn.Module, str, str]]


def owners_of(root: nn.Module, ignored: set[int]) -> dict[int, tuple[nn.Parameter, _Places]]:
    """``id(parameter)`` → the parameter and every (module, name, FQN) that holds it. Checks each parameter."""
    out: dict[int, tuple[nn.Parameter, _Places]] = {}
    for prefix, m in root.named_modules():
        if state_of(m) is not None:
            raise ValueError(
                f"module {prefix or '(root)'!r} of {type(root).__name__} is sharded already: call fully_shard once, on the whole model"
            )
        for name, p in m._parameters.items():
            if p is None or id(p) in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            _check(fqn, p)
            out.setdefault(id(p), (p, []))[1].append((m, name, fqn))
    if not out:
        raise ValueError(f"{type(root).__name__} has no parameters: there is nothing to shard")
    for _, m in root.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and m.weight.requires_grad and id(m.weight) in out:
            fqn = out[id(m.weight)][1][0][2]
            raise TypeError(f"parameter {fqn!r} would get sparse gradients, which cannot be reduced into shards: use sparse=False")
    return out


def _check(fqn: str, p: nn.Parameter) -> None:
    if isinstance(p, DTensor):
        raise TypeError(f"parameter {fqn!r} is a DTensor already ({p.placements} on {p.device_mesh}); composition is not supported")
    if isinstance(p, UninitializedParameter):
        raise TypeError(f"parameter {fqn!r} is lazy: run one forward on example inputs before sharding")
    if type(p.data) not in (Tensor, nn.Parameter):
        kind = type(p.data).__name__
        raise TypeError(f"parameter {fqn!r} is a {kind}, a tensor subclass that cannot be sharded; name it in ignored_params")
    if not (p.is_floating_point() or p.is_complex()) or p.is_quantized:
        raise TypeError(f"parameter {fqn!r} has dtype {p.dtype}, which cannot be sharded; name it in ignored_params")
    if p.layout != torch.strided:
        raise TypeError(f"parameter {fqn!r} has layout {p.layout}; only dense parameters can be sharded")


def _device_type(owners: dict[int, tuple[nn.Parameter, _Places]]) -> str | None:
    types = {p.device.type for p, _ in owners.values()} - {"meta"}
    if len(types) > 1:
        raise ValueError(f"parameters are on several device types: {sorted(types)}; move the model to one before sharding")
    return next(iter(types), None)


def policy_of(mp_policy: MixedPrecisionPolicy | torch.dtype | None) -> MixedPrecisionPolicy:
    """The policy itself; a dtype stands for a policy that computes in it."""
    if isinstance(mp_policy, torch.dtype):
        return MixedPrecisionPolicy(param_dtype=mp_policy)
    return mp_policy or MixedPrecisionPolicy()


def specs_for(
    owners: dict[int, tuple[nn.Parameter, _Places]],
    group: str,
    world: int,
    policy: MixedPrecisionPolicy,
    reduce_op: str,
    reshard: bool | None,
) -> dict[int, ParamSpec]:
    """``id(parameter)`` → its spec, for `owners_of`'s result. ``reshard``: free gathered weights after forward."""
    return {i: _spec(places[0][2], p, group, world, policy, reduce_op, reshard) for i, (p, places) in owners.items()}


def _spec(
    fqn: str, p: nn.Parameter, group: str, world: int, policy: MixedPrecisionPolicy, reduce_op: str, reshard: bool | None
) -> ParamSpec:
    compute = policy.param_dtype or p.dtype
    reduce = policy.reduce_dtype or compute
    if p.is_complex():
        compute = p.dtype
        reduce = torch.float64 if p.dtype == torch.complex128 else torch.float32
    return ParamSpec(
        fqn=fqn,
        shape=tuple(p.shape),
        dtype=p.dtype,
        compute_dtype=compute,
        reduce_dtype=reduce,
        group=group,
        world=world,
        reduce_op=reduce_op,
        kind="shard" if p.dim() else "replicate",
        reshard=reshard,
    )


def _build(
    owners: dict[int, tuple[nn.Parameter, _Places]], specs: dict[int, ParamSpec], mesh: DeviceMesh, sync: bool
) -> tuple[dict[int, nn.Parameter], int, int]:
    """New parameters by old id; bytes of all flat buffers; bytes of padding. One buffer for each (dtype, trainable, device)."""
    order: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
    for i, (p, _) in owners.items():
        order.setdefault((p.dtype, p.requires_grad, p.is_meta), []).append(i)
    new_of: dict[int, nn.Parameter] = {}
    nbytes = padding = 0
    for (_, trainable, meta), ids in order.items():
        layout = make_layout([specs[i] for i in ids])
        device = torch.device("meta") if meta else _device(mesh)
        flat = make_flat(layout, device)
        nbytes += layout.nbytes
        padding += layout.padding_bytes
        for i, slot in zip(ids, layout.slots):
            shard = slot_view(flat, slot.offset, slot.spec.shard_numel)
            fill(shard, owners[i][0].data, slot.spec, mesh, sync)
            new_of[i] = new_parameter(shard, slot.spec, mesh, trainable)
    return new_of, nbytes, padding


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@torch.no_grad()
def _shard_like(full: Tensor, p: nn.Parameter, mesh: DeviceMesh) -> Tensor:
    """A whole tensor of ``p``'s shape → a DTensor sharded like ``p`` (this rank's own values)."""
    spec = decode(p._fsdp_spec)  # type: ignore[attr-defined]
    rank = mesh.get_local_rank()
    local = local_rows(full, spec, rank)[: spec.local_numel(rank)].view(spec.local_shape(rank)).clone()
    assert isinstance(p, DTensor)
    return DTensor.from_local(local, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _carry_over(old: nn.Parameter, new: nn.Parameter, mesh: DeviceMesh, in_flight: bool) -> None:
    """Attributes, hooks and gradient of the old parameter go to the new one; the old one gives up its storage, unless an autograd
    graph may need it: then it lives as long as that graph, and its gradient follows."""
    for k, v in old.__dict__.items():
        if not k.startswith("_dynamo"):
            new.__dict__.setdefault(k, v)
    for hooks, register in (
        (old._backward_hooks, new.register_hook),
        (getattr(old, "_post_accumulate_grad_hooks", None), new.register_post_accumulate_grad_hook),
    ):
        for fn in (hooks or {}).values():
            register(fn)
        if hooks:
            hooks.clear()
    if old.grad is not None:
        new.grad = _shard_like(old.grad, new, mesh)
        old.grad = None
    retire(old, decode(new._fsdp_spec).fqn)  # type: ignore[attr-defined]
    if in_flight and old.requires_grad:
        follow(old, new)
    else:
        old.data = old.data.new_empty(0)


def _buffer_lines(module: nn.Module) -> list[str]:
    return [f"buffer {n} {b.dtype} {tuple(b.shape)}" for n, b in module.named_buffers()]


@torch.no_grad()
def _broadcast_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    device = _device(mesh)
    for b in module.buffers():
        if not b.is_meta and b.numel() and type(b) is Tensor:
            wire = b.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(wire, src=dist.get_global_rank(group, 0), group=group)
            b.copy_(wire.view(b.dtype).view(b.shape))


def _warn_if_seeds_differ(mesh: DeviceMesh, owners: dict[int, tuple[nn.Parameter, _Places]], timeout_s: float) -> None:
    """Say once, on rank 0, if ranks built their models with different values: rank 0's are used."""
    size, rank = mesh.size(), mesh.get_local_rank()
    if size == 1 or all(p.is_meta for p, _ in owners.values()):
        return
    sums = [float(torch.view_as_real(p.detach()).sum(dtype=torch.float64) if p.is_complex() else p.detach().sum(dtype=torch.float64))
            for p, _ in owners.values() if not p.is_meta]
    mine = hashlib.sha256(repr(sums).encode()).hexdigest()
    both = [mine] * size
    group = mesh.get_group()
    dist.all_gather_object(both, mine, group=group)
    odd = [r for r in range(size) if both[r] != both[0]]
    if odd and rank == 0:
        log.warning("ranks %s built the model with other initial values than rank 0; rank 0's are used (sync_module_states)", odd)


def module_classes(root: nn.Module) -> dict[str, tuple[str, ...]]:
    """Parameter FQN (of a tied one: the first) → ``"fqn:ClassName"`` of each module around it, outermost first (module-based bucketing
    reads it)."""
    out = {}
    seen: set[int] = set()
    named = dict(root.named_modules(remove_duplicate=False))
    for prefix, m in root.named_modules():
        parts = prefix.split(".") if prefix else []
        around = [".".join(parts[:k]) for k in range(len(parts) + 1)]
        path = tuple(f"{p}:{type(named[p]).__name__.removeprefix('FSDP')}" for p in around if p in named)
        for name, p in m._parameters.items():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                out[f"{prefix}.{name}" if prefix else name] = path
    return out


def add_casts(module: nn.Module, policy: MixedPrecisionPolicy) -> list[RemovableHandle]:
    """As in FSDP2: floating-point inputs of the root to ``param_dtype``, outputs to ``output_dtype``. Returns the hooks' handles."""
    from torch.utils import _pytree as pytree

    def cast(dtype: torch.dtype | None, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    handles = []
    if policy.param_dtype is not None and policy.cast_forward_inputs:

        def cast_inputs(m: nn.Module, args: Any, kwargs: Any) -> Any:
            return cast(policy.param_dtype, args), cast(policy.param_dtype, kwargs)

        handles.append(module.register_forward_pre_hook(cast_inputs, with_kwargs=True))
    if policy.output_dtype is not None:
        handles.append(module.register_forward_hook(lambda m, a, out: cast(policy.output_dtype, out)))
    return handles
