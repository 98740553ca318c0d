"""Copy me. Fully sharded training of an ordinary model with one changed line:

torchrun --standalone --nproc-per-node 2 examples/train_torchrun.py
"""

import os

import torch
import torch.distributed as dist
from decoder import Decoder, DecoderConfig, loss_fn
from text import batches
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def main(steps: int = 40, batch: int = 4, path: str = "out/decoder.pt") -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # every rank starts from the same weights
    config = DecoderConfig(dim=128, layers=2, heads=4, ffn=344, seq=128)
    model = Decoder(config).to(device)
    model = torch.compile(model, backend="fsdp")  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = batches(rank, world, batch=batch, seq=config.seq)
    for step in range(steps):
        tokens, targets = (t.to(device) for t in next(data))
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item():.3f}", flush=True)

    # Every rank takes part in gathering; rank 0 gets the whole model, with the names of the ordinary model.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path)
        Decoder(config).load_state_dict(state)  # loads into the plain model, no wrapper needed
        print(f"saved {len(state)} tensors to {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
