"""Text models of transformers, tiny, from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

WORDS = 1024
WIDTH, INNER, HEADS, LAYERS = 256, 1024, 4, 2
"""A projection of a feed-forward layer and an embedding have 1 MiB each in fp32: the smallest blocks that move."""

Batch = dict[str, Tensor]
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
"""The names that most configurations have for them."""
_DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    **_ENDS,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}


def configured(name: str, head: str, config: str = "", **settings: Any) -> nn.Module:
    """`<name><head>` of transformers with those settings of its `<config or name>Config`."""
    return getattr(transformers, name + head)(getattr(transformers, f"{config or name}Config")(**settings))


def causal(name: str, config: str = "", **settings: Any) -> nn.Module:
    """`<name>ForCausalLM` with those settings in place of the usual ones."""
    return configured(name, "ForCausalLM", config, **_DECODER | settings)


def llama(**settings: Any) -> nn.Module:
    return causal("Llama", **settings)


def gemma3() -> nn.Module:
    layers = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    return causal("Gemma3", "Gemma3Text", **layers, query_pre_attn_scalar=WIDTH // HEADS)


def qwen3_moe() -> nn.Module:
    return causal("Qwen3Moe", num_experts=4, moe_intermediate_size=512, decoder_sparse_step=1, **_EXPERTS)


def mamba() -> nn.Module:
    return configured(
        "Mamba", "ForCausalLM", vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, **_ENDS
    )


def bert() -> nn.Module:
    return configured("Bert", "ForMaskedLM", vocab_size=WORDS, **SIZES, max_position_embeddings=256)


def t5() -> nn.Module:
    sizes = {
        "vocab_size": WORDS,
        "d_model": WIDTH,
        "d_ff": INNER,
        "d_kv": WIDTH // HEADS,
        "num_layers": LAYERS,
        "num_heads": HEADS,
    }
    return configured("T5", "ForConditionalGeneration", **sizes, pad_token_id=0, decoder_start_token_id=0, use_cache=False)


def sentences(steps: int, *, rows: int = 16, length: int = 64) -> list[Batch]:
    """Random words [rows, length], and the same as labels."""
    draw = torch.Generator().manual_seed(21)
    words = [torch.randint(3, WORDS, (rows, length), generator=draw) for _ in range(steps)]
    return [{"input_ids": each, "labels": each.clone()} for each in words]


def padded(make: Callable[..., list[Batch]] = sentences) -> Callable[[int], list[Batch]]:
    """Those batches with a mask: the last words of half of the rows are padding (word 0, which is not learned)."""

    def batches(steps: int) -> list[Batch]:
        made = make(steps)
        for batch in made:
            mask = torch.ones_like(batch["input_ids"])
            mask[::2, mask.shape[1] * 3 // 4 :] = 0
            batch["input_ids"] = batch["input_ids"] * mask
            batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
            batch["attention_mask"] = mask
        return made

    return batches


def masked_words(steps: int) -> list[Batch]:
    """Sentences in which every seventh word is to be filled in."""
    made = sentences(steps)
    for batch in made:
        hidden = torch.arange(batch["input_ids"].shape[1]) % 7 == 3
        batch["labels"] = batch["labels"].masked_fill(~hidden, -100)
        batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 1)
    return made


def _texts(count: int, *, shortest: int, longest: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(4)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(3, WORDS, (length,), generator=draw).tolist()} for length in lengths]


def flattened(steps: int) -> list[Batch]:
    """Texts one after another in one row of 500 to 1,700 words, with positions that begin anew at each."""
    from transformers import DataCollatorWithFlattening

    flatten = DataCollatorWithFlattening()
    sizes = [(24, 16, 20, 34, 10, 28)[step % 6] for step in range(steps)]
    return [dict(flatten(_texts(size, shortest=20, longest=80))) for size in sizes]


def packed(steps: int) -> list[Batch]:
    """The same rows, with the places at which the texts begin, and the end, in place of positions."""
    made = flattened(steps)
    for batch in made:
        positions = batch.pop("position_ids")[0]
        batch["cu_seqlens"] = torch.cat([torch.nonzero(positions == 0)[:, 0], torch.tensor([len(positions)])])
    return made
