"""Sharded training equals training on one process, and equals eager FSDP2."""

from __future__ import annotations

import functools

import models
import parity
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

DECODER = parity.Case(functools.partial(models.decoder, layers=2), models.token_batch, models.token_loss, steps=10, clip=1.0)
SHORT = parity.Case(models.mlp, models.vector_batch, models.square_loss, steps=3, lr=1e-2, clip=0.5)


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_decoder_fx(pool, world):
    assert len(parity.check(pool, DECODER, world)) == world


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.extra)])
def test_decoder_inductor(pool, world):
    parity.check(pool, DECODER, world, lowering="inductor")


@pytest.mark.parametrize("entry", parity.ENTRIES)
def test_entries(pool, entry):
    parity.check(pool, SHORT, 2, entry=entry)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bucket_bytes": 0}, marks=pytest.mark.extra),
        {"bucket_bytes": 600, "prefetch": 2},
        pytest.param({"collective": "packed"}, marks=pytest.mark.extra),
        {"collective": "packed", "bucket_modules": ("Linear",)},
        {"bucket_modules": "Linear", "prefetch": 0},
        {"limit_all_gathers": 1000, "prefetch": 3},
        {"limit_reduce_scatters": 1},
        pytest.param({"min_num_params": 100}, marks=pytest.mark.extra),
    ],
    ids=str,
)
def test_options_change_no_value(pool, options):
    parity.check(pool, SHORT, 3, options=options)


def test_gradient_accumulation(pool):
    parity.check(pool, parity.Case(models.mlp, models.vector_batch, models.square_loss, lr=1e-2, micro=2, clip=1.0), 2)


def test_kept_weights(pool):
    parity.check(pool, SHORT, 2, shard_args={"reshard_after_forward": False})


def eager_fsdp2(case: parity.Case, policy: MixedPrecisionPolicy) -> parity.Run:
    model = case.build()
    for block in model.layers:
        fsdp2(block, mp_policy=policy)
    fsdp2(model, mp_policy=policy)
    step = lambda x, *rest: case.loss(model(x), *rest)  # noqa: E731
    run = parity.loop(case, step, list(model.parameters()), dist.get_rank(), dist.get_world_size())
    run.params = {n: parity.full(p) for n, p in model.named_parameters()}
    return run


def test_bitwise_equal_to_eager_fsdp2(pool):
    want = pool.run(2, eager_fsdp2, DECODER, MixedPrecisionPolicy())[0]
    got = pool.run(2, parity.sharded, DECODER, "fully_shard", {"lowering": "fx"})[0]
    assert got.losses == want.losses
    assert got.norms == want.norms
    unequal = [n for n, p in want.params.items() if not torch.equal(got.params[n], p)]
    assert not unequal, unequal


def distance(run: parity.Run, want: parity.Run) -> float:
    return sum(float((run.params[n].float() - p).square().sum()) for n, p in want.params.items()) ** 0.5


@pytest.mark.parametrize("lowering", ["fx", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])])
def test_bf16_is_as_near_as_fsdp2(pool, lowering):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    want = parity.one_process(DECODER)
    theirs = distance(pool.run(2, eager_fsdp2, DECODER, policy)[0], want)
    ours = distance(pool.run(2, parity.sharded, DECODER, "fully_shard", {"lowering": lowering}, {"mp_policy": policy})[0], want)
    assert 0 < ours <= 1.2 * theirs, (ours, theirs)


def grad_dtypes(policy: MixedPrecisionPolicy) -> list[tuple[torch.dtype, torch.dtype]]:
    model = models.mlp()
    step = parity.step_function(model, SHORT, "fully_shard", {"lowering": "fx"}, {"mp_policy": policy})
    step(*models.vector_batch(0)).backward()
    return [(p.dtype, p.grad.dtype) for p in model.parameters()]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_gradients_have_the_parameters_dtype(pool, reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for rank in pool.run(2, grad_dtypes, policy):
        assert rank == [(torch.float32, torch.float32)] * 6
