"""A plain GPT in plain PyTorch: nothing here knows of teraio."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. The first `checkpointed_layers` layers use `torch.utils.checkpoint`."""

    kind: Literal["gpt"] = "gpt"
    layers: int = 12
    width: int = 512
    heads: int = 8
    context: int = 512
    vocabulary: int = 256
    checkpointed_layers: int = 0


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) to (batch, time, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm transformer layer: (batch, time, width) to (batch, time, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT over bytes. Takes tokens and targets of shape (batch, time) and returns the mean cross-entropy in nats."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(initialise)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return for each place the logits of the token that follows, of shape (batch, time, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for index, layer in enumerate(self.layers):
            if index < self.config.checkpointed_layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def initialise(module: nn.Module) -> None:
    """Initialise weights from a normal distribution with standard deviation 0.02, biases with zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
