"""Models of images, speech and diffusion, and adapters; tiny, from configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .text import HEADS, INNER, LAYERS, SIZES, WIDTH, Batch, llama, sentences

VIT = {"img_size": 64, "patch_size": 8, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS}
IMAGE_WORD = 3
"""Stands for a piece of a picture."""


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=64, patch_size=8, num_labels=10)
    return transformers.ViTForImageClassification(config)


def convnextv2() -> nn.Module:
    config = transformers.ConvNextV2Config(image_size=64, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], num_labels=10)
    return transformers.ConvNextV2ForImageClassification(config)


def swinv2() -> nn.Module:
    """Windows of which every second layer is shifted."""
    config = transformers.Swinv2Config(
        image_size=64, patch_size=4, embed_dim=64, depths=[1, 2, 1], num_heads=[2, 4, 8], window_size=4, num_labels=10
    )
    return transformers.Swinv2ForImageClassification(config)


def llava() -> nn.Module:
    """Pictures of 64 x 64 as 16 words each, between the others."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=64, patch_size=16),
        text_config=llama().config,
        image_token_index=IMAGE_WORD,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=1024,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        num_mel_bins=80,
        max_source_positions=64,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        **SIZES,
        conv_dim=(64, 64, 64),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 4, 4),
        num_feat_extract_layers=3,
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config)


def timm_model(name: str, **settings: Any) -> nn.Module:
    """A model of timm with random weights."""
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **settings)


def unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def conditional_unet() -> nn.Module:
    """As in Stable Diffusion: attention to words [rows, words, 64]."""
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
    )


def sd3() -> nn.Module:
    """The transformer of Stable Diffusion 3: pictures and words in one attention."""
    import diffusers

    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=64,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


def dit() -> nn.Module:
    import diffusers

    return diffusers.DiTTransformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        patch_size=2,
        num_embeds_ada_norm=10,
    )


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
    made = sentences(steps)
    for batch, shown in zip(made, pictures(steps), strict=True):
        batch["input_ids"].clamp_(min=IMAGE_WORD + 1)[:, 4:20] = IMAGE_WORD
        batch["labels"][:, 4:20] = -100
        batch["pixel_values"] = shown["pixel_values"]
    return made


def spectrograms(steps: int) -> list[Batch]:
    """Random mel spectrograms [4, 80, 128] and words [4, 32]."""
    draw = torch.Generator().manual_seed(23)
    return [
        {
            "input_features": torch.randn(4, 80, 128, generator=draw),
            "labels": torch.randint(3, 1024, (4, 32), generator=draw),
        }
        for _ in range(steps)
    ]


def waves(steps: int) -> list[Batch]:
    """Random sound [12, 8000] and classes [12]."""
    draw = torch.Generator().manual_seed(24)
    return [
        {"input_values": torch.randn(12, 8000, generator=draw), "labels": torch.randint(0, 2, (12,), generator=draw)}
        for _ in range(steps)
    ]


def noised(steps: int, *, rows: int = 32, channels: int = 3, classes: bool = False, **given: tuple[int, ...]) -> list[Batch]:
    """Noisy samples [rows, channels, 16, 16], their noise and its level [rows], and with `classes` those [rows].

    given: names of what else the model takes, normal values [rows, *shape].
    """
    draw = torch.Generator().manual_seed(25)
    made = []
    for _ in range(steps):
        clean, noise = (torch.randn(rows, channels, 16, 16, generator=draw) for _ in range(2))
        batch = {"sample": clean + 0.5 * noise, "timestep": torch.randint(0, 1000, (rows,), generator=draw), "noise": noise}
        batch |= {"class_labels": torch.randint(0, 10, (rows,), generator=draw)} if classes else {}
        made.append(batch | {name: torch.randn(rows, *shape, generator=draw) for name, shape in given.items()})
    return made


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
