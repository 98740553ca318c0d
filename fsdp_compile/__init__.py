"""fsdp-compile: ``torch.compile(model, backend="fsdp")`` trains a model fully sharded (ZeRO-3)."""

from fsdp_compile.api import fully_shard
from fsdp_compile.explain import explain
from fsdp_compile.report import Report

__all__ = ["Report", "explain", "fully_shard"]
__version__ = "0.1.0"
