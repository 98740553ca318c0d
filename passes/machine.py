"""What a machine can do, in the few numbers that a prediction needs: `Rates` of one device, `Link` of each kind of collective.

::

    kernel        launch + max(flops / matmul rate, bytes read and written / memory rate)
    collective    latency + bytes on the wire / bandwidth

The first is the roofline model (Williams, Waterman, Patterson 2009, https://doi.org/10.1145/1498765.1498785), the second the
latency-bandwidth (Hockney) model as used for collectives by Thakur, Rabenseifner, Gropp 2005, https://doi.org/10.1177/1094342005051521.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("all_gather", "reduce_scatter", "all_to_all")
ANY = "any"


@dataclass(frozen=True)
class Rates:
    """One device. ``flops``: dtype name → matmul operations in a second (an add and a multiply are two). ``memory``: bytes in a
    second, read and written together. ``launch``: seconds that any kernel takes at least."""

    flops: Mapping[str, float]
    memory: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        if not self.flops or min(self.flops.values()) <= 0:
            raise ValueError(f"matmul rates must be positive and at least one, got {dict(self.flops)}")
        if self.memory <= 0:
            raise ValueError(f"the memory rate must be positive, got {self.memory}")
        if self.launch < 0:
            raise ValueError(f"the launch time must not be negative, got {self.launch}")

    def seconds(self, flops: float, nbytes: float, dtype: str) -> float:
        """How long one kernel takes. A dtype without a rate of its own computes at the slowest known one."""
        rate = self.flops.get(dtype, min(self.flops.values()))
        return self.launch + max(flops / rate, nbytes / self.memory)


@dataclass(frozen=True)
class Link:
    """A fitted line: a collective takes ``latency`` seconds + bytes that a rank sends / ``bandwidth`` (bytes/s). ``residual``: median
    of |measured - fitted| / measured (None: not measured)."""

    latency: float
    bandwidth: float
    residual: float | None = None

    def __post_init__(self) -> None:
        if self.latency < 0:
            raise ValueError(f"latency must not be negative, got {self.latency}")
        if self.bandwidth <= 0:
            raise ValueError(f"bandwidth must be positive, got {self.bandwidth}")

    def seconds(self, wire: float) -> float:
        """How long it takes to send ``wire`` bytes."""
        return self.latency + wire / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """A device and its network.

    ``links``: ``"kind/lowering/dtype"`` → link; the dtype, or lowering and dtype, may be left out, and ``"any"`` stands for every
    kind. Kinds and lowerings: all_gather coalesced, packed (one buffer); reduce_scatter coalesced, packed; all_to_all packed.
    ``backend``: "gloo", "nccl", …; decides `wire_bytes`. ``world``: ranks at which the links were measured; a latency is taken as it
    is for other numbers of ranks. ``interference``: share of the compute lane that a running collective takes (0: a network card with
    its own engines; 1: nothing computes meanwhile). ``source``: where the figures come from. ``posting``: seconds of the compute lane
    that starting a collective takes.
    """

    name: str
    rates: Rates
    links: Mapping[str, Link]
    backend: str = "nccl"
    world: int = 2
    interference: float = 0.0
    source: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    posting: float = 0.0

    def __post_init__(self) -> None:
        if not self.links:
            raise ValueError(f"machine {self.name!r} has no links")
        for key in self.links:
            if key.partition("/")[0] not in (*KINDS, ANY):
                raise ValueError(f"machine {self.name!r}: link {key!r} is of no known kind; kinds: {', '.join(KINDS)}, {ANY}")
        if not 0 <= self.interference <= 1:
            raise ValueError(f"interference must be between 0 and 1, got {self.interference}")
        if self.posting < 0:
            raise ValueError(f"posting must not be negative, got {self.posting}")
        if self.world < 2:
            raise ValueError(f"links need at least 2 ranks, got {self.world}")

    def link(self, kind: str, lowering: str, dtype: str = "") -> Link:
        """The closest link known. Raises ValueError if nothing is known of this kind."""
        for key in (f"{kind}/{lowering}/{dtype}", f"{kind}/{lowering}", kind, ANY):
            if key in self.links:
                return self.links[key]
        for key, link in self.links.items():  # the same lowering with another dtype, then another lowering
            if key.startswith(f"{kind}/{lowering}/"):
                return link
        for key, link in self.links.items():
            if key.startswith(f"{kind}/"):
                return link
        raise ValueError(f"machine {self.name!r} knows no link for {kind}; it knows: {', '.join(self.links)}")

    def collective_seconds(self, kind: str, lowering: str, dtype: str, nbytes: float, world: int) -> float:
        """One collective of ``nbytes`` (of a gather's output, of a reduction's input) between ``world`` ranks."""
        return self.link(kind, lowering, dtype).seconds(wire_bytes(kind, nbytes, world, self.backend))

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        return json.dumps(asdict(self), indent=1)


def from_json(text: str) -> Machine:
    """What `Machine.to_json` wrote. Raises ValueError for anything else."""
    try:
        data: dict[str, Any] = json.loads(text)
        links = {key: Link(**link) for key, link in data["links"].items()}
        return Machine(**{**data, "rates": Rates(**data["rates"]), "links": links})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a machine: {type(error).__name__} {error}") from error


def wire_bytes(kind: str, nbytes: Any, world: Any, backend: str = "nccl") -> Any:
    """Bytes that each rank sends: (d - 1) / d of a gather's output or a reduction's input, the least possible (ring, or pairwise
    exchange; Thakur et al., above). gloo's native reduce-scatter sends twice that (measured: its all-to-all sends half as much).

    ``nbytes`` and ``world`` may be sympy expressions."""
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}; one of {', '.join(KINDS)}")
    factor = 2 if kind == "reduce_scatter" and backend == "gloo" else 1
    return factor * nbytes * (world - 1) / world
