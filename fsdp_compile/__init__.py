"""fsdp-compile: ``torch.compile(model, backend="fsdp")`` trains a model fully sharded (ZeRO-3)."""

from fsdp_compile.api import fully_shard

__all__ = ["fully_shard"]
__version__ = "0.1.0"
