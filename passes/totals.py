"""A step's totals as formulas: FLOPs, bytes moved and bytes sent, over the batch, the sequence length and the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import sympy

from .cost import Work
from .machine import wire_bytes

WORLD = sympy.Symbol("world", positive=True, integer=True)


@dataclass(frozen=True)
class Cost:
    """What one rank does in a step. Numbers, or sympy expressions over `symbols`.

    ``flops``: of matmuls, convolutions and attention; ``memory``: bytes that kernels read and write; ``wire``: bytes sent, the least
    possible for the collectives (`wire_bytes`), with the padding of the world size that the report was made for."""

    flops: Any
    memory: Any
    wire: Any

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names that `subs` takes: ``world``, and the sizes marked dynamic, ``a0_dim1`` for dimension 1 of the first input."""
        return tuple(sorted({str(s) for f in fields(self) for s in sympy.sympify(getattr(self, f.name)).free_symbols}))

    def subs(self, **values: float) -> Cost:
        """With numbers for some symbols: ``cost.subs(world=64, a0_dim0=8)``. Raises ValueError, with the names, for an unknown one."""
        unknown = sorted(values.keys() - set(self.symbols))
        if unknown:
            raise ValueError(f"no symbol {unknown[0]!r} in these costs; there are: {', '.join(self.symbols) or 'none'}")
        return replace(self, **{f.name: _put(getattr(self, f.name), values) for f in fields(self)})


def _put(amount: Any, values: dict[str, float]) -> Any:
    expr = sympy.sympify(amount)
    expr = expr.subs({s: values[str(s)] for s in expr.free_symbols if str(s) in values})
    return expr if expr.free_symbols else float(expr) if not expr.is_integer else int(expr)


def total(works: Iterable[Work]) -> Cost:
    """The sum over graphs, each as often as it is given."""
    works = list(works)
    kernels = [k for w in works for k in w.kernels]
    sent = [wire_bytes(e.kind, e.nbytes, WORLD) for w in works for e in w.launches]
    return Cost(
        flops=sympy.expand(sympy.Add(*(k.flops_expr for k in kernels))),
        memory=sympy.expand(sympy.Add(*(k.bytes_expr for k in kernels))),
        wire=sympy.factor(sympy.Add(*sent)),
    )
