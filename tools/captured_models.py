"""Two models for captured traces, in plain PyTorch: a vision transformer and a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021): images (batch, 3, side, side) to logits (batch, classes)."""

    def __init__(self, *, layers: int, width: int, heads: int, side: int = 224, patch: int = 16, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat((self.token.expand(len(images), -1, -1), patches), dim=1) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden[:, 0]))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """One pre-norm layer: (batch, time, width) to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.norm2(hidden))))  # type: ignore[no-any-return]


class MixtureOfExperts(nn.Module):
    """A decoder with experts in place of feed-forward layers (Fedus et al., 2022): tokens (batch, time) to logits."""

    def __init__(self, *, layers: int, width: int, heads: int, experts: int, hidden: int, chosen: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, Experts(width, experts, hidden, chosen)) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Causal attention and experts: (batch, time, width) to the same shape."""

    def __init__(self, width: int, heads: int, experts: Experts) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.experts = experts

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.experts(self.norm2(hidden))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each expert takes the same number of tokens, those with the highest scores (expert choice, Zhou et al., 2022).

    So no shape depends on values. `chosen`: experts for each token, on average.
    """

    def __init__(self, width: int, experts: int, hidden: int, chosen: int) -> None:
        super().__init__()
        self.share = chosen / experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        weights, places = scores.t().topk(int(len(tokens) * self.share), dim=-1)  # (experts, capacity)
        gate, up = torch.bmm(tokens[places], self.up).chunk(2, dim=-1)
        made = torch.bmm(functional.silu(gate) * up, self.down) * weights.unsqueeze(-1)
        mixed = torch.zeros_like(tokens).index_add(0, places.flatten(), made.flatten(0, 1))
        return mixed.view_as(hidden)
