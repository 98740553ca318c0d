"""All passes together: numbers equal to eager's on simulated ranks, for random programs and for each kind of parameter."""

from __future__ import annotations

import copy
import functools
import gc
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_compile.passes.exchange import TRANSPORTS
from fsdp_compile.passes.graph_ops import REDUCE_GRAD, UNSHARD
from fsdp_compile.passes.pipeline import run_passes
from fsdp_compile.passes.roles import nodes_of
from fsdp_compile.passes.verify import Expectation, verify
from graphs import Captured, Program, Read, assert_same, capture, chain, plan_of, reference, scheduled, spec, synthetic, train

from fsdp_compile.spec import ParamSpec

MODES = ["coalesced", "packed"]
D = 3  # width of the random programs' activations


# --- each kind of parameter ----------------------------------------------------------------------------------------------


def mixed(world: int, **kwargs: Any) -> Program:
    """Uneven rows, a vector, a scalar, an empty parameter, one shared, one frozen, one never used."""
    shapes: dict[str, tuple[int, ...]] = {"a": (D, D), "bias": (D,), "scale": (), "empty": (0, D), "one.row": (1, D)}
    shapes.update({"frozen": (D, D), "unused": (7,), "b": (D, 5)})
    specs = tuple(spec(name, *shape, world=world, **kwargs) for name, shape in shapes.items())

    def fn(read: Read, x: Any) -> Any:
        x = torch.tanh(x @ read("a") + read("bias")) * read("scale")
        x = torch.cat([x, read("empty")]) + read("one.row")
        x = torch.tanh(x @ read("frozen")) @ read("a")
        return (x @ read("b"), x.sum())

    dtype = kwargs.get("compute_dtype", kwargs.get("dtype", torch.float64))
    return Program(fn, specs, (torch.empty(4, D, dtype=dtype),), frozenset({"frozen"}))


@functools.cache
def captured(world: int, style: str) -> Captured:
    return capture(mixed(world), style)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("style", ["fx", "inductor"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bucket_bytes", [0, 250, 1 << 20])
def test_numbers_are_eagers(world: int, style: str, mode: str, bucket_bytes: int) -> None:
    program = mixed(world)
    want = reference(program)
    assert want.grads["unused"] is None and want.grads["frozen"] is None and want.grads["a"] is not None
    for prefetch in (0, 1, 3):
        for transport in TRANSPORTS:
            plan = plan_of(bucket_bytes, mode, prefetch, transport=transport)
            assert_same(train(program, plan, captured(world, style)), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_bfloat16_compute_with_float32_reduction(mode: str, op: str) -> None:
    low = {"dtype": torch.float32, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "reduce_op": op}
    program = mixed(3, **low)
    got = train(program, plan_of(100, mode))
    assert_same(got, reference(program), rtol=0, atol=0)  # eager's kernels in eager's order: every bit
    assert got.backward is not None
    assert {c.dtype for c in got.backward.collectives if c.kind == "reduce_scatter"} == {"float32"}
    assert {c.dtype for c in got.backward.collectives if c.kind == "all_gather"} == {"bfloat16"}


@pytest.mark.parametrize("mode", MODES)
def test_a_precision_of_its_own_for_each_parameter(mode: str) -> None:
    program = chain(6, per_layer=1, world=2, dtype=torch.float32)
    kinds = [{}, {"compute_dtype": torch.float32, "reduce_dtype": torch.float64}, {"reduce_op": "sum"}]
    program = replace(program, specs=tuple(replace(s, **kinds[i % 3]) for i, s in enumerate(program.specs)))
    got = train(program, plan_of(1 << 20, mode))
    assert_same(got, reference(program), rtol=1e-6, atol=1e-7)
    assert got.forward is not None and got.backward is not None
    assert len(got.forward.collectives) == 1
    reduced = {c.params: (c.dtype, c.group) for c in got.backward.collectives if c.kind == "reduce_scatter"}
    assert len(reduced) == 6 and {d for d, _ in reduced.values()} == {"float32", "float64"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(mode: str, dtype: torch.dtype) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (3, 3), "b": (5, 3), "c": (), "d": (3,)}
    specs = tuple(spec(n, *shape, world=2, dtype=dtype) for n, shape in shapes.items())

    def fn(read: Read, x: Any) -> Any:
        y = x.to(dtype) @ read("a") @ read("b").conj().t() * read("c")
        return tuple(torch.view_as_real(z) for z in (y, read("a").conj() * 2, read("d").conj() * 2))

    program = Program(fn, specs, (torch.empty(2, 3, dtype=dtype.to_real()),))
    tol = 1e-5 if dtype is torch.complex64 else 1e-12
    assert_same(train(program, plan_of(1 << 20, mode)), reference(program), rtol=tol, atol=tol)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_kept_and_returned_parameters(mode: str, bucket_bytes: int) -> None:
    """Some stay gathered until backward, one is returned whole: they share a graph, and a bucket, with freed ones."""
    program = chain(5, width=4, world=2)
    program = replace(program, specs=tuple(replace(s, reshard=i % 2 == 0) for i, s in enumerate(program.specs)))
    returning = replace(program, fn=lambda read, x: (program.fn(read, x), read("layer2.w0").t()))
    for p in (program, returning):
        got = train(p, plan_of(bucket_bytes, mode))
        assert_same(got, reference(p))
        assert got.backward is not None
        regathered = {q for c in got.backward.collectives if c.kind == "all_gather" for q in c.params}
        assert regathered == {"layer2.w0", "layer4.w0"} - ({"layer2.w0"} if p is returning else set())


def test_inference_gathers_and_reduces_nothing() -> None:
    program = mixed(2)
    got = train(program, plan_of(250), capture(program, grad=False))
    assert_same(replace(got, grads={}), replace(reference(program), grads={}))
    assert got.forward is not None and not got.forward.reduced and got.backward is None


def test_a_gradient_that_is_nothing_but_another_gathered_parameter() -> None:
    """It is copied before the parameter is freed, and packed from the copy."""
    gm = capture(chain(2, width=4)).backward()
    weight = next(n for n in gm.graph.nodes if n.target is UNSHARD)
    reduce = next(n for n in gm.graph.nodes if n.target is REDUCE_GRAD)
    reduce.replace_input_with(reduce.args[0], weight)
    gm.graph.eliminate_dead_code()
    done = scheduled(gm, "backward", plan_of(0))
    verify(gm.graph, Expectation(done.gathered, done.reduced))
    sent = next(n for n, r in nodes_of(gm.graph, "reduce") if r.params == ("layer1.w0",)).args[0]
    while sent.target is torch.ops.aten.reshape.default:
        sent = sent.args[0]
    assert sent.target is torch.ops.aten.clone.default


def test_the_same_collectives_whatever_the_batch() -> None:
    signatures = []
    for batch in (1, 2, 17):
        program = replace(mixed(2), inputs=(torch.empty(batch, D, dtype=torch.float64),))
        done = train(program, plan_of(250))
        assert done.forward is not None and done.backward is not None
        signatures.append([c.signature() for c in (*done.forward.collectives, *done.backward.collectives)])
    assert signatures[0] == signatures[1] == signatures[2]


# --- random programs -----------------------------------------------------------------------------------------------------


def random_program(seed: int) -> Program:
    """A random tree of parameters (odd shapes; shared, frozen, unused, scalar ones) read in random order, reused far apart."""
    rng = random.Random(seed)
    world = rng.choice([1, 2, 2, 3, 4])
    shapes = [(D, D), (D,), (), (1, D), (D, 1), (2 * D + 1, D), (0, D), (5, D)]
    specs = []
    for i in range(rng.randint(1, 9)):
        shape = rng.choice(shapes)
        s = spec(f"m{rng.randint(0, 2)}.p{i}", *shape, world=world, reduce_op=rng.choice(["avg", "avg", "sum"]))
        specs.append(replace(s, reshard=rng.random() > 0.15))
    steps = [rng.randrange(len(specs)) for _ in range(rng.randint(1, 12))]
    forms = [rng.random() for _ in steps]
    returned = rng.random() < 0.15

    def apply(x: Any, w: Any, s: ParamSpec, form: float) -> Any:
        if s.shape == (D, D):
            return torch.tanh(x @ (w if form < 0.5 else w.t()))
        if s.shape in ((D,), (), (1, D)):
            return x * w if form < 0.5 else x + w.sin()
        if s.shape == (D, 1):
            return x + torch.tanh(x @ w)
        return torch.tanh(x + (w[1:3] if form < 0.5 and s.shape[0] else w).sum(0))

    def fn(read: Read, x: Any) -> Any:
        for i, form in zip(steps, forms):
            x = apply(x, read(specs[i].fqn), specs[i], form)
        return (x, read(specs[steps[0]].fqn).reshape(-1)) if returned else x

    frozen = frozenset(s.fqn for s in specs if rng.random() < 0.2)
    if all(specs[i].fqn in frozen for i in steps):
        frozen -= {specs[steps[0]].fqn}
    if returned:
        frozen -= {specs[steps[0]].fqn}
    return Program(fn, tuple(specs), (torch.empty(2, D, dtype=torch.float64),), frozen, seed)


@pytest.mark.parametrize("seed", range(200))
def test_random_programs(seed: int) -> None:
    """All passes, the verifier among them, accept every program; numbers equal eager's. (Hypothesis's 200 examples were 78 programs.)"""
    program = random_program(seed)
    rng = random.Random(f"plan {seed}")
    plan = plan_of(
        rng.choice([0, 100, 300, 1 << 20]),
        rng.choice(MODES),
        rng.randint(0, 4),
        labels={s.fqn: s.fqn.split(".")[0] for s in program.specs} if rng.random() < 0.5 else {},
        reduces=rng.choice([None, 1, 200]),
        transport=rng.choice(TRANSPORTS),
    )
    assert_same(train(program, plan), reference(program))


# --- scaling -------------------------------------------------------------------------------------------------------------


def test_passes_are_linear_and_fast_on_126_layers_of_9_parameters() -> None:
    """Seconds of processor time for all passes on a backward graph; twice the layers must not cost much more than twice as much."""
    run_passes(synthetic(8, 9), "backward", plan_of(9 * 128))  # warm up
    took = {}
    for layers in (32, 63, 126):
        best = float("inf")
        made = synthetic(layers, 9)
        for graph in (copy.deepcopy(made), made):
            gc.collect()
            start = time.process_time()
            done = run_passes(graph, "backward", plan_of(9 * 128))
            best = min(best, time.process_time() - start)
        assert len(done.collectives) == 2 * layers
        took[layers] = best
    assert took[126] < 10, took
    assert took[126] / took[32] < 1.6 * 126 / 32, took
