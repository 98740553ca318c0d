"""Ranks that execute a scheduled graph in one process, in lockstep.

They are adversaries: a launched buffer holds NaN until its wait, a freed one holds NaN from its free on, and a collective's input that
changes between launch and wait is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fsdp_compile.passes.exchange import ALL_TO_ALLS, SENT_GATHERS
from fsdp_compile.passes.graph_ops import FREE, c10d
from fsdp_compile.passes.lift import ENTRY
from torch import Tensor, fx


@dataclass
class _Flight:
    """A launched collective: each rank's output buffer, what it will hold, and the inputs with a copy of them."""

    result: Tensor
    sent: list[tuple[Tensor, Tensor]]


class Ranks:
    """Executes one graph for all ranks, node by node."""

    def __init__(self, gm: fx.GraphModule, world: int) -> None:
        self.gm, self.world, self.flights = gm, world, {}  # type: ignore[var-annotated]

    def run(self, args: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """``args[rank]`` → outputs of each rank."""
        envs: list[dict[fx.Node, Any]] = [{} for _ in range(self.world)]
        feeds = [iter(a) for a in args]
        for n in self.gm.graph.nodes:
            if n.op == "output":
                assert not self.flights, f"{len(self.flights)} collectives were never waited for"
                return [list(fx.map_arg(n.args[0], env.__getitem__)) for env in envs]
            values = [next(f) for f in feeds] if n.op == "placeholder" else self._values(n, envs)
            for env, v in zip(envs, values):
                env[n] = v
        raise AssertionError("the graph has no output")

    def _values(self, n: fx.Node, envs: list[dict[fx.Node, Any]]) -> list[Any]:
        if n.op == "get_attr":
            return [operator.attrgetter(str(n.target))(self.gm)] * self.world
        args = [fx.map_arg(n.args, env.__getitem__) for env in envs]
        if n.target in _SIMULATED:
            if n.target is ENTRY:  # (shards, world, group, dtype, own): a coalesced all-gather that casts
                args = [([x.to(getattr(torch, a[3])) for x in a[0]], *a[1:3]) for a in args]
            name = "all_gather_coalesced" if n.target is ENTRY else n.target.__name__.split(".")[0]  # type: ignore[union-attr]
            many = name.endswith("_coalesced")
            parts = zip(*(a[0] for a in args)) if many else [tuple(a[0] for a in args)]
            op = args[0][1] if name.startswith("reduce") else name
            said = len(args[0][1]) if name == "all_to_all_single" else args[0][-2]
            assert said == self.world, f"{n.name} speaks of {said} ranks, there are {self.world}"
            outs = [self._launch(list(p), op) for p in parts]
            return [[o[r] for o in outs] if many else outs[0][r] for r in range(self.world)]
        if n.target is c10d.wait_tensor.default:
            return [self._wait(a[0]) for a in args]
        if n.target is FREE:
            for a in args:
                a[0].fill_(float("nan"))
            return [None] * self.world
        kwargs = [fx.map_arg(n.kwargs, env.__getitem__) for env in envs]
        return [n.target(*a, **k) for a, k in zip(args, kwargs)]  # type: ignore[operator]

    def _launch(self, parts: list[Tensor], op: str) -> list[Tensor]:
        assert all(p.dim() == 1 and p.is_contiguous() for p in parts), "collectives take flat, contiguous tensors"
        if op.startswith("all_gather"):
            results = [torch.cat(parts)] * self.world
        elif op.startswith("all_to_all"):
            results = [torch.cat(list(got)) for got in zip(*(p.chunk(self.world) for p in parts))]
        else:
            total = reduce_(parts, op)
            results = list(total.chunk(self.world))
        bufs = [torch.full_like(x, float("nan")) for x in results]
        for b, x in zip(bufs, results):
            self.flights[id(b)] = _Flight(x, [(p, p.clone()) for p in parts])
        return bufs

    def _wait(self, buf: Tensor) -> Tensor:
        flight = self.flights.pop(id(buf), None)
        assert flight is not None, "waited for something that no collective delivers, or twice"
        for now, then in flight.sent:
            assert torch.equal(now, then), "an input changed while its collective was in flight"
        return buf.copy_(flight.result)


_SIMULATED = (
    *ALL_TO_ALLS,
    *SENT_GATHERS,
    ENTRY,
    c10d.all_gather_into_tensor.default,
    c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default,
)


def reduce_(parts: Iterable[Tensor], op: str) -> Tensor:
    """Sum or mean over ranks, in the tensors' own dtype."""
    parts = list(parts)
    total = torch.stack(parts).sum(0)
    return total / len(parts) if op == "avg" else total
