"""Small models with activations and weights that are large enough to move (1 MiB or more), and their data."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .harness import Batch

VOCABULARY = 256
WIDTH, HIDDEN = 64, 4096


class Layer(nn.Module):
    """Pre-norm transformer layer on [batch, time, width]; without key bias, whose gradient is noise."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_attn(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm_mlp(x)))))


class Transformer(nn.Module):
    """Language model (of bytes by default): tokens [batch, time] to logits [batch, time, vocabulary]."""

    def __init__(self, *, layers: int = 2, vocabulary: int = VOCABULARY, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        width = 256
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.embed.weight, std=0.02)
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


Checkpoint = Callable[[nn.Module, Tensor], Tensor]
WITHOUT_REENTRY: Checkpoint = functools.partial(checkpoint, use_reentrant=False)
WITH_REENTRY: Checkpoint = functools.partial(checkpoint, use_reentrant=True)


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    """A checkpoint in a checkpoint."""
    return WITHOUT_REENTRY(lambda hidden: WITHOUT_REENTRY(layer, hidden).sin(), x)  # type: ignore[arg-type]


class Checkpointed(nn.Module):
    """A layer that backward recomputes, with the random state that the forward pass saved."""

    def __init__(self, layer: nn.Module, how: Checkpoint) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer, x)


def checkpointed(*ways: Checkpoint, dropout: float = 0.0) -> nn.Module:
    """A transformer with a layer for each of the ways."""
    model = Transformer(layers=len(ways), dropout=dropout)
    model.layers = nn.ModuleList(Checkpointed(layer, how) for layer, how in zip(model.layers, ways, strict=True))
    return model


class SparseEmbedding(nn.Module):
    """Tokens [batch, time] to logits [batch, time, 256]; the weights are 1 MiB each. Sparse gradients have no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 256, sparse=True)
        self.layers = nn.ModuleList([nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)])

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Wide(nn.Module):
    """Residual layer on [batch, 64], 4096 wide inside: weights of 1 MiB, an activation of 16 KiB per row."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Chain(nn.Module):
    """Wide layers in a row, fast for their memory: features [batch, 64] to logits [batch, outputs].

    break_at: number of layers in front of a graph break; 0 for none.
    """

    def __init__(self, *, outputs: int = VOCABULARY, depth: int = 2, dropout: float = 0.0, break_at: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide(dropout) for _ in range(depth))
        self.last = nn.Linear(WIDTH, outputs)
        self.break_at = break_at

    def forward(self, x: Tensor) -> Tensor:
        x = self._run(x, 0, self.break_at)
        if self.break_at:
            torch._dynamo.graph_break()
        return self.last(self._run(x, self.break_at, len(self.layers)))

    def _run(self, x: Tensor, start: int, end: int) -> Tensor:
        for position in range(start, end):
            x = self.layers[position](x)
        return x


class ConvNet(nn.Module):
    """Convolutions with batch norm, smooth throughout: images [batch, 3, height, width] to logits [batch, 10]."""

    def __init__(self, depth: int = 7) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.GELU())
                for channels in (3, *[16] * (depth - 1))
            )
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


class Aliases(nn.Module):
    """Much that shares storage: two parameters in one block, in-place writes to views, outputs that alias.

    Returns logits [batch, 256], and three views of one hidden tensor [batch, 4096].
    """

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * WIDTH * HIDDEN) * WIDTH**-0.5
        self.left = nn.Parameter(flat[: WIDTH * HIDDEN].view(WIDTH, HIDDEN))
        self.right = nn.Parameter(flat[WIDTH * HIDDEN :].view(HIDDEN, WIDTH))
        self.last = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("memory", torch.zeros(WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = x @ self.left
        hidden[:, : HIDDEN // 2].mul_(0.5)
        self.memory.mul_(0.9).add_(x.t() @ hidden.detach(), alpha=1e-3)
        top, bottom = self.right.chunk(2, dim=0)
        active = torch.tanh(hidden)
        mixed = active[:, HIDDEN // 2 :] @ top + active[:, : HIDDEN // 2] @ bottom
        mixed = torch.tanh(mixed / HIDDEN**0.5 + active @ self.memory.t())
        for _ in range(4):
            mixed = torch.tanh(mixed @ self.left) @ self.right / HIDDEN**0.5
        return self.last(mixed), hidden, hidden[:, ::2], hidden.t()


class Predictor(nn.Module):
    """Words [length] to a loss over a vocabulary: backward needs more than forward."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embed(words)), words)


def tokens(steps: int, *, batch: int = 8, time: int = 128) -> list[Batch]:
    """Random bytes to be predicted one ahead: (inputs, targets), both [batch, time]."""
    generator = torch.Generator().manual_seed(11)
    drawn = (torch.randint(0, VOCABULARY, (batch, time + 1), generator=generator) for _ in range(steps))
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in drawn]


def features(steps: int, *, batch: int = 320) -> list[Batch]:
    """Normal features [batch, 64] and random classes [batch]."""
    generator = torch.Generator().manual_seed(12)
    return [
        (torch.randn(batch, WIDTH, generator=generator), torch.randint(0, VOCABULARY, (batch,), generator=generator))
        for _ in range(steps)
    ]


def features_of_changing_size(steps: int) -> list[Batch]:
    """Batches of 320 and 256 rows in turn."""
    return [features(step + 1, batch=(320, 256)[step % 2])[-1] for step in range(steps)]


def images(steps: int) -> list[Batch]:
    """Normal images [8, 3, 48, 48] and random classes [8]."""
    generator = torch.Generator().manual_seed(13)
    return [
        (torch.randn(8, 3, 48, 48, generator=generator), torch.randint(0, 10, (8,), generator=generator)) for _ in range(steps)
    ]
