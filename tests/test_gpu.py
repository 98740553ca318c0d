"""On a CUDA device: one rank over NCCL trains like one process. The one file that a machine without a GPU cannot run."""

from __future__ import annotations

import os

import models
import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the CPU tests cover the same code over gloo"),
]


@pytest.mark.parametrize("lowering", ["fx", "inductor"])
def test_one_rank_trains_like_one_process(lowering: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29477")
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        plain, model = models.mlp().cuda(), models.mlp().cuda()
        run = torch.compile(model, backend="fsdp", options={"lowering": lowering})
        for step in range(3):
            x, y = (t.cuda() for t in models.vector_batch(step))
            losses = [models.square_loss(m(x), y) for m in (plain, run)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[1], losses[0])
            for m in (plain, model):
                with torch.no_grad():
                    for p in m.parameters():
                        p -= 0.01 * p.grad  # type: ignore[operator]
                m.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
