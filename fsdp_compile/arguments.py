"""Checks of what users give: the arguments that `fully_shard` and the backend's options have in common, Inductor's options."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.spec import REDUCE_OPS


def check_shard_args(
    *,
    mesh: Any,
    mp_policy: Any,
    reshard_after_forward: Any,
    ignored_params: Any,
    reduce_op: Any,
    sync_module_states: Any,
    timeout_s: Any,
    prefix: str = "",
) -> None:
    """Raises TypeError, ValueError or NotImplementedError that names the argument. ``prefix``: what to say before its name."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{prefix}mesh must be a DeviceMesh (torch.distributed.device_mesh.init_device_mesh makes one), got {mesh!r}")
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy | torch.dtype):
        raise TypeError(f"{prefix}mp_policy must be torch's MixedPrecisionPolicy or a dtype such as torch.bfloat16, got {mp_policy!r}")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"{prefix}reshard_after_forward={reshard_after_forward!r}: only True (or None) and False; weights cannot be kept "
            "sharded over fewer ranks between forward and backward"
        )
    if isinstance(ignored_params, Iterator):
        raise TypeError(f"{prefix}ignored_params must be a list: an iterator is empty when the second graph asks for it")
    if ignored_params is not None and not isinstance(ignored_params, Iterable):
        raise TypeError(f"{prefix}ignored_params must be a list of parameters, got {ignored_params!r}")
    for p in ignored_params or ():
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{prefix}ignored_params must hold the parameters themselves (model.head.weight), got {p!r}")
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"{prefix}reduce_op must be 'avg' or 'sum', got {reduce_op!r}")
    if not isinstance(sync_module_states, bool):
        raise TypeError(f"{prefix}sync_module_states must be True or False, got {sync_module_states!r}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"{prefix}timeout_s must be a number of seconds, got {timeout_s!r}")
    if not timeout_s > 0:
        raise ValueError(f"{prefix}timeout_s must be positive, got {timeout_s}")


def check_inductor(config: Any) -> None:
    """Raises TypeError or ValueError unless ``config`` is a dict of ``torch._inductor.config`` values."""
    if not isinstance(config, Mapping):
        raise TypeError(f"option inductor must be a dict of torch._inductor.config values, got {config!r}")
    import torch._inductor.config as known

    for name in config:
        if not hasattr(known, str(name)):  # the list of options lacks those that stand for others
            near = difflib.get_close_matches(str(name), torch._inductor.list_options(), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"option inductor: torch._inductor.config has no {name!r}{hint} (torch._inductor.list_options() lists all)")
