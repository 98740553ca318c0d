"""Random models trained through the real process pool equal one process: trees of modules with every kind of parameter.

A seed gives the model, its options and how it is sharded. Several seeds run in one task of the pool; a failure names its seed.
"""

from __future__ import annotations

import random

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard

WIDTH = 5
SHAPES = [(WIDTH, WIDTH), (WIDTH,), (), (1, WIDTH), (WIDTH, 1), (7, WIDTH), (0, WIDTH), (2, 3, WIDTH), (1,)]
SEEDS = range(32, 62)
BATCHES = [tuple(t.double() for t in models.vector_batch(i, width=WIDTH, out=WIDTH)) for i in range(3)]  # double: small steps show


class Leaf(nn.Module):
    """One parameter of a shape that may be hard to cut, applied in one of two ways."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(rng.choice(SHAPES)) * 0.5)
        self.turned = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        w = self.w
        if w.shape == (WIDTH, WIDTH):
            return torch.tanh(x @ (w.t() if self.turned else w)) + 0.5 * x
        if w.dim() < 2 or w.shape == (1, WIDTH):
            return x * w if self.turned else x + w.sin()
        if w.shape == (WIDTH, 1):
            return x + torch.tanh(x @ w)
        return torch.tanh(x + w.flatten(0, -2)[1 if self.turned else 0 :].sum(0))


class Tree(nn.Module):
    """Some children, called in a random order, some more than once, some not at all; some checkpointed, with graph breaks between."""

    def __init__(self, rng: random.Random, made: list[nn.Module], depth: int, breaks: bool) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH) * 0.5) if rng.random() < 0.4 else None
        children = []
        for _ in range(rng.randint(1, 3)):
            form = rng.random()
            if form < 0.15 and made:
                child = rng.choice(made)  # shared with another place of the tree
            elif form < 0.45 and depth:
                child = Tree(rng, made, depth - 1, False)
            elif form < 0.6:
                child = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.5)
            elif form < 0.7:
                child = nn.LayerNorm(WIDTH)
            else:
                child = Leaf(rng)
            made.append(child)
            children.append(child)
        self.parts = nn.ModuleList(children)
        self.calls = [(rng.randrange(len(children)), rng.choice("cccck" + "b" * breaks)) for _ in range(rng.randint(1, 4))]

    def forward(self, x: Tensor) -> Tensor:
        for i, how in self.calls:
            if how == "b":
                torch._dynamo.graph_break()
            x = checkpoint(self.parts[i], x, use_reentrant=False) if how == "k" else self.parts[i](x)
        return x if self.own is None else x * self.own


def build(seed: int) -> nn.Module:
    """The model of a seed, the same on every call."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    while True:
        model = Tree(rng, [], rng.choice([1, 1, 2]), rng.random() < 0.35).double()
        leaves = [m for m in model.modules() if isinstance(m, Leaf)]
        for a in leaves:  # tied
            b = rng.choice(leaves)
            if a.w.shape == b.w.shape and rng.random() < 0.5:
                a.w = b.w
        for p in model.parameters():  # frozen
            p.requires_grad_(rng.random() > 0.2)
        out = model(BATCHES[0][0])
        params = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(out.sum(), params, allow_unused=True) if out.requires_grad else []
        if any(g is not None and g.abs().max() > 1e-4 for g in grads if g is None or g.numel()):  # else: too little to train
            return model


def calls_of(model: nn.Module) -> set[str]:
    """How children are called in it: "c" plainly, "k" checkpointed, "b" after a graph break."""
    return {how for m in model.modules() if isinstance(m, Tree) for _, how in m.calls}


def train_one(seed: int) -> None:
    rng = random.Random(f"options {seed}")
    options = {"bucket_bytes": rng.choice([0, 60, 200, 1 << 20]), "prefetch": rng.randint(0, 3)}
    options["collective"] = rng.choice(["coalesced", "packed"])
    plain, model = build(seed), build(seed)
    before = [p.detach().clone() for p in plain.parameters()]
    # A graph break inside a loop leaves the whole frame to eager; the one-liner cannot shard before that, see docs/works.md.
    if rng.random() < 0.5 or "b" in calls_of(model):
        fully_shard(model, reshard_after_forward=rng.random() < 0.7)
    fast = torch.compile(model, backend="fsdp", options={"lowering": "fx", **options})
    parity.train_alike(plain, fast, BATCHES[: rng.randint(2, 3)], F.mse_loss, tol=1e-11)
    moved = [float((p.detach() - b).abs().max()) for p, b in zip(plain.parameters(), before) if p.numel()]
    assert max(moved, default=1.0) > 1e-7, f"nothing moved ({moved}): the comparison would prove nothing"
    for run in (plain, fast):
        run(BATCHES[0][0]).sum().backward()
    for (n, p), q in zip(plain.named_parameters(), model.parameters()):
        assert (p.grad is None) == (q.grad is None), f"{n}: gradient {q.grad}, one process has {p.grad}"


def train_many(seeds: list[int]) -> int:
    for seed in seeds:
        try:
            train_one(seed)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e
        torch._dynamo.reset()  # else the recompile limit of one code object is reached
    return len(seeds)


@pytest.mark.parametrize("world, start", [(2, 0), (2, 8), pytest.param(2, 16, marks=pytest.mark.extra), (3, 24)])
def test_seeds(pool, world, start):
    seeds = list(SEEDS[start : start + 8])
    assert pool.run(world, train_many, seeds, timeout_s=150) == [len(seeds)] * world


def test_a_failure_names_its_seed(pool):
    with pytest.raises(AssertionError, match="seed oops: "):
        pool.run(1, train_many, ["oops"])


def test_the_seeds_hold_every_kind_of_model():
    seen = set()
    for seed in SEEDS:
        model = build(seed)
        names, unique = (list(model.named_parameters(remove_duplicate=d)) for d in (False, True))
        trees = [m for m in model.modules() if isinstance(m, Tree)]
        seen |= calls_of(model) | {tuple(p.shape) for _, p in unique}
        seen |= {"shared"} if len(names) > len(unique) else set()
        seen |= {"frozen"} if any(not p.requires_grad for _, p in unique) else set()
        seen |= {"unused"} if any(len({i for i, _ in t.calls}) < len(t.parts) for t in trees) else set()
        seen |= {"used twice"} if any(len({i for i, _ in t.calls}) < len(t.calls) for t in trees) else set()
    missing = {"shared", "frozen", "unused", "used twice", "c", "k", "b", *SHAPES} - seen
    assert not missing
