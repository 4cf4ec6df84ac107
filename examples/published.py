"""Trainings whose time and memory others have published, for `teraio capture`: see docs/predicted.md, which has the commands.

    teraio capture examples.published:llama_3b --hardware a100 --tokens 8192 -o llama-3b.json

Each function makes a training in bf16 with a fused AdamW, and returns a function for one step.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import teraio
from examples.llama import SIZES, Attention, Llama, LlamaConfig, llama, rotations
from examples.lora import Adapted

QWEN_7B = LlamaConfig(
    layers=28, width=3584, heads=28, key_value_heads=4, feed_forward=18944, vocabulary=152064, tied=False, context=1024
)
"""Qwen2.5-7B (Qwen team, 2024), without the biases of query, key and value (0.002 % of its parameters)."""


OLMOE_7B = LlamaConfig(
    layers=16,
    width=2048,
    heads=16,
    key_value_heads=16,
    feed_forward=1024,
    vocabulary=50304,
    tied=False,
    context=1024,
    rotation_base=10_000.0,
)
"""OLMoE-7B (Muennighoff et al., 2024): 64 experts in each layer, each token goes through eight. feed_forward: of an expert."""
EXPERTS, CHOSEN = 64, 8


class NormedAttention(Attention):
    """Attention in which all queries of a token have one norm, and all its keys another: (batch, time, width) to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.query = nn.Sequential(self.query, nn.RMSNorm(config.width, eps=config.norm_epsilon))  # type: ignore[assignment]
        self.key = nn.Sequential(self.key, nn.RMSNorm(config.width, eps=config.norm_epsilon))  # type: ignore[assignment]


class Experts(nn.Module):
    """A mixture of SwiGLU experts (Shazeer et al., 2017): (batch, time, width) to the same.

    All shapes are fixed, since each expert has a capacity (Fedus et al., 2021): an equal share of all rows.
    What comes after that is left out.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.zeros(EXPERTS, config.width, 2 * config.feed_forward))
        self.down = nn.Parameter(torch.zeros(EXPERTS, config.feed_forward, config.width))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        shares, chosen = functional.softmax(self.router(tokens).float(), dim=-1).topk(CHOSEN)
        expert, order = chosen.flatten().sort(stable=True)
        capacity = len(tokens) * CHOSEN // EXPERTS
        first = torch.searchsorted(expert, torch.arange(EXPERTS, device=expert.device))
        place = torch.arange(len(expert), device=expert.device) - first[expert]
        row = torch.where(place < capacity, expert * capacity + place, EXPERTS * capacity)  # the last one is left out
        token = expert.new_zeros(EXPERTS * capacity + 1).scatter(0, row, order // CHOSEN)[:-1]
        share = shares.new_zeros(EXPERTS * capacity + 1).scatter(0, row, shares.flatten()[order])[:-1]
        gate, up = torch.bmm(tokens[token].reshape(EXPERTS, capacity, -1), self.up).chunk(2, dim=-1)
        made = torch.bmm(functional.silu(gate) * up, self.down).flatten(0, 1) * share[:, None].to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, token, made).view_as(hidden)


def with_experts(config: LlamaConfig) -> Llama:
    """Return a Llama with these experts, and with norms of queries and keys, on the device "meta"."""
    with torch.device("meta"):
        model = Llama(config)
        for layer in model.layers:
            layer.attention, layer.feed_forward = NormedAttention(config), Experts(config)
    return model


class ViTG(nn.Module):
    """The vision transformer `vit_giant_patch14_dinov2` of timm: images (batch, 3, 224, 224) to logits (batch, 45).

    Each layer is computed again in the backward pass, as after `set_grad_checkpointing()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1536, 14, stride=14)
        self.token = nn.Parameter(torch.zeros(1, 1, 1536))
        self.places = nn.Parameter(torch.zeros(1, 257, 1536))
        self.layers = nn.ModuleList(ViTLayer(1536, heads=24, hidden=4096) for _ in range(40))
        self.norm = nn.LayerNorm(1536, eps=1e-6)
        self.head = nn.Linear(1536, 45)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat((self.token.expand(len(images), -1, -1), patches), dim=1) + self.places
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.head(self.norm(hidden)[:, 0])  # type: ignore[no-any-return]


class ViTLayer(nn.Module):
    """A pre-norm layer with SwiGLU, and a factor for each channel (Touvron et al., 2021): (batch, time, width) to the same."""

    def __init__(self, width: int, *, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 1e-5)) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.scale1 * self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(hidden)).chunk(2, dim=-1)
        return hidden + self.scale2 * self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Recipe(nn.Module):
    """A Llama as torchtune trains it: each layer and the loss are compiled by themselves, all else runs as it is written.

    parts: in which the loss is computed, one after the other. With one, the logits become fp32 before the compiled loss; with
    more, each part becomes fp32 within.
    """

    def __init__(self, model: Llama, *, parts: int) -> None:
        super().__init__()
        self.model, self.parts = model, parts
        for layer in model.layers:
            layer.compile(backend="teraio")
        self.loss = torch.compile(_loss, backend="teraio")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        hidden = model.tokens(tokens)
        cosine, sine = rotations(model.config, tokens.shape[1], tokens.device)
        for index, layer in enumerate(model.layers):
            if index < model.config.checkpointed_layers:
                hidden = checkpoint(layer, hidden, cosine, sine, use_reentrant=False)
            else:
                hidden = layer(hidden, cosine, sine)
        chunks = model.norm(hidden).chunk(self.parts, dim=1)
        logits = [functional.linear(chunk, model.tokens.weight) for chunk in chunks]
        if self.parts == 1:
            logits = [logits[0].float()]
        losses = [self.loss(some, these) for some, these in zip(logits, targets.chunk(self.parts, dim=1), strict=True)]
        return torch.stack(losses).sum() / targets.numel()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def llama_3b() -> Callable[[], None]:
    """Llama-3.2-3B, 2 x 4,096 tokens: torchtune's recipe, packed and compiled."""
    return _llama_3b(parts=1)


def llama_3b_chunked() -> Callable[[], None]:
    """The same, the loss in eight parts."""
    return _llama_3b(parts=8)


def llama_3b_checkpointed() -> Callable[[], None]:
    """The same, and each layer is computed again."""
    return _llama_3b(parts=8, checkpointed_layers=28)


def llama_8b() -> Callable[[], None]:
    """Llama-3-8B, 8 x 8 x 1,024 tokens: shadowspill's training."""
    return _llama(SIZES["llama-3-8b"], rows=8, context=1024, passes=8)


def llama_8b_lora() -> Callable[[], None]:
    """The same, with factors of rank 32 beside all matrices of the layers; nothing else is trained."""
    model = llama(SIZES["llama-3-8b"], device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    for part in [each for layer in model.layers for each in layer.modules()]:
        for name, linear in part.named_children():
            if isinstance(linear, nn.Linear):
                setattr(part, name, Adapted(linear, 32).to("cuda", torch.bfloat16))
    return _trained(model, rows=8, context=1024, passes=8)


def olmoe_7b() -> Callable[[], None]:
    """OLMoE-7B, 2 x 32 x 1,024 tokens: shadowspill's training. Experts have a capacity."""
    model = with_experts(OLMOE_7B).to(torch.bfloat16).to_empty(device="cuda")
    return _trained(model, rows=32, context=1024, passes=2)


def qwen_7b() -> Callable[[], None]:
    """Qwen2.5-7B, 158 x 1,024 tokens, fp32 masters: MegaTrain's training."""
    return _llama(QWEN_7B, rows=158, context=1024, masters=True)


def vit_g() -> Callable[[], None]:
    """ViT-g of 1.1 billion parameters, 32 images: the training of torchao's benchmark of offloaded optimizers."""
    with torch.device("cuda"):
        model = ViTG().to(torch.bfloat16)
        images = torch.zeros(32, 3, 224, 224, dtype=torch.bfloat16)
        classes = torch.zeros(32, dtype=torch.long)
    compiled = torch.compile(model, backend="teraio")
    return _step(model, lambda: functional.cross_entropy(compiled(images), classes))


def _llama_3b(*, parts: int, checkpointed_layers: int = 0) -> Callable[[], None]:
    config = dataclasses.replace(SIZES["llama-3.2-3b"], checkpointed_layers=checkpointed_layers)
    model = llama(config, device="cuda", dtype=torch.bfloat16)
    tokens = torch.zeros(2, 4096, dtype=torch.long, device="cuda")
    recipe = Recipe(model, parts=parts)
    return _step(model, lambda: recipe(tokens, tokens))


def _llama(config: LlamaConfig, *, rows: int, context: int, passes: int = 1, masters: bool = False) -> Callable[[], None]:
    model = llama(config, device="cuda", dtype=torch.bfloat16)
    return _trained(model, rows=rows, context=context, passes=passes, masters=masters)


def _trained(model: Llama, *, rows: int, context: int, passes: int = 1, masters: bool = False) -> Callable[[], None]:
    tokens = torch.zeros(rows, context, dtype=torch.long, device="cuda")
    compiled = torch.compile(model, backend="teraio")
    return _step(model, lambda: compiled(tokens, tokens), passes=passes, masters=masters)


def _step(model: nn.Module, loss: Callable[[], Tensor], *, passes: int = 1, masters: bool = False) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    if masters:
        teraio.manage_optimizer(optimizer, master_weights=True)

    def step() -> None:
        for _ in range(passes):
            loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step
