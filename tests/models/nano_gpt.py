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
    dropout: float = 0.0
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup: int = 2
    decay: int = 20
    weight_decay: float = 0.1
    beta2: float = 0.99
    clip: float = 1.0
    dtype: str = "bfloat16"
    seed: int = 1337


class Layer(nn.Module):
    """Attention and a feed-forward layer: [rows, words, width] to the same."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.heads, self.dropout = s.heads, s.dropout
        self.norm1, self.norm2 = nn.LayerNorm(s.width, bias=False), nn.LayerNorm(s.width, bias=False)
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width, bias=False), nn.Linear(s.width, s.width, bias=False)
        self.up, self.down = nn.Linear(s.width, 4 * s.width, bias=False), nn.Linear(4 * s.width, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Words [rows, words] to logits of the last ones, or with targets to all logits and their loss."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(s.vocabulary, s.width), nn.Embedding(s.block_size, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.width, bias=False)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)
        self.words.weight = self.head.weight  # tied
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = math.sqrt(2 * s.layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, words: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def optimizer(self, s: Settings) -> torch.optim.Optimizer:
        """Fused AdamW, which lets only matrices decay."""
        parameters = list(self.parameters())
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
    bare = GPT(s)
    scaler = torch.amp.GradScaler("cpu", enabled=s.dtype == "float16")
    optimizer = bare.optimizer(s)
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
