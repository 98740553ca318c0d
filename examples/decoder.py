"""A small Llama-style decoder in plain PyTorch: RMSNorm, rotary positions, causal attention, SwiGLU.

Nothing in it is distributed.

Shapes: B sequences of T tokens, D model width, H heads of size K = D / H, V entries in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the model. `seq` is the longest sequence it accepts; `ffn` the inner width of the feed-forward layer."""

    vocab: int = 256
    dim: int = 256
    layers: int = 4
    heads: int = 4
    ffn: int = 688
    seq: int = 256
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        small = [name for name in ("vocab", "dim", "layers", "heads", "ffn", "seq") if getattr(self, name) < 1]
        if small:
            raise ValueError(f"these sizes must be at least 1: {', '.join(small)}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim ({self.dim}) must be a multiple of 2 * heads ({2 * self.heads}): rotary needs pairs")


def rotary_tables(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, each [seq, K / 2]."""
    half = config.dim // config.heads // 2
    frequency = config.rope_base ** (-torch.arange(half) / half)
    angle = torch.arange(config.seq)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + K/2) of x [B, H, T, K] by its position's angle; cos and sin are [T, K / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] to [B, T, D]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, config.dim, bias=False)
        self.v = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer, [B, T, D] to [B, T, D]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; T is at most `config.seq`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        # Buffers stay in float32 when the parameters compute in bfloat16; a product with them must not widen x.
        cos, sin = (table[: tokens.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build(*, vocab: int, dim: int, layers: int, heads: int, ffn: int, seq: int) -> Decoder:
    """A decoder of these sizes; what `fsdp-compile bench` calls."""
    return Decoder(DecoderConfig(vocab=vocab, dim=dim, layers=layers, heads=heads, ffn=ffn, seq=seq))


def example() -> tuple[Decoder, tuple[Tensor]]:
    """A small decoder and its inputs; for `fsdp-compile explain examples/decoder.py:example`."""
    config = DecoderConfig()
    return Decoder(config), (torch.zeros(2, config.seq, dtype=torch.long),)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, always in float32; logits [B, T, V], targets [B, T]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
