"""The real models that are trained with and without a budget: `MODELS`, by name. Needs transformers; other packages when made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..teraio.parity.harness import Case
from . import others, text
from .parity import Loop, adamw
from .text import Batch


def real(
    make: Callable[[], nn.Module],
    make_batches: Callable[[int], list[Batch]] = text.sentences,
    package: str = "transformers",
    compute_loss: Any = others.own_loss,
) -> Loop:
    """Trained by AdamW, until a plan is followed. package: that the class comes from."""
    case = Case(make_model=make, make_batches=make_batches, compute_loss=compute_loss, make_optimizer=adamw, planned=True)
    return Loop(case=case, package=package)


def diffusing(make: Callable[[], nn.Module], **batches: Any) -> Loop:
    return real(make, partial(others.noised, **batches), "diffusers", others.noise_loss)


WORDS = {"encoder_hidden_states": (16, 64)}
MODELS = {
    "Llama": real(text.llama, text.padded()),
    "Gemma 3": real(text.gemma3),
    "Qwen3-MoE": real(text.qwen3_moe),
    "Mamba": real(text.mamba, partial(text.sentences, length=32)),
    "BERT": real(text.bert, text.padded(text.masked_words)),
    "T5": real(text.t5, text.padded()),
    "ViT": real(others.vit, others.pictures),
    "ConvNeXt V2": real(others.convnextv2, partial(others.pictures, rows=64)),
    "Swin Transformer V2": real(others.swinv2, others.pictures),
    "LLaVA": real(others.llava, others.pictures_among_words),
    "wav2vec 2.0": real(others.wav2vec2, others.waves),
    "Llama with LoRA": real(others.llama_with_adapters, package="peft"),
    "UNet of Stable Diffusion": diffusing(others.conditional_unet, **WORDS),
    "Stable Diffusion 3": diffusing(others.sd3, rows=16, **WORDS, pooled_projections=(64,)),
    "ResNet-18": real(partial(others.timm_model, "resnet18"), others.pictures, "timm", others.classes_loss),
}
CORE = ("Qwen3-MoE", "T5", "ViT")
"""Those that `make test` trains too."""
