"""A plain Llama in plain PyTorch: nothing here knows of teraio.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama 3 (Grattafiori et al., 2024). Llama 3.1 and later
change the rotation frequencies for contexts beyond 8192. That is left out, since it changes no shape and no cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama. The first `checkpointed_layers` layers use `torch.utils.checkpoint`.

    `context`: tokens in a row of text; no parameter's shape depends on it. `tied`: the head shares the embedding's matrix.
    `loss_tokens`: number of tokens whose logits are computed at once.
    """

    kind: Literal["llama"] = "llama"
    layers: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool
    context: int = 2048
    rotation_base: float = 500_000.0
    norm_epsilon: float = 1e-5
    loss_tokens: int = 1024
    checkpointed_layers: int = 0


SIZES: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "tiny": LlamaConfig(
            layers=4, width=512, heads=8, key_value_heads=4, feed_forward=1536, vocabulary=256, tied=True, context=128
        ),
        "gpt2-124m": LlamaConfig(
            layers=12, width=768, heads=12, key_value_heads=12, feed_forward=2048, vocabulary=50257, tied=True, context=1024
        ),
        "llama-3.2-1b": LlamaConfig(
            layers=16, width=2048, heads=32, key_value_heads=8, feed_forward=8192, vocabulary=128256, tied=True
        ),
        "llama-3.2-3b": LlamaConfig(
            layers=28, width=3072, heads=24, key_value_heads=8, feed_forward=8192, vocabulary=128256, tied=True
        ),
        "llama-3-8b": LlamaConfig(
            layers=32, width=4096, heads=32, key_value_heads=8, feed_forward=14336, vocabulary=128256, tied=False
        ),
        "llama-3-70b": LlamaConfig(
            layers=80, width=8192, heads=64, key_value_heads=8, feed_forward=28672, vocabulary=128256, tied=False
        ),
    }
)
"""By name. "llama-..." have the shapes of the published models. "gpt2-124m" is a Llama with depth, width, heads and vocabulary
of GPT-2. "tiny" has 13 million parameters: in fp32 its matrices are large enough to move, and a CPU trains it quickly."""


class Attention(nn.Module):
    """Causal grouped-query self-attention: (batch, time, width) to (batch, time, width)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.queries_per_key = config.heads // config.key_value_heads
        narrow = self.head_width * config.key_value_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, narrow, bias=False)
        self.value = nn.Linear(config.width, narrow, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projected in (self.query(hidden), self.key(hidden), self.value(hidden))
        )
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        # In fp32, no fused kernel supports grouped queries. The unfused fallback would keep all scores in memory.
        shares = hidden.dtype != torch.float32
        if not shares:
            key, value = (each.repeat_interleave(self.queries_per_key, dim=1) for each in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shares)
        return self.output(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): (batch, time, width) to (batch, time, width)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.feed_forward, bias=False)
        self.up = nn.Linear(config.width, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm transformer layer: (batch, time, width) to (batch, time, width)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cosine, sine)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Takes tokens and targets of shape (batch, time), returns the mean cross-entropy in nats, fp32. Made by `llama`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        cosine, sine = rotations(self.config, tokens.shape[1], tokens.device)
        for index, layer in enumerate(self.layers):
            if index < self.config.checkpointed_layers:
                hidden = checkpoint(layer, hidden, cosine, sine, use_reentrant=False)
            else:
                hidden = layer(hidden, cosine, sine)
        matrix = self.tokens.weight if self.head is None else self.head.weight
        # With a vocabulary of 128256, the gradient of all logits at once would be the largest tensor of the training.
        chunks = zip(
            torch.split(self.norm(hidden).flatten(0, 1), self.config.loss_tokens),
            torch.split(targets.flatten(), self.config.loss_tokens),
            strict=True,
        )
        losses = [functional.cross_entropy(functional.linear(a, matrix), b, reduction="none") for a, b in chunks]
        # A mean in bf16 has two digits only. Converting the logits instead would double their memory.
        return torch.cat(losses).float().mean()


def llama(config: LlamaConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """Return a Llama with random weights (normal with standard deviation 0.02; norms 1) on `device` in `dtype`.

    The weights are created there. No second copy of them exists at any time.
    """
    with torch.device("meta"):
        model = Llama(config)
    return model.to(dtype).to_empty(device=device).apply(_initialise)


def rotations(config: LlamaConfig, time: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angle by which each pair of elements of a head is rotated at each position.

    Both have shape (time, head width / 2), fp32.
    """
    head_width = config.width // config.heads
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    places = torch.arange(time, device=device, dtype=torch.float32)
    angles = torch.outer(places, config.rotation_base**-exponents)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions (Su et al., 2021): element i of a head and element i + head width / 2 are one pair.

    (batch, heads, time, head width) to the same shape. Computed in fp32.
    """
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(states.dtype)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
