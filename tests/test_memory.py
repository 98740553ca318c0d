"""ZeRO-3 memory: between forward and backward no gathered weight is alive that is not meant to be, in the graphs and in the process."""

from __future__ import annotations

import gc
import weakref

import models
import pytest
import torch
import torch.distributed as dist
from census import least
from fsdp_compile.passes.machine import Link, Machine, Rates
from torch import Tensor, nn

from fsdp_compile import explain, fully_shard
from fsdp_compile.frame import Frame, specs_of
from fsdp_compile.options import parse
from fsdp_compile.paths import module_paths
from fsdp_compile.validate_worker import GatheredBytes

ROWS, WIDTH, HIDDEN = 3, 17, 67  # products of these are no parameter's size
LOWERINGS = ["fx", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])]


def build() -> nn.Module:
    """Activations have 3 * 17, 3 * 67 elements; weights 17 * 67, 67 * 67."""
    torch.manual_seed(0)
    return models.MLP(WIDTH, HIDDEN, WIDTH)


def saved_sizes(out: Tensor) -> list[int]:
    """Elements of every tensor that the autograd graph behind ``out`` keeps, by storage."""
    sizes, seen, todo = [], set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept = list(getattr(node, "saved_tensors", ()))
        kept += [getattr(node, a) for a in dir(node) if a.startswith("_saved_") and isinstance(getattr(node, a), Tensor)]
        sizes += [t.untyped_storage().nbytes() // t.element_size() for t in kept if not hasattr(t, "_fsdp_is_shard")]
        todo += [f for f, _ in node.next_functions]
    return sizes


def whole_sizes(model: nn.Module) -> set[int]:
    """Elements that a gathered parameter of more than one dimension may take, padded or not."""
    world = dist.get_world_size()
    return {n for p in model.parameters() if p.dim() > 1 for n in (p.numel(), -(-p.shape[0] // world) * world * p.shape[1])}


def saved(lowering: str, keep: bool) -> tuple[list[int], set[int], int]:
    model = fully_shard(build(), reshard_after_forward=not keep)
    fast = torch.compile(model, backend="fsdp", options={"lowering": lowering})
    x = torch.randn(ROWS, WIDTH)
    fast(x).square().sum().backward()
    out = fast(x).square().sum()
    alive = saved_sizes(out)
    out.backward()
    return alive, whole_sizes(model), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_no_whole_weight_is_saved(pool, lowering):
    for alive, whole, _ in pool.run(2, saved, lowering, False):
        assert alive, "nothing is saved at all: the walk over the graph must be wrong"
        assert not whole & set(alive), f"saved for backward: {sorted(alive)}, of which {sorted(whole & set(alive))} are weights"


def test_the_check_sees_kept_weights(pool):
    """With reshard_after_forward=False the same check must find weights, or it proves nothing."""
    for alive, whole, _ in pool.run(2, saved, "fx", True):
        assert whole & set(alive), sorted(alive)


def live_bytes(options: dict[str, int]) -> tuple[int, int]:
    """Bytes of all tensors alive between forward and backward beyond those alive before, and of the whole model."""
    model = fully_shard(build())
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx", "bucket_bytes": 0, **options})
    x = torch.randn(ROWS, WIDTH)
    fast(x).square().sum().backward()
    model.zero_grad()
    total = sum(p.numel() for p in model.parameters()) * 4

    def alive() -> dict[int, Tensor]:
        """One tensor for each storage alive."""
        found = {}
        for t in gc.get_objects():
            if issubclass(type(t), Tensor) and type(t) in (Tensor, nn.Parameter) and not t.is_meta:
                try:
                    found[t.untyped_storage().data_ptr()] = t
                except (RuntimeError, NotImplementedError):
                    continue
        return found

    gc.collect()
    before = alive()  # held, so that no address is used again
    loss = fast(x).square().sum()
    kept = [t for n in _nodes(loss) for t in getattr(n, "saved_tensors", ())]
    extra = least(lambda: sum(t.untyped_storage().nbytes() for ptr, t in alive().items() if ptr not in before))
    del kept
    loss.backward()
    return extra, total


def _nodes(out: Tensor) -> list:
    seen, todo = [], [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.append(node)
            todo += [f for f, _ in node.next_functions]
    return seen


def test_live_bytes_between_forward_and_backward(pool):
    activations = 4 * (ROWS * (2 * WIDTH + 6 * HIDDEN) + 64)
    for extra, total in pool.run(2, live_bytes, {"keep_bytes": 0}):
        assert 0 < extra <= activations < total / 4, (extra, activations, total)


def test_live_bytes_by_default(pool):
    """One rank's shards' worth of weights, the last layers', and what is not kept is not there."""
    activations = 4 * (ROWS * (2 * WIDTH + 6 * HIDDEN) + 64)
    last = 4 * WIDTH * HIDDEN
    for extra, total in pool.run(2, live_bytes, {}):
        assert last < extra <= activations + total / 2 + 4 * 2 * HIDDEN, (extra, activations, total)


def outputs_of_gathers(lowering: str) -> list[str]:
    """Names of forward outputs that are views of a gathered buffer, read off the graph that is run."""
    bad: list[str] = []
    seen: list[str] = []

    def observe(stage: str, graph: torch.fx.Graph, direction: str) -> None:
        if stage != "lower":
            return
        seen.append(direction)
        tainted = set()
        for n in graph.nodes:
            name = str(n.target)
            if "all_gather" in name or (n.op == "call_function" and _renames(name) and any(a in tainted for a in n.all_input_nodes)):
                tainted.add(n)
            if n.op == "output" and direction == "forward":
                bad.extend(a.name for a in n.all_input_nodes if a in tainted)

    def backend(gm, inputs):
        frame = Frame(0, parse({"lowering": lowering, "keep_bytes": 0}), module_paths(specs_of(gm)))
        frame.observe = observe
        return frame.compile(gm, inputs)

    model = fully_shard(build())
    torch.compile(model, backend=backend)(torch.randn(ROWS, WIDTH)).sum().backward()
    assert sorted(seen) == ["backward", "forward"], seen
    return bad


def _renames(target: str) -> bool:
    words = ("wait_tensor", "view", "reshape", "slice", "permute", "transpose", "aten.t.", "getitem", "alias", "_to_copy", "convert")
    return any(w in target for w in words)


@pytest.mark.parametrize("lowering", ["fx"])
def test_no_forward_output_is_a_view_of_a_gather(pool, lowering):
    assert pool.run(2, outputs_of_gathers, lowering) == [[], []]


def storages_freed() -> None:
    """The whole tensors of an eager forward die with it."""
    model = fully_shard(build())
    held: list[weakref.ref] = []
    model.b.register_forward_pre_hook(lambda m, a: held.append(weakref.ref(m.weight)))
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    assert len(held) == 1 and held[0]() is None


def test_eager_whole_weights_die(pool):
    pool.run(2, storages_freed)


def decoder(tied: bool) -> nn.Module:
    model = models.decoder()
    if tied:
        model.head.weight = model.embedding.weight  # type: ignore[union-attr]
    return model


def gathered_at_once(options: dict[str, int], tied: bool) -> int:
    fast = torch.compile(fully_shard(decoder(tied)), backend="fsdp", options={"lowering": "fx", **options})
    x, y = models.token_batch(0)
    found = []
    for _ in range(5):  # the first traces; in some, a thread of gloo's lets go of a weight late
        with GatheredBytes() as seen:
            models.token_loss(fast(x), y).backward()
        found.append(seen.peak)
    return min(found[1:])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_most_gathered_bytes_are_those_predicted(pool, tied):
    """What is kept for backward is freed there after its last use: nobody holds on to a graph's inputs."""
    options = {"keep_bytes": 20_000, "bucket_bytes": 0}
    report = explain(decoder(tied), models.token_batch(0)[0], world_size=2, lowering="fx", transport="own", **options)
    machine = Machine("any", Rates({"float32": 6e10}, 1e10, 3e-6), {"any": Link(5e-4, 1.2e7)})
    assert pool.run(2, gathered_at_once, options, tied) == [report.simulate(machine, "none").peak_gathered_bytes] * 2
