"""A Hugging Face model, unchanged: a tiny random Llama from its config (nothing is downloaded).

pip install 'fsdp-compile[hf]'
torchrun --standalone --nproc-per-node 2 examples/train_hf.py
"""

import torch
import torch.distributed as dist
from text import VOCAB, batches
from transformers import LlamaConfig, LlamaForCausalLM


def main(steps: int = 20, batch: int = 4, seq: int = 64) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # every rank starts from the same weights
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=seq, use_cache=False,
    )  # fmt: skip
    model = torch.compile(LlamaForCausalLM(config), backend="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = batches(rank, world, batch=batch, seq=seq)
    losses = []
    for step in range(steps):
        tokens, _ = next(data)
        loss = model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels itself
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:3d}  loss {losses[-1]:.3f}", flush=True)
    assert losses[-1] < losses[0], f"the loss did not fall: {losses}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
