"""Models of Hugging Face transformers through the one-liner, with no change to their code."""

from __future__ import annotations

import functools
from typing import Any

import parity
import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.hf, pytest.mark.slow]
VOCAB = 67
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_hidden_layers": 2}, num_key_value_heads=1, max_position_embeddings=32))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT, max_position_embeddings=32))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3, max_position_embeddings=32))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**sizes, **NO_DROPOUT, image_size=12, patch_size=4, num_labels=5))


FAMILIES = {f.__name__: f for f in (llama, gpt2, bert, mixtral, t5, vit)}


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def batch(step: int, family: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    if family == "vit":
        return torch.randn(4, 3, 12, 12, generator=g), torch.randint(5, (4,), generator=g)
    tokens = torch.randint(1, VOCAB, (4, 9), generator=g)
    return tokens, tokens


def own_loss(out: Any, x: Tensor, y: Tensor) -> Tensor:
    """From logits, so that the compiled module is the model itself."""
    logits = out.logits.flatten(0, -2)
    return nn.functional.cross_entropy(logits, y.flatten())


def call_batch(step: int, family: str) -> tuple[Tensor, ...]:
    x, y = batch(step, family)
    return (x, x, y)


class T5Call(nn.Module):
    """T5 needs the decoder's input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.t5 = build("t5")

    def forward(self, x: Tensor) -> Any:
        return self.t5(input_ids=x, labels=x)


def case(family: str) -> parity.Case:
    make = T5Call if family == "t5" else functools.partial(build, family)
    return parity.Case(make, functools.partial(call_batch, family=family), own_loss, steps=3, clip=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(pool, family):
    parity.check(pool, case(family), 2, timeout_s=240)


@pytest.mark.inductor
def test_llama_inductor(pool):
    parity.check(pool, case("llama"), 2, lowering="inductor", timeout_s=240)


def labels_inside(family: str) -> None:
    """The model computes its own loss; the compiled call takes keyword arguments."""
    import torch.distributed as dist

    plain, model = build(family), build(family)
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx"})
    x, y = batch(0, family)
    rank, world = dist.get_rank(), dist.get_world_size()
    plain(input_ids=x, labels=y).loss.backward()
    fast(input_ids=parity.part(x, rank, world), labels=parity.part(y, rank, world)).loss.backward()
    for n, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(n).grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


def test_keyword_arguments_and_own_loss(pool):
    pool.run(2, labels_inside, "llama", timeout_s=240)
