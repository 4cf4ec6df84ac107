"""Models of images, speech and diffusion, and adapters; tiny, from configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .text import HEADS, LAYERS, SIZES, WIDTH, Batch, configured, llama, sentences

VIT = {"img_size": 64, "patch_size": 8, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS}
IMAGE_WORD = 3
"""Stands for a piece of a picture."""


def vit() -> nn.Module:
    return configured("ViT", "ForImageClassification", **SIZES, image_size=64, patch_size=8, num_labels=10)


def convnextv2() -> nn.Module:
    sizes = {"image_size": 64, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 1, 1]}
    return configured("ConvNextV2", "ForImageClassification", **sizes, num_labels=10)


def swinv2() -> nn.Module:
    """Windows of which every second layer is shifted."""
    sizes = {"image_size": 64, "patch_size": 4, "embed_dim": 64, "depths": [1, 2, 1], "num_heads": [2, 4, 8], "window_size": 4}
    return configured("Swinv2", "ForImageClassification", **sizes, num_labels=10)


def llava() -> nn.Module:
    """Pictures of 64 x 64 as 16 words each, between the others."""
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=64, patch_size=16)
    settings = {"vision_config": vision, "text_config": llama().config, "image_token_index": IMAGE_WORD}
    return configured("Llava", "ForConditionalGeneration", **settings, vision_feature_layer=-1)


def wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (64,) * 3, "conv_stride": (5, 4, 4), "conv_kernel": (10, 4, 4), "num_feat_extract_layers": 3}
    settings = {"vocab_size": 32, **SIZES, **convolutions, "apply_spec_augment": False, "layerdrop": 0.0}
    return configured("Wav2Vec2", "ForSequenceClassification", **settings)


def timm_model(name: str, **settings: Any) -> nn.Module:
    """A model of timm with random weights."""
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **settings)


def of_diffusers(name: str, **settings: Any) -> nn.Module:
    """A model of diffusers for samples of 16 x 16."""
    import diffusers

    return getattr(diffusers, name)(sample_size=16, **settings)


def conditional_unet() -> nn.Module:
    """As in Stable Diffusion: attention to words [rows, words, 64]."""
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {"in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (64, 128)}
    attention = {"cross_attention_dim": 64, "attention_head_dim": 4}
    return of_diffusers("UNet2DConditionModel", **sizes, **attention, down_block_types=down, up_block_types=up)


def sd3() -> nn.Module:
    """The transformer of Stable Diffusion 3: pictures and words in one attention."""
    words = {"joint_attention_dim": 64, "caption_projection_dim": WIDTH, "pooled_projection_dim": 64}
    patches = {"in_channels": 4, "out_channels": 4, "patch_size": 2, "pos_embed_max_size": 16}
    layers = {"num_layers": LAYERS, "attention_head_dim": WIDTH // HEADS, "num_attention_heads": HEADS, "qk_norm": "rms_norm"}
    return of_diffusers("SD3Transformer2DModel", **patches, **layers, **words)


def llama_with_adapters() -> nn.Module:
    import peft

    settings = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), settings)


def pictures(steps: int, *, rows: int = 16, size: int = 64) -> list[Batch]:
    """Normal images [rows, 3, size, size] and random classes [rows]."""
    draw = torch.Generator().manual_seed(22)
    return [
        {
            "pixel_values": torch.randn(rows, 3, size, size, generator=draw),
            "labels": torch.randint(0, 10, (rows,), generator=draw),
        }
        for _ in range(steps)
    ]


def pictures_among_words(steps: int) -> list[Batch]:
    """Pictures [16, 3, 64, 64], each of which stands for 16 of the 64 words of its row, which are not learned."""
    batches = sentences(steps)
    for batch, shown in zip(batches, pictures(steps), strict=True):
        batch["input_ids"].clamp_(min=IMAGE_WORD + 1)[:, 4:20] = IMAGE_WORD
        batch["labels"][:, 4:20] = -100
        batch["pixel_values"] = shown["pixel_values"]
    return batches


def waves(steps: int) -> list[Batch]:
    """Random sound [12, 8000] and classes [12]."""
    draw = torch.Generator().manual_seed(24)
    return [
        {"input_values": torch.randn(12, 8000, generator=draw), "labels": torch.randint(0, 2, (12,), generator=draw)}
        for _ in range(steps)
    ]


def noised(steps: int, *, rows: int = 32, **given: tuple[int, ...]) -> list[Batch]:
    """Noisy samples [rows, 4, 16, 16], their noise and its level [rows].

    given: names of what else the model takes, normal values [rows, *shape].
    """
    draw = torch.Generator().manual_seed(25)
    batches = []
    for _ in range(steps):
        clean, noise = (torch.randn(rows, 4, 16, 16, generator=draw) for _ in range(2))
        batch = {"sample": clean + 0.5 * noise, "timestep": torch.randint(0, 1000, (rows,), generator=draw), "noise": noise}
        batches.append(batch | {name: torch.randn(rows, *shape, generator=draw) for name, shape in given.items()})
    return batches


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model of transformers computes by itself."""
    return model(**batch).loss


def classes_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a model of timm."""
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def noise_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean square of what is left of the noise."""
    given = {name: value for name, value in batch.items() if name not in ("sample", "noise")}
    return nn.functional.mse_loss(model(batch["sample"], **given).sample, batch["noise"])
