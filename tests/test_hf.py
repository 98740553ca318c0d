"""Models of Hugging Face transformers through the one-liner, with no change to their code."""

from __future__ import annotations

import functools
from typing import Any

import parity
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytestmark = [pytest.mark.hf, pytest.mark.slow]
VOCAB = 67
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LAYERS = {k: v for k, v in SMALL.items() if k != "vocab_size"}
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

    return ViTForImageClassification(ViTConfig(**LAYERS, **NO_DROPOUT, image_size=12, patch_size=4, num_labels=5))


def qwen3_moe() -> nn.Module:
    """Experts only, with norms of queries and keys."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts, head_dim=8, num_key_value_heads=1, max_position_embeddings=32))


def qwen2_moe() -> nn.Module:
    """Many experts and one that all tokens share, behind a gate."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **experts, num_key_value_heads=1, max_position_embeddings=32))


def deepseek_v3() -> nn.Module:
    """Attention through low-rank latents; sigmoid routing in groups, corrected by a buffer; a dense layer, then a sparse one."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12}
    sizes = {**SMALL, **latent, **experts, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, num_key_value_heads=2, max_position_embeddings=32))


def mamba() -> nn.Module:
    """A scan over a state; depthwise one-dimensional convolution; A_log and D are parameters outside any layer."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=3))


def gemma2() -> nn.Module:
    """Tied embedding, soft-capped logits, norms around each part, a sliding and a global layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {**SMALL, "num_hidden_layers": 2, "head_dim": 6, "num_key_value_heads": 1, "sliding_window": 4, "query_pre_attn_scalar": 6}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, max_position_embeddings=32, attention_dropout=0.0))


def falcon() -> nn.Module:
    """Attention and feed-forward side by side, one key for all queries, ALiBi."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
    return FalconForCausalLM(FalconConfig(**sizes, alibi=True, attention_dropout=0.0, hidden_dropout=0.0))


def albert() -> nn.Module:
    """One layer, run three times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {**SMALL, "num_hidden_layers": 3, "embedding_size": 8}
    return AlbertForMaskedLM(AlbertConfig(**sizes, **NO_DROPOUT, max_position_embeddings=32, classifier_dropout_prob=0.0))


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    ends = {f"{end}_{k}": v for end in ("encoder", "decoder") for k, v in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCAB, d_model=16, **ends, dropout=0.0, max_position_embeddings=32))


def whisper() -> nn.Module:
    """Encoder on spectrograms with frozen positions, decoder on tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    ends = {f"{end}_{k}": v for end in ("encoder", "decoder") for k, v in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"vocab_size": VOCAB, "d_model": 16, "num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 16}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **ends, **tokens, dropout=0.0))


def wav2vec2() -> nn.Module:
    """Raw sound; the convolution of positions has a weight-norm parametrization."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    front = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (5, 3), "num_conv_pos_embeddings": 4}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
    off = {"apply_spec_augment": False, "final_dropout": 0.0, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**SMALL, **front, **quiet, **off, classifier_proj_size=7, num_labels=5))


def convnext() -> nn.Module:
    """Depthwise convolutions, a scale for each channel, four stages."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(patch_size=2, hidden_sizes=[6, 8, 10, 12], depths=[1, 1, 1, 1], num_labels=5))


def swin() -> nn.Module:
    """Shifted windows: attention with a table of relative positions, patches merged between stages."""
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
    return SwinForImageClassification(SwinConfig(**sizes, **NO_DROPOUT, drop_path_rate=0.0, num_labels=5))


def clip() -> nn.Module:
    """Two towers and a scale without dimensions."""
    from transformers import CLIPConfig, CLIPModel

    text = {**SMALL, "max_position_embeddings": 16, "eos_token_id": VOCAB - 1, "projection_dim": 8}
    vision = {**LAYERS, "image_size": 12, "patch_size": 6, "projection_dim": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def matches(model: nn.Module, x: Tensor) -> Tensor:
    """How well each row's text and picture match, as logits. Not how badly it matches other rows: other ranks hold those."""
    score = model(input_ids=x, pixel_values=_picture(x)).logits_per_image.diagonal()
    return score[:, None, None] * torch.linspace(-1, 1, VOCAB).expand(1, x.shape[1], VOCAB)


TOKENS = (llama, gpt2, bert, mixtral, qwen2_moe, qwen3_moe, deepseek_v3, mamba, gemma2, falcon, albert)
IMAGES = {vit: 12, convnext: 32, swin: 16}
NAMED = {  # models that need their inputs by name
    t5: lambda model, x: model(input_ids=x, labels=x).logits,
    bart: lambda model, x: model(input_ids=x, decoder_input_ids=x).logits,
    whisper: lambda model, x: model(input_features=_spectrogram(x), decoder_input_ids=x).logits,
    clip: matches,
}
FURTHER = {bart, whisper, falcon, albert, convnext}  # not part of `make test`: others of their kind are
FAMILIES = {f.__name__: f for f in (*TOKENS, *IMAGES, wav2vec2, *NAMED)}


def _spectrogram(tokens: Tensor) -> Tensor:
    return torch.sin(tokens[:, :1, None] * torch.arange(1.0, 121.0).view(6, 20))


def _picture(tokens: Tensor) -> Tensor:
    return torch.sin(tokens[:, :1, None, None] * torch.arange(1.0, 433.0).view(3, 12, 12))


class Call(nn.Module):
    """A model, called by name."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.model = FAMILIES[family]()
        self.call = NAMED[FAMILIES[family]]

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.model, x)


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    return (Call(family) if FAMILIES[family] in NAMED else FAMILIES[family]()).train()


def batch(step: int, family: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    size = IMAGES.get(FAMILIES[family])
    if size or family == "wav2vec2":
        return torch.randn(4, *((3, size, size) if size else (120,)), generator=g), torch.randint(5, (4,), generator=g)
    tokens = torch.randint(1, VOCAB, (4, 9), generator=g)
    return tokens, tokens


def own_loss(out: Any, y: Tensor) -> Tensor:
    """From logits, so that the compiled module is the model itself."""
    logits = getattr(out, "logits", out).flatten(0, -2)
    return nn.functional.cross_entropy(logits, y.flatten())


def case(family: str) -> parity.Case:
    return parity.Case(functools.partial(build, family), functools.partial(batch, family=family), own_loss, steps=3, clip=1.0)


@pytest.mark.parametrize("family", [pytest.param(n, marks=[pytest.mark.extra] * (f in FURTHER)) for n, f in FAMILIES.items()])
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


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules=["v_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(build("llama"), config)


def adapters() -> None:
    plain, model = with_adapters(), with_adapters()
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx"})
    parity.train_alike(plain, fast, [batch(i, "llama") for i in range(3)], own_loss, lr=1.0)  # compares frozen ones bit by bit
    x, y = batch(3, "llama")
    own_loss(fast(x), y).backward()
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n in before if "lora" not in n}
    for n, p in model.named_parameters():
        assert isinstance(p, DTensor) and p.to_local().shape[0] <= -(-p.shape[0] // 2), f"{n} is not sharded"
        assert (p.grad is None) == (n in frozen), n
        assert n in frozen or (parity.full(p) - before[n]).abs().max() > 1e-4, f"{n} did not train"


def test_lora_adapters_train_on_a_frozen_model(pool):
    pytest.importorskip("peft", reason="extra hf, which make test installs")
    pool.run(2, adapters, timeout_s=240)
