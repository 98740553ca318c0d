"""Small models and batches for the tests. Every builder seeds, so that each call gives the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compile.bench_model import load_file

_decoder = load_file(Path(__file__).resolve().parent.parent / "examples" / "decoder.py")


def decoder(vocab: int = 131, dim: int = 32, layers: int = 3) -> nn.Module:
    """A Llama-style decoder; vocab 131 splits unevenly over 2, 3 and 4 ranks."""
    torch.manual_seed(0)
    return _decoder.build(vocab=vocab, dim=dim, layers=layers, heads=4, ffn=44, seq=16)


def token_batch(step: int, rows: int = 12, vocab: int = 131, length: int = 16) -> tuple[Tensor, Tensor]:
    """Global batch number ``step``; 12 rows split over 1, 2, 3 and 4 ranks."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(vocab, (rows, length + 1), generator=g)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def token_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.float().flatten(0, 1), target.flatten())


class MLP(nn.Module):
    """Three layers. (`nn.Sequential` alone will not do: its ``compile()`` method is one that Dynamo skips.)"""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


def mlp(width: int = 10, hidden: int = 14, out: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return MLP(width, hidden, out)


def vector_batch(step: int, rows: int = 12, width: int = 10, out: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2000 + step)
    return torch.randn(rows, width, generator=g), torch.randn(rows, out, generator=g)


def square_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.float(), target)


class Boom(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("boom")
