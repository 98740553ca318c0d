"""Reading a sharded module's parameters: a property for each name, traced or eager, and what keeps it in step.

::

    module.weight   in a trace                             unshard(leaf, spec)
                    in an eager forward, within `unshard`   the whole tensor, differentiable
                    anywhere else                           the DTensor
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import compat

from .accumulation import Reading, set_requires_gradient_sync
from .ops import collect, held, with_pending
from .ops import unshard as gather
from .sharding import FSDPState, adopt, convert, state_of

_CALL_FRAMES = frozenset({"_call_impl", "_wrapped_call_impl"})


_opened: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("_opened", default=frozenset())  # ids of FSDPStates


@contextlib.contextmanager
def unshard(model: nn.Module) -> Iterator[None]:
    """Within it, reading a parameter of ``model`` outside any forward gives the whole tensor, differentiable, instead of the DTensor:
    for losses that use ``model.head.weight``, and for methods other than forward. All ranks must read the same parameters in the same
    order. Each read gathers anew; writing into what was read changes nothing (write into the DTensor, outside).

    Raises ValueError for a model that is not sharded."""
    model = getattr(model, "_orig_mod", model)
    state = next((s for m in model.modules() if (s := state_of(m)) is not None), None)
    if state is None:
        raise ValueError(f"{type(model).__name__} is not sharded yet: call fsdp_compile.fully_shard(model) first, or run one step")
    token = _opened.set(_opened.get() | {id(state)})
    try:
        yield
    finally:
        _opened.reset(token)


def _whole(module: Any, name: str, p: Any) -> Tensor:
    """The whole parameter, differentiable if the parameter is trainable."""
    if p.requires_grad:
        return _accumulating(module, name, p._fsdp_shard, p._fsdp_spec)
    found = _reading(module, name)
    if found is not None and found[2] is not None:
        return held(found[2], p._fsdp_spec)
    return gather(p._fsdp_shard, p._fsdp_spec).detach()


def _reading(module: Any, name: str) -> Reading | None:
    table = module._fsdp_accumulate
    return None if table is None else table.get(name)


def _accumulating(module: Any, name: str, leaf: Tensor, spec: str) -> Tensor:
    """The whole parameter as `set_requires_gradient_sync` wants it: collecting its gradient unreduced, or adding what was collected."""
    table = module._fsdp_accumulate
    if table is None:
        return gather(leaf, spec)
    found = table.get(name)
    if found is None or found[0] is None:
        return gather(leaf, spec)
    tensor, ticket, whole = found
    if whole is not None:
        return collect(held(whole, spec), tensor)
    w = gather(leaf, spec)
    return collect(w.detach(), tensor) if ticket is None else with_pending(w, tensor, ticket)


def _read(module: Any, name: str) -> Any:
    """What the properties call. Dynamo traces it: every attribute that it reads becomes a guard, so it reads few.

    A trainable parameter's leaf comes from a side table, because a guard on a DTensor costs ten times one on a plain tensor; its spec from
    another, because reading it off the leaf would cost two guarded attributes of a tensor. A frozen one is read through the DTensor
    itself, whose ``requires_grad`` is then guarded."""
    if not torch.compiler.is_compiling():
        return _read_eager(module, name)
    leaf = module._fsdp_leaves[name]
    if leaf is not None:
        return _accumulating(module, name, leaf, module._fsdp_specs[name])
    p = module._parameters[name]
    return p if p is None else _whole(module, name, p)


def _read_eager(module: nn.Module, name: str) -> Any:
    if name not in module._parameters:
        return nn.Module.__getattr__(module, name)
    p = module._parameters[name]
    if not isinstance(p, DTensor) or not _in_forward(module):
        return p
    owners = _owners([p])
    if adopt(p):
        fill_tables(module, *owners)
    return _whole(module, name, p)


def _in_forward(module: nn.Module) -> bool:
    """Whether a module of the same sharded model is being called, further up on this thread's stack.

    Only ``nn.Module.__call__`` counts: initialisers, ``print`` and user loops that read a parameter get the DTensor."""
    state = state_of(module)
    if id(state) in _opened.get():
        return True
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _CALL_FRAMES or frame.f_code.co_name.startswith("torch_dynamo_resume_in_"):
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and state_of(caller) is state:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Sharded:
    """Mixed into the class of each sharded module: keeps leaves in step with what replaces parameters."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        held = dict(self._parameters)  # type: ignore[attr-defined]
        mine = [n for n, p in held.items() if hasattr(p, "_fsdp_spec")]
        self._parameters.update(dict.fromkeys(mine))  # type: ignore[attr-defined]  # torch would swap tensors, which weak references forbid
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            self._parameters.update({n: held[n] for n in mine})  # type: ignore[attr-defined]
        owners = _owners([held[n] for n in mine])
        kinds = {n: (held[n].dtype, held[n].device) for n in mine}
        for n in mine:
            convert(held[n], fn)
        fill_tables(self, *owners)  # type: ignore[arg-type]
        for n, (_, _, whole) in (self._fsdp_accumulate or {}).items():  # type: ignore[attr-defined]
            if whole is not None and (held[n].dtype, held[n].device) != kinds[n]:
                raise RuntimeError(
                    f"parameter {n!r} of {type(self).__name__} was converted to {held[n].dtype} on {held[n].device} inside "
                    "no_sync(keep_bytes=...), whose micro-steps read it as it was at the beginning: convert outside of it"
                )
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.__dict__["_fsdp_accumulate"] = None  # a copy collects nothing and holds nothing
        readopt(self)  # type: ignore[arg-type]

    def get_parameter(self, target: str) -> Any:
        """As a read of the attribute, so that a forward may ask for a parameter by its FQN (torch's refuses what is no Parameter)."""
        path, _, name = target.rpartition(".")
        owner = self.get_submodule(path)  # type: ignore[attr-defined]
        return getattr(owner, name) if owner._parameters.get(name) is not None else super().get_parameter(target)  # type: ignore[misc]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """As FSDP2's: False: backward keeps gradients whole and unreduced on each rank; True: the next backward reduces their sum."""
        set_requires_gradient_sync(self, requires_gradient_sync, recurse=recurse)  # type: ignore[arg-type]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        out = super().requires_grad_(requires_grad)  # type: ignore[misc]
        for m in self.modules():  # type: ignore[attr-defined]
            fill_table(m)
        return out

    def register_parameter(self, name: str, param: Any) -> None:
        old = self._parameters.get(name)  # type: ignore[attr-defined]
        if old is not None and param is not None and hasattr(old, "_fsdp_spec") and not hasattr(param, "_fsdp_spec"):
            if not isinstance(param, DTensor) or param.shape != old.shape or param.placements != old.placements:
                raise RuntimeError(
                    f"parameter {name!r} of {type(self).__name__} is sharded and cannot be replaced by a plain tensor; copy the new "
                    "values into it under torch.no_grad(), or load a state dict"
                )
            param._fsdp_spec = old._fsdp_spec  # type: ignore[attr-defined]
            adopt(param)
        super().register_parameter(name, param)  # type: ignore[misc]
        fill_table(self)  # type: ignore[arg-type]


class _ShardedRNN(_Sharded):
    """`nn.RNN`, `LSTM` and `GRU` keep a list of their weights. Of a sharded one it is filled at each call and emptied after it: torch's
    way would gather each weight several times, and keep all of them whole from step to step."""

    def _init_flat_weights(self) -> None:
        self._flat_weights = [None] * len(self._flat_weights_names)  # type: ignore[attr-defined]
        self._flat_weight_refs = list(self._flat_weights)

    def _update_flat_weights(self) -> None:
        self._flat_weights = [getattr(self, n, None) for n in self._flat_weights_names]  # type: ignore[attr-defined]

    def flatten_parameters(self) -> None:
        """Nothing: weights are laid out anew by each gather."""


def _empty_list(module: Any, args: Any, output: Any) -> None:
    module._init_flat_weights()


def fill_table(module: nn.Module) -> None:
    """Set the module's tables, name → leaf and name → spec. No leaf (None) for what is read through the parameter itself:
    only a trainable one has it."""
    if state_of(module) is not None:
        leaves = {n: getattr(p, "_fsdp_shard", None) if p is not None and p.requires_grad else None for n, p in module._parameters.items()}
        module.__dict__["_fsdp_leaves"] = leaves
        module.__dict__["_fsdp_specs"] = {n: module._parameters[n]._fsdp_spec for n, leaf in leaves.items() if leaf is not None}  # type: ignore[union-attr]
        for p in module._parameters.values():
            if hasattr(p, "_fsdp_owners"):
                p._fsdp_owners.add(module)  # type: ignore[union-attr]


def _owners(params: Iterable[Any]) -> list[nn.Module]:
    """The modules that hold these parameters: of a tied one several, which must all see a new leaf."""
    return [m for p in params for m in getattr(p, "_fsdp_owners", ())]


def fill_tables(*modules: nn.Module) -> None:
    """`fill_table` for each."""
    for m in dict.fromkeys(modules):
        fill_table(m)


def readopt(module: nn.Module) -> None:
    """Give the module's parameters their leaves again after something replaced them."""
    owners = _owners(module._parameters.values())
    for name, p in module._parameters.items():
        if isinstance(p, DTensor) and not hasattr(p, "_fsdp_spec"):
            raise RuntimeError(
                f"parameter {name!r} of {type(module).__name__} was replaced by another DTensor; change its values in place instead"
            )
        adopt(p)
    fill_tables(module, *owners)


@functools.cache
def _property(name: str) -> property:
    """A property whose code holds the name as a literal: a closure's cell would cost a guard."""
    scope: dict[str, Any] = {"_read": _read}
    exec(f"def read(self):\n    return _read(self, {name!r})", scope)
    # Code that Dynamo leaves out but that runs under it (`nn.LSTM`) would compile a graph for each parameter that it reads.
    return property(compat.never_a_frame(scope["read"]))


@functools.cache
def sharded_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """``cls`` with a property for each parameter name. Cached: the properties close over nothing but the names."""
    body: dict[str, Any] = {n: _property(n) for n in names}
    body["__module__"] = cls.__module__
    body["__qualname__"] = f"FSDP{cls.__qualname__}"
    return type(f"FSDP{cls.__name__}", (_ShardedRNN if issubclass(cls, nn.RNNBase) else _Sharded, cls), body)


def install(module: nn.Module, names: tuple[str, ...], state: FSDPState, root: bool = False) -> None:
    """Switch ``module``, whose parameters are sharded already, to its sharded class (the root too if it has none of its own)."""
    module.__dict__["_fsdp_state"] = state
    module.__dict__["_fsdp_accumulate"] = None
    if names or root:
        module.__class__ = sharded_class(type(module), names)  # type: ignore[arg-type]
        fill_table(module)
        module.register_load_state_dict_post_hook(_after_load)
        if isinstance(module, _ShardedRNN):
            module._init_flat_weights()
            module.register_forward_hook(_empty_list, always_call=True)


def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    readopt(module)
