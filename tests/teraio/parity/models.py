"""Small models with activations and weights that are large enough to move (1 MiB or more), and their data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .harness import Batch

VOCABULARY = 256


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

    def __init__(
        self,
        *,
        layers: int = 2,
        width: int = 256,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
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


class Chain(nn.Module):
    """Linear layers of 1 MiB with tanh between: features [batch, 64] to logits [batch, 256].

    break_at: number of layers in front of a graph break; 0 for none.
    """

    def __init__(
        self,
        *,
        inputs: int = 64,
        outputs: int = VOCABULARY,
        depth: int = 4,
        dropout: float = 0.0,
        break_at: int = 0,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(depth))
        self.last = nn.Linear(512, outputs)
        self.dropout = nn.Dropout(dropout)
        self.break_at = break_at

    def forward(self, x: Tensor) -> Tensor:
        x = self._run(self.first(x), 0, self.break_at)
        if self.break_at:
            torch._dynamo.graph_break()
        return self.last(self._run(x, self.break_at, len(self.layers)))

    def _run(self, x: Tensor, start: int, end: int) -> Tensor:
        for position in range(start, end):
            x = self.dropout(torch.tanh(self.layers[position](x)))
        return x


class ConvNet(nn.Module):
    """Convolutions with batch norm: images [batch, 3, 48, 48] to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((3, 16, 1), (16, 32, 1), (32, 32, 2), (32, 64, 1))
        self.features = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
                    nn.BatchNorm2d(after),
                    nn.ReLU(),
                )
                for before, after, stride in widths
            )
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


class Aliases(nn.Module):
    """Much that shares storage: two parameters in one block, in-place writes to views, outputs that alias.

    Returns logits [batch, 256], and three views of one hidden tensor.
    """

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 512)
        flat = torch.randn(2 * 512 * 512) * 512**-0.5
        self.left = nn.Parameter(flat[: 512 * 512].view(512, 512))
        self.right = nn.Parameter(flat[512 * 512 :].view(512, 512))
        self.last = nn.Linear(512, VOCABULARY)
        self.register_buffer("memory", torch.zeros(512, 512))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.first(x)) @ self.left
        hidden[:, :256].mul_(0.5)
        self.memory.mul_(0.9).add_(hidden.detach().t() @ hidden.detach(), alpha=1e-3)
        bottom, top = self.right.chunk(2, dim=0)
        out = torch.tanh(hidden[:, 256:] @ bottom + hidden[:, :256] @ top + hidden @ self.memory)
        return self.last(out), hidden, hidden[:, ::2], hidden.t()


def tokens(steps: int, *, batch: int = 8, time: int = 128) -> list[Batch]:
    """Random bytes to be predicted one ahead: (inputs, targets), both [batch, time]."""
    generator = torch.Generator().manual_seed(11)
    drawn = (torch.randint(0, VOCABULARY, (batch, time + 1), generator=generator) for _ in range(steps))
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in drawn]


def features(steps: int, *, batch: int = 640, inputs: int = 64, classes: int = VOCABULARY) -> list[Batch]:
    """Normal features [batch, inputs] and random classes [batch]."""
    generator = torch.Generator().manual_seed(12)
    return [
        (
            torch.randn(batch, inputs, generator=generator),
            torch.randint(0, classes, (batch,), generator=generator),
        )
        for _ in range(steps)
    ]


def features_of_changing_size(steps: int) -> list[Batch]:
    """Batches of 768, 640 and 576 rows in turn."""
    return [features(step + 1, batch=(768, 640, 576)[step % 3])[-1] for step in range(steps)]


def images(steps: int) -> list[Batch]:
    """Normal images [16, 3, 48, 48] and random classes [16]."""
    generator = torch.Generator().manual_seed(13)
    return [
        (torch.randn(16, 3, 48, 48, generator=generator), torch.randint(0, 10, (16,), generator=generator))
        for _ in range(steps)
    ]
