"""A script in the manner of nanoGPT: one file, settings as `--name=value`, data in a mapped file, checkpoints to resume from.

It says nothing of teraio but the name of a backend. Its options come from the environment, as `TERAIO_MEMORY_BUDGET`.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import GPT, GPTConfig


@dataclass(slots=True)
class Settings:
    """out: a folder for the checkpoint, in which `train.bin` holds the words as uint16. backend: None compiles nothing."""

    out: str = "out"
    backend: str | None = None
    init_from: str = "scratch"
    max_iters: int = 6
    eval_interval: int = 3
    eval_iters: int = 2
    accumulation: int = 2
    batch_size: int = 8
    block_size: int = 64
    vocabulary: int = 1024
    layers: int = 4
    heads: int = 4
    width: int = 256
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup: int = 2
    decay: int = 20
    weight_decay: float = 0.1
    beta2: float = 0.99
    clip: float = 1.0
    dtype: str = "bfloat16"
    seed: int = 1337


class TiedGPT(GPT):
    """The GPT of the examples with tied embeddings. It also returns the logits, which the script keeps until the next pass."""

    def __init__(self, s: Settings) -> None:
        super().__init__(GPTConfig(layers=s.layers, width=s.width, heads=s.heads, context=s.block_size, vocabulary=s.vocabulary))
        self.tokens.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(tokens)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module, s: Settings) -> torch.optim.Optimizer:
    """Fused AdamW, which lets only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": s.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(0.9, s.beta2), fused=True)


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from `--name=value`."""
    types = {field.name: field.type for field in fields(Settings)}
    pairs = (argument.removeprefix("--").split("=", 1) for argument in arguments)
    return Settings(**{name: text if "str" in str(types[name]) else literal_eval(text) for name, text in pairs})


def learning_rate(s: Settings, iteration: int) -> float:
    """Warm up, then half a cosine until iteration `decay`."""
    if iteration < s.warmup:
        return s.learning_rate * (iteration + 1) / (s.warmup + 1)
    ratio = min(1.0, (iteration - s.warmup) / (s.decay - s.warmup))
    return s.min_learning_rate + 0.5 * (1 + math.cos(math.pi * ratio)) * (s.learning_rate - s.min_learning_rate)


def main(arguments: Sequence[str], after_step: Callable[[float], None] = lambda loss: None) -> GPT:
    """Train, and save a checkpoint after every evaluation. after_step: called with each step's loss. Returns the model."""
    s = parse(arguments)
    folder = Path(s.out)
    data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")

    def batch(*draw: int) -> tuple[Tensor, Tensor]:
        """The same words for the same numbers, so that a run that resumes goes on with those of one that was not interrupted."""
        places = np.random.default_rng([s.seed, *draw]).integers(len(data) - s.block_size, size=s.batch_size)
        words = torch.stack([torch.from_numpy(data[i : i + s.block_size + 1].astype(np.int64)) for i in places])
        return words[:, :-1], words[:, 1:]

    torch.manual_seed(s.seed)
    mixed = nullcontext() if s.dtype == "float32" else torch.autocast("cpu", dtype=getattr(torch, s.dtype))
    bare = TiedGPT(s)
    scaler = torch.amp.GradScaler("cpu", enabled=s.dtype == "float16")
    optimizer = make_optimizer(bare, s)
    first = 0
    if s.init_from == "resume":
        saved = torch.load(folder / "ckpt.pt", weights_only=True)
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"]
        del saved
    model = torch.compile(bare, backend=s.backend) if s.backend else bare

    @torch.no_grad()
    def evaluate(iteration: int) -> float:
        model.eval()
        with mixed:
            losses = [model(*batch(2, iteration, i))[1].item() for i in range(s.eval_iters)]
        model.train()
        return sum(losses) / len(losses)

    words, targets = batch(1, first, 0)
    for iteration in range(first, s.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(s, iteration)
        for part in range(s.accumulation):
            with mixed:
                _, loss = model(words, targets)
                loss = loss / s.accumulation
            words, targets = batch(1, *divmod(iteration * s.accumulation + part + 1, s.accumulation))  # while a GPU computes
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), s.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        after_step(loss.item() * s.accumulation)
        if (iteration + 1) % s.eval_interval == 0:
            found = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration + 1}
            torch.save(found | {"loss": evaluate(iteration)}, folder / "ckpt.pt")
    return bare
