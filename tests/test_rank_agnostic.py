"""Every rank runs the same graph text; compiling communicates nothing; different sequence lengths keep the same collectives."""

from __future__ import annotations

import tempfile
from pathlib import Path

import models
import parity
import pytest
import torch
import torch.distributed as dist

from fsdp_compile import fully_shard
from fsdp_compile.frame import Frame, graph_text, specs_of
from fsdp_compile.options import parse
from fsdp_compile.paths import module_paths

LOWERINGS = ["fx", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])]


class Graphs:
    """The backend, with every graph of every stage recorded as text."""

    def __init__(self, lowering: str) -> None:
        self.lowering = lowering
        self.texts: list[tuple[str, str, str]] = []
        self.frames: list[Frame] = []

    def __call__(self, gm, inputs):
        frame = Frame(0, parse({"lowering": self.lowering, "bucket_bytes": 4000}), module_paths(specs_of(gm)))
        self.frames.append(frame)
        frame.observe = lambda stage, graph, direction: self.texts.append((stage, direction, graph_text(graph)))
        return frame.compile(gm, inputs)

    def collectives(self, direction: str) -> list[list[str]]:
        """The collectives of each graph that was lowered, in order, with what they send."""
        return [[c.signature() for c in done.collectives] for f in self.frames for done in f.schedules if done.direction == direction]


def dumped(lowering: str) -> list[tuple[str, str, str]]:
    graphs = Graphs(lowering)
    model = fully_shard(models.decoder(layers=1))
    x, y = models.token_batch(0)
    models.token_loss(torch.compile(model, backend=graphs)(x), y).backward()
    return graphs.texts


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_graphs_are_textually_equal(pool, lowering):
    zero, *others = pool.run(3, dumped, lowering)
    assert {s for s, d, _ in zero if d == "forward"} >= {"markers", "insert", "bucket", "schedule", "verify", "lower"}
    assert {d for _, d, _ in zero} == {"joint", "forward", "backward"}
    assert sum("all_gather" in t for *_, t in zero) > 2
    for other in others:
        for a, b in zip(zero, other, strict=True):
            assert a == b


def dumped_files() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        fast = torch.compile(models.mlp(), backend="fsdp", options={"lowering": "fx", "dump_graphs": folder})
        models.square_loss(fast(models.vector_batch(0)[0]), models.vector_batch(0)[1]).backward()
        return {p.name: p.read_text() for p in Path(folder).iterdir()}


def test_dump_graphs_writes_each_stage(pool):
    zero, one = pool.run(2, dumped_files)
    for stage in ("insert", "bucket", "schedule", "lower"):
        for direction in ("forward", "backward"):
            assert any(direction in n and stage in n for n in zero), (stage, sorted(zero))
    assert one == {}, "only rank 0 writes"


class Compiled(Exception):
    """Stops after compilation, before anything runs."""


def compile_alone(lowering: str) -> int:
    """Rank 0 compiles forward and backward while rank 1 does nothing: a collective would not come back."""
    model = fully_shard(models.mlp())
    graphs = Graphs(lowering)

    def backend(gm, inputs):
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            graphs(gm, inputs)
        raise Compiled

    if dist.get_rank() == 0:
        with pytest.raises(Exception, match="Compiled"):
            torch.compile(model, backend=backend)(models.vector_batch(0)[0])
    return len(graphs.collectives("forward") + graphs.collectives("backward"))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_compiling_communicates_nothing(pool, lowering):
    assert pool.run(2, compile_alone, lowering, pg_timeout_s=10.0) == [2, 0]


def lengths(lowering: str, plan: list[list[int]], dynamic: bool | None) -> tuple[list[list[str]], list[list[str]], int]:
    """The collectives of `parity.lengths_alike`, and how many graphs there were."""
    graphs = Graphs(lowering)
    model = fully_shard(models.decoder(layers=1))
    parity.lengths_alike(torch.compile(model, backend=graphs, dynamic=dynamic), model, models.decoder(layers=1), plan)
    return graphs.collectives("forward"), graphs.collectives("backward"), sum(s == "dynamo" for s, *_ in graphs.texts)


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_different_lengths_on_each_rank(pool, dynamic):
    results = pool.run(2, lengths, "fx", [[8, 8, 8, 8], [8, 12, 5, 16]], dynamic)
    every = [tuple(g) for forward, _, _ in results for g in forward]
    assert len(set(every)) == 1 and len(every[0]) >= 2, "the collectives of forward depend on the sequence length"
    every = [tuple(g) for _, backward, _ in results for g in backward]
    assert len(set(every)) == 1 and len(every[0]) >= 2, "the collectives of backward depend on the sequence length"
    if dynamic is not True:
        assert results[1][2] > results[0][2] == 1, "rank 1 was meant to recompile, and rank 0 not"


