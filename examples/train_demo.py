"""The demo behind `make demo`: train the byte-level decoder on two CPU ranks and write what each compiler pass did.

torchrun --standalone --nproc-per-node 2 examples/train_demo.py
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from decoder import Decoder, DecoderConfig, loss_fn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from text import batches

STEPS = int(os.environ.get("DEMO_STEPS", "100"))
BATCH = 8
GRAPHS = Path("out/graphs")


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0)

    torch.manual_seed(0)  # every rank starts from the same weights
    config = DecoderConfig(dim=192, layers=4, heads=4, ffn=512, seq=128)
    model = Decoder(config)
    size = sum(p.numel() for p in model.parameters())
    model = torch.compile(model, backend="fsdp", options={"dump_graphs": str(GRAPHS)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    console.print(f"{size / 1e6:.1f} M parameters, {world} ranks, {BATCH} x {config.seq} bytes of Python source each")
    console.print("the first step compiles, and takes longer")

    data = batches(rank, world, batch=BATCH, seq=config.seq)
    losses: list[float] = []
    columns = ("{task.description}", BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=rank != 0) as progress:
        bar = progress.add_task("training", total=STEPS, note="")
        began = time.perf_counter()
        for step in range(STEPS):
            tokens, targets = next(data)
            loss = loss_fn(model(tokens), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
            if step == 0:
                began = time.perf_counter()  # leave compilation out of the speed
            speed = step * BATCH * config.seq * world / max(time.perf_counter() - began, 1e-9)
            recent = average(losses[-10:])  # a batch is 2,048 bytes of anything: a single loss jumps
            progress.update(bar, advance=1, note=f"loss {recent:.3f}  {speed:,.0f} tokens/s")
            if not console.is_terminal and (step % 20 == 0 or step == STEPS - 1):  # a log gets lines, not a bar
                progress.console.print(f"step {step + 1:3d}  loss {recent:.3f}  {speed:,.0f} tokens/s")

    first, last = average(losses[:5]), average(losses[-10:])
    assert last < first - 0.5, f"the loss did not fall: {first:.3f} at the start, {last:.3f} at the end"
    console.print(f"loss {first:.3f} -> {last:.3f} nats per byte (means of the first 5 and the last 10 steps)")
    if rank == 0:
        written = sorted(GRAPHS.rglob("*")) if GRAPHS.is_dir() else []
        console.print(f"{sum(path.is_file() for path in written)} graphs in {GRAPHS.resolve()}", soft_wrap=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
