"""Finds the model to measure: a factory in a Python file, by default the decoder of the examples.

The wheel carries the examples next to the package (fsdp_compile/examples), a checkout has them beside it; both are
loaded by path, so there is one decoder and it stays free of anything of this package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

DATA_BATCHES = 4  # distinct batches a rank cycles through


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of one rank's batch: `batch` sequences of `seq` tokens."""

    layers: int = 4
    dim: int = 256
    heads: int = 4
    ffn: int = 688
    vocab: int = 512
    seq: int = 128
    batch: int = 4

    def model_arguments(self) -> dict[str, int]:
        """The keyword arguments of a model factory."""
        return {name: getattr(self, name) for name in ("vocab", "dim", "layers", "heads", "ffn", "seq")}


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path, once, under the name `bench_<stem>`. Raises FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"no such Python file: {path}")
    name = f"bench_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Dynamo look the module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def example_file(name: str) -> Path:
    """Where the file `name` of the examples lies, in an installed wheel or in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"examples/{name} is neither in {package} nor beside it; name a model with --model")


def model_factory(spec: str | None) -> Callable[..., nn.Module]:
    """The function that `spec` ("path/to/file.py:function") names; the decoder's `build` if `spec` is None.

    It takes the keyword arguments of `Sizes.model_arguments` and returns a module which maps token ids [B, T] to
    logits [B, T, vocab] and has its blocks in `.layers`. Raises ValueError or FileNotFoundError.
    """
    file, colon, function = (spec or f"{example_file('decoder.py')}:build").rpartition(":")
    if not colon or not file or not function:
        raise ValueError(f"--model wants path/to/file.py:function, not {spec!r}")
    factory = getattr(load_file(Path(file).resolve()), function, None)
    if not callable(factory):
        raise ValueError(f"{file} has no function {function!r}")
    return factory


def make_batches(sizes: Sizes, rank: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """A rank's (inputs, targets), each int64 [batch, seq]: random tokens, the same in each run, other on each rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    result = []
    for _ in range(DATA_BATCHES):
        tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1), generator=generator).to(device)
        result.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return result


def storage_bytes(tensors: Mapping[str, object] | Iterator[object]) -> int:
    """Bytes of the distinct storages behind these tensors on this rank; of a DTensor, its local part only."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    seen: dict[int, int] = {}
    for value in values:
        if isinstance(value, Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            storage = local.untyped_storage()
            if storage.nbytes():
                seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
