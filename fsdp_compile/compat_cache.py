"""The part of `compat` that subclasses Inductor's classes, for AOTAutograd's cache; apart, because its imports take a second.

::

    cold   Dynamo graph ─► trace ─► passes ─► Inductor ─► Sealed(code, payload) ─► AOTAutograd's cache
    warm   Dynamo graph ─► AOTAutograd's cache ─► Sealed(payload) ─► Inductor's cache ─► code

An entry holds the key of Inductor's entry and a payload that says what to put around the code. Its own key is that of the Dynamo graph
and the configuration, in which `compat.compile_inductor` names all else that the passes decide by.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch._functorch.config
from torch._functorch._aot_autograd import aot_autograd_result
from torch._functorch._aot_autograd.aot_autograd_result import FxGraphCacheLoadable
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.output_code import OutputCode

Attach = Callable[[Any, Callable[..., Any]], Callable[..., Any]]
_attach: contextvars.ContextVar[Attach] = contextvars.ContextVar("_attach")


@contextlib.contextmanager
def attaching(attach: Attach) -> Iterator[None]:
    """Within it, ``attach`` is for code that comes from the cache."""
    token = _attach.set(attach)
    try:
        yield
    finally:
        _attach.reset(token)


@dataclass
class _Entry(FxGraphCacheLoadable):
    """Where Inductor's cache has the code."""

    backward: bool = False

    def _is_backward(self) -> bool:
        return self.backward


class Sealed(OutputCode):
    """Compiled code and the payload that was attached to it; in the cache, the code's key and the payload."""

    def __init__(self, code: Callable[..., Any], payload: Any, attach: Attach) -> None:
        self._boxed_call = True
        self._payload = payload
        self._entry: tuple[Any, Any] | None = None
        self._seal(code, attach)

    def _seal(self, code: Any, attach: Attach) -> None:
        if getattr(code, "current_callable", None) is not None:
            code.current_callable = attach(self._payload, code.current_callable)
        else:  # a graph without any operation
            code = attach(self._payload, code)
        self._code: Any = code

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self._code(inputs)

    def prepare_for_serialization(self) -> None:
        """Leave the code out. Raises BypassAOTAutogradCache if Inductor's cache does not have it."""
        key = getattr(self._code, "_fx_graph_cache_key", None)
        if key is None:
            raise BypassAOTAutogradCache("Inductor's cache does not have this graph")
        self._entry = ((key, self._code._fx_graph_cache_debug_lines), getattr(self._code, "guards_expr", None))
        self._code = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Fetch the code. Raises FXGraphCacheMiss, on which the graph is compiled anew."""
        assert self._entry is not None
        entry = _Entry(*self._entry, backward=bool(graph_kwargs.get("is_backward")))
        with unbundled():
            self._seal(entry.post_compile(entry.load(example_inputs), graph_kwargs), _attach.get())

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing: Inductor's entry has it."""


class Partitioner(CustomPartitionerFn):
    """``partition(joint, joint_inputs, **kwargs)`` as Inductor's partitioner. To a cache's key it is but a name: what it decides by is in
    the joint pass's."""

    def __init__(self, partition: Callable[..., Any] | None = None) -> None:
        self.partition = partition

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        assert self.partition is not None
        return self.partition(gm, joint_inputs, **kwargs)

    def __reduce__(self) -> Any:
        return Partitioner, ()

    def uuid(self) -> str:
        return "fsdp_compile"


def bundled(use: bool) -> Any:
    """Context: AOTAutograd's cache keeps `Sealed` itself, and with the forward graph the backward one is compiled, which belongs to the
    same entry. Where that is not to be used, or this torch's cache takes code of no other class (2.13's does): without that cache."""
    if not use or not hasattr(aot_autograd_result, "BundledOutputCodeLoadable"):
        return torch._functorch.config.patch(enable_autograd_cache=False)  # type: ignore[attr-defined]
    patch = {"enable_autograd_cache": True, "bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
    return torch._functorch.config.patch(patch)  # type: ignore[attr-defined]


def unbundled() -> Any:
    """Context: Inductor uses its own cache, as it would not within `bundled`."""
    return torch._functorch.config.patch(bundled_autograd_cache=False)  # type: ignore[attr-defined]
