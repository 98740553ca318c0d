"""ParamSpec: the one vocabulary that graphs, passes and the runtime share. (And `Entry`, what `passes/lift.py` tells `runtime/early.py`.)

A marker in a graph is ``fsdp_compile::unshard(shard, spec)``; ``spec`` is a `ParamSpec` written as one string. A string, because
Dynamo then guards a parameter's whole description with one comparison, a printed graph is complete without side tables, and
the text contains nothing that differs between ranks (design, invariant 4).

    float32[31, 16] | compute bfloat16 | reduce float32 avg | group 0 x 2 | shard reshard | emb.weight
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import torch

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
    )
}
KINDS = ("shard", "replicate")
_RESHARD = {None: "reshard", True: "always", False: "keep"}
REDUCE_OPS = ("avg", "sum")
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ParamSpec:
    """How one parameter is cut over the ranks of one group, and how it is gathered and its gradient reduced.

    A sharded parameter of logical shape ``(d0, *rest)`` has, on every rank, a one-dimensional shard of
    ``ceil(d0 / world) * prod(rest)`` elements (DTensor's ``Shard(0)`` chunks, padded to equal length), so that the
    concatenation of all shards starts with the parameter in row-major order::

        rank 0          rank 1          rank 2
        [r0 r1 r2 r3]   [r4 r5 r6 r7]   [r8 r9  .  . ]     d0 = 10, world 3: chunk 4 rows, two rows of padding

    kind ``replicate`` (scalars): every rank holds the whole; it still travels in its neighbours' collectives.

    reshard: freed after forward: True, always; None, unless it is among what `keep.kept` carries to backward by default; False, never.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    group: str
    world: int
    reduce_op: str = "avg"
    kind: str = "shard"
    reshard: bool | None = None

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"{self.fqn}: world size must be at least 1, got {self.world}")
        if self.kind not in KINDS:
            raise ValueError(f"{self.fqn}: kind must be one of {KINDS}, got {self.kind!r}")
        if self.reduce_op not in REDUCE_OPS:
            raise ValueError(f"{self.fqn}: reduce op must be one of {REDUCE_OPS}, got {self.reduce_op!r}")
        if self.kind == "shard" and not self.shape:
            raise ValueError(f"{self.fqn}: a scalar cannot be sharded on dimension 0; use kind 'replicate'")
        for d in (self.dtype, self.compute_dtype, self.reduce_dtype):
            if dtype_name(d) not in DTYPES:
                raise ValueError(f"{self.fqn}: dtype {d} cannot be sharded; supported: {', '.join(DTYPES)}")
        if self.dtype.is_complex and (self.compute_dtype != self.dtype or self.reduce_dtype != self.real_dtype):
            raise ValueError(f"{self.fqn}: a complex parameter is gathered and reduced in its own precision")

    @property
    def numel(self) -> int:
        """Elements of the logical parameter."""
        return math.prod(self.shape)

    @property
    def chunk_rows(self) -> int:
        """Rows of dimension 0 on each rank, padding included (1 for a scalar)."""
        return -(-self.shape[0] // self.world) if self.kind == "shard" else 1

    @property
    def row_numel(self) -> int:
        """Elements of one row of dimension 0."""
        return math.prod(self.shape[1:]) if self.kind == "shard" else self.numel

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included: the length of the leaf tensor."""
        return self.chunk_rows * self.row_numel

    @property
    def padded_numel(self) -> int:
        """Elements of all ranks' shards together: the length of the gathered buffer."""
        return self.shard_numel * self.world

    @property
    def real_dtype(self) -> torch.dtype:
        """The dtype that travels: complex numbers are sent as pairs of real ones."""
        return _REAL_OF.get(self.compute_dtype, self.compute_dtype)

    @property
    def wire_factor(self) -> int:
        """Real numbers for each element: 2 for complex parameters, 1 otherwise."""
        return 2 if self.compute_dtype.is_complex else 1

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer on each rank."""
        return self.padded_numel * self.compute_dtype.itemsize

    def rows_of(self, rank: int) -> tuple[int, int]:
        """First and last-plus-one row of dimension 0 that ``rank`` owns (no padding)."""
        if self.kind == "replicate":
            return 0, 1
        lo = min(rank * self.chunk_rows, self.shape[0])
        return lo, min(lo + self.chunk_rows, self.shape[0])

    def local_numel(self, rank: int) -> int:
        """Elements that ``rank`` owns, without padding."""
        lo, hi = self.rows_of(rank)
        return (hi - lo) * self.row_numel

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of ``rank``'s DTensor-local tensor."""
        if self.kind == "replicate":
            return self.shape
        lo, hi = self.rows_of(rank)
        return (hi - lo, *self.shape[1:])

    def encode(self) -> str:
        """The spec as one string; `decode` reads it back. The FQN stands last because it may contain any character."""
        shape = ", ".join(map(str, self.shape))
        keep = _RESHARD[self.reshard]
        return (
            f"{dtype_name(self.dtype)}[{shape}] | compute {dtype_name(self.compute_dtype)} | "
            f"reduce {dtype_name(self.reduce_dtype)} {self.reduce_op} | group {self.group} x {self.world} | "
            f"{self.kind} {keep} | {self.fqn}"
        )

    def __str__(self) -> str:
        return self.encode()


_PATTERN = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\] \| compute (?P<compute>\w+) \| reduce (?P<reduce>\w+) (?P<op>\w+) \| "
    r"group (?P<group>.*?) x (?P<world>\d+) \| (?P<kind>\w+) (?P<keep>reshard|always|keep) \| (?P<fqn>.*)",
    re.DOTALL,
)


@functools.lru_cache(maxsize=65536)
def decode(text: str) -> ParamSpec:
    """Read back what `ParamSpec.encode` wrote. Raises ValueError on anything else."""
    m = _PATTERN.fullmatch(text)
    if m is None:
        raise ValueError(f"not a parameter spec: {text!r}")
    for name in (m["dtype"], m["compute"], m["reduce"]):
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r} in parameter spec {text!r}")
    return ParamSpec(
        fqn=m["fqn"],
        shape=tuple(int(x) for x in m["shape"].split(",") if x.strip()),
        dtype=DTYPES[m["dtype"]],
        compute_dtype=DTYPES[m["compute"]],
        reduce_dtype=DTYPES[m["reduce"]],
        group=m["group"],
        world=int(m["world"]),
        reduce_op=m["op"],
        kind=m["kind"],
        reshard=next(k for k, v in _RESHARD.items() if v == m["keep"]),
    )


@dataclass(frozen=True)
class Entry:
    """A gather that a graph has at its entry (`passes/lift.py`). ``inputs``: which of the graph's inputs its shards are; ``dtype``: what
    they are sent in; ``own``: by our own operators (`runtime/wire.py`)."""

    params: tuple[str, ...]
    inputs: tuple[int, ...]
    world: int
    group: str
    dtype: str
    own: bool

    def __post_init__(self) -> None:
        if len(self.params) != len(self.inputs) or not self.inputs:
            raise ValueError(f"{len(self.params)} parameters of {len(self.inputs)} inputs")

    @property
    def text(self) -> str:
        """What it sends, the same on every rank."""
        return f"{self.dtype} group {self.group}: {', '.join(self.params)}"
