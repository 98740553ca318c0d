"""fsdp-compile: ``torch.compile(model, backend="fsdp")`` trains a model fully sharded (ZeRO-3)."""

from fsdp_compile.api import fully_shard
from fsdp_compile.explain import explain
from fsdp_compile.plan import make_plan
from fsdp_compile.report import Report
from fsdp_compile.runtime.accumulation import set_requires_gradient_sync
from fsdp_compile.runtime.hold import no_sync
from fsdp_compile.runtime.reading import unshard

__all__ = ["Report", "explain", "fully_shard", "make_plan", "no_sync", "set_requires_gradient_sync", "unshard"]
__version__ = "0.1.0"
