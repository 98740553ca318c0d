"""Published figures of accelerators, for planning without the hardware.

They are peaks that no program reaches: a prediction with them is a lower bound. Scale them (`device("H100", efficiency=0.6)`), or
measure the machine (``fsdp-compile calibrate``). Matmul rates are dense (without sparsity). Interconnect: bytes/s that one device sends to
the others in its server, one direction. Latency and launch time are no vendor's figures but round assumptions (`ASSUMED`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_compile.passes.machine import ANY, Link, Machine, Rates

ASSUMED = {"latency": 20e-6, "launch": 3e-6}  # seconds: a collective between eight devices; a kernel in a stream


@dataclass(frozen=True)
class Published:
    """Per device: matmul TFLOPS (dense), memory and interconnect (one direction) in GB/s, and where the vendor says so."""

    name: str
    bf16: float
    tf32: float
    fp32: float
    fp64: float
    memory: float
    interconnect: float
    source: str

    def __post_init__(self) -> None:
        if min(self.bf16, self.tf32, self.fp32, self.fp64, self.memory, self.interconnect) <= 0:
            raise ValueError(f"{self.name}: figures must be positive")
        if not self.source.startswith("https://"):
            raise ValueError(f"{self.name}: a published figure needs its source")


PUBLISHED = (
    # SXM4 80 GB; NVLink 3: 600 GB/s, both directions together.
    Published("A100", 312, 156, 19.5, 19.5, 2039, 300, "https://www.nvidia.com/en-us/data-center/a100/"),
    # SXM5; the page gives matmul rates with sparsity, twice these; NVLink 4: 900 GB/s, both directions.
    Published("H100", 989.5, 494.5, 67, 67, 3350, 450, "https://www.nvidia.com/en-us/data-center/h100/"),
    # SXM5; as H100, with other memory.
    Published("H200", 989.5, 494.5, 67, 67, 4800, 450, "https://www.nvidia.com/en-us/data-center/h200/"),
    # One of the eight of an HGX B200, at 1000 W; NVLink 5: 1800 GB/s, both directions.
    Published("B200", 2250, 1100, 80, 40, 8000, 900, "https://resources.nvidia.com/en-us-blackwell-architecture"),
    # OAM; seven Infinity Fabric links of 128 GB/s, both directions; fp32 and fp64 of the matrix cores.
    Published(
        "MI300X", 1307.4, 653.7, 163.4, 163.4, 5300, 448, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
    ),
)


def names() -> list[str]:
    """The devices there are figures for."""
    return [p.name for p in PUBLISHED]


def device(name: str, tf32: bool = False, efficiency: float = 1.0, published: Iterable[Published] = PUBLISHED) -> Machine:
    """The machine of a published device, by its name in any case. ``tf32``: compute float32 products in TF32. ``efficiency``: share of
    every published rate that is reached. Raises ValueError, with the names, for an unknown one."""
    found = next((p for p in published if p.name.lower() == name.lower()), None)
    if found is None:
        raise ValueError(f"no published figures for {name!r}; there are: {', '.join(names())}")
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be between 0 and 1, got {efficiency}")
    tera, giga = 1e12 * efficiency, 1e9 * efficiency
    half = found.bf16 * tera
    single = (found.tf32 if tf32 else found.fp32) * tera
    return Machine(
        name=found.name if efficiency == 1 else f"{found.name} at {efficiency:.0%}",
        rates=Rates(
            {"bfloat16": half, "float16": half, "float32": single, "float64": found.fp64 * tera}, found.memory * giga, ASSUMED["launch"]
        ),
        links={ANY: Link(ASSUMED["latency"], found.interconnect * giga)},
        backend="nccl",
        world=8,
        source=found.source,
        notes={"latency": "assumed, not published", "launch": "assumed, not published"},
    )
