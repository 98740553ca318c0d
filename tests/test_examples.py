"""The examples' own parts: the text, the decoder, and how the bench finds them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from fsdp_compile.bench_model import example_file, load_file, model_factory

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
decoder = load_file(EXAMPLES / "decoder.py")
text = load_file(EXAMPLES / "text.py")


def take(count: int, rank: int, world: int, **kwargs):
    stream = text.batches(rank, world, **kwargs)
    return [next(stream) for _ in range(count)]


def test_text_is_python_source_and_the_same_each_time():
    first = text.load_text(300_000)
    assert first.dtype == torch.uint8 and first.shape == (300_000,)
    assert torch.equal(first, text.load_text(300_000))
    assert b"import" in bytes(first.tolist())


def test_targets_are_the_next_byte():
    inputs, targets = take(1, 0, 2, batch=3, seq=16)[0]
    assert inputs.shape == targets.shape == (3, 16) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_batches_repeat_with_the_seed_only():
    same, again, other = (take(4, 0, 2, batch=2, seq=32, seed=seed) for seed in (7, 7, 8))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(same, again))
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(same, other))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_no_byte_within_a_pass(world):
    numbered = torch.arange(7 * 13 * world)  # each "byte" is its own position
    per_rank = []
    for rank in range(world):
        rows = take(6, rank, world, batch=2, seq=6, text=numbered)
        seen = torch.cat([part.flatten() for pair in rows for part in pair]).unique()
        assert len(seen) == 6 * 2 * 7  # a pass shows no window twice
        per_rank.append(set(seen.tolist()))
    assert len(set.union(*per_rank)) == sum(map(len, per_rank))


def test_text_too_short_is_said():
    with pytest.raises(ValueError, match="too few for 4 ranks"):
        next(text.batches(0, 4, batch=8, seq=64, text=torch.zeros(1000, dtype=torch.uint8)))


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return decoder.build(vocab=64, dim=32, layers=2, heads=4, ffn=48, seq=16)


@pytest.mark.parametrize("length", [1, 9, 16])
def test_decoder_shapes_and_gradients(length):
    model = small()
    tokens = torch.randint(64, (3, length))
    logits = model(tokens)
    assert logits.shape == (3, length, 64)
    decoder.loss_fn(logits, tokens).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_decoder_looks_only_back():
    model = small()
    tokens = torch.randint(64, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8]) and not torch.allclose(before[:, 8:], after[:, 8:])


def test_rotation_depends_on_distance_only():
    cos, sin = decoder.rotary_tables(decoder.DecoderConfig(dim=32, heads=2, seq=16))
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 16, 16)
    scores = (decoder.rotate(q, cos, sin) @ decoder.rotate(k, cos, sin).transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-5)


def test_decoder_computes_in_bfloat16_with_float32_tables():
    model = small()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert model.cos.dtype == torch.float32
    assert model(torch.randint(64, (2, 8))).dtype == torch.bfloat16


def test_tables_are_not_in_the_checkpoint():
    assert not {"cos", "sin"} & small().state_dict().keys()


def test_bad_sizes_are_said():
    with pytest.raises(ValueError, match="multiple of 2"):
        decoder.DecoderConfig(dim=30, heads=4)
    with pytest.raises(ValueError, match="layers"):
        decoder.DecoderConfig(layers=0)


def test_bench_finds_the_decoder():
    assert example_file("decoder.py").is_file()
    model = model_factory(None)(vocab=8, dim=8, layers=1, heads=2, ffn=8, seq=8)
    assert isinstance(model, torch.nn.Module) and len(model.layers) == 1


def test_training_script_to_copy_stays_short():
    assert len((EXAMPLES / "train_torchrun.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("name", ["train_demo", "train_torchrun", "train_hf"])
def test_scripts_import_without_running(name, monkeypatch):
    if name == "train_hf":
        pytest.importorskip("transformers", reason="extra hf, which make test installs")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    try:
        assert callable(importlib.import_module(name).main)
    finally:
        for module in (name, "text", "decoder"):
            sys.modules.pop(module, None)
