"""Real text with no download: the sources of Python's own standard library, as bytes (a vocabulary of 256)."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB = 256


def load_text(max_bytes: int = 4_000_000) -> Tensor:
    """The first `max_bytes` bytes of the standard library's top-level modules in order of name, uint8 [N].

    The same interpreter gives the same bytes on every rank and in every run. Raises FileNotFoundError where the
    sources are not installed.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= max_bytes:
            break
    if not data:
        raise FileNotFoundError(f"no Python sources in {folder}")
    return torch.frombuffer(data[:max_bytes], dtype=torch.uint8)


def batches(
    rank: int, world: int, *, batch: int, seq: int, seed: int = 0, text: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), each int64 [batch, seq], where the targets are the inputs one byte later.

    The text is cut into windows which do not overlap, shuffled anew for each pass; rank r takes every world-th window
    from r on, so within a pass no two ranks see the same byte. Raises ValueError if the text is too short for a batch.
    """
    text = load_text() if text is None else text
    width = seq + 1
    windows = len(text) // width
    if windows // world < batch:
        raise ValueError(f"{len(text)} bytes hold {windows} windows of {width}: too few for {world} ranks x {batch}")
    epoch = 0
    while True:
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed + epoch))
        mine = order[: windows // world * world][rank::world]
        for chosen in mine.split(batch):
            if len(chosen) == batch:
                rows = torch.stack([text[i * width : (i + 1) * width] for i in chosen.tolist()]).long()
                yield rows[:, :-1], rows[:, 1:]
        epoch += 1
