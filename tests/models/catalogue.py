"""The real models that are trained with and without a budget: `MODELS`, by name. Needs transformers; other packages when made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from . import others, text
from .text import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model, its data and its loss.

    package: that the class comes from. core: whether `make test` trains it too.
    """

    name: str
    make: Callable[[], nn.Module]
    make_batches: Callable[[int], list[Batch]]
    package: str = "transformers"
    compute_loss: Callable[[nn.Module, Batch], Tensor] = others.own_loss
    core: bool = False


_LIST = (
    RealModel(name="GPT-2", make=text.gpt2, make_batches=text.sentences),
    RealModel(name="Llama", make=text.llama, make_batches=text.padded()),
    RealModel(name="Gemma 2", make=text.gemma2, make_batches=text.sentences),
    RealModel(name="Gemma 3", make=text.gemma3, make_batches=text.sentences),
    RealModel(name="Qwen3", make=text.qwen3, make_batches=text.padded()),
    RealModel(name="Mixtral", make=text.mixtral, make_batches=text.sentences),
    RealModel(name="Qwen3-MoE", make=text.qwen3_moe, make_batches=text.sentences, core=True),
    RealModel(name="Mamba", make=text.mamba, make_batches=partial(text.sentences, length=32)),
    RealModel(name="BERT", make=text.bert, make_batches=text.padded(text.masked_words)),
    RealModel(name="T5", make=text.t5, make_batches=text.padded(), core=True),
    RealModel(name="ViT", make=others.vit, make_batches=others.pictures, core=True),
    RealModel(name="ConvNeXt V2", make=others.convnextv2, make_batches=partial(others.pictures, rows=64)),
    RealModel(name="Swin Transformer V2", make=others.swinv2, make_batches=others.pictures),
    RealModel(name="LLaVA", make=others.llava, make_batches=others.pictures_among_words),
    RealModel(name="Whisper", make=others.whisper, make_batches=others.spectrograms),
    RealModel(name="wav2vec 2.0", make=others.wav2vec2, make_batches=others.waves),
    RealModel(name="Llama with LoRA", make=others.llama_with_adapters, make_batches=text.sentences, package="peft"),
    RealModel(name="UNet", make=others.unet, make_batches=others.noised, package="diffusers", compute_loss=others.noise_loss),
    RealModel(
        name="DiT",
        make=others.dit,
        make_batches=partial(others.noised, rows=16, channels=4, classes=True),
        package="diffusers",
        compute_loss=others.noise_loss,
    ),
    RealModel(
        name="UNet of Stable Diffusion",
        make=others.conditional_unet,
        make_batches=partial(others.noised, channels=4, encoder_hidden_states=(16, 64)),
        package="diffusers",
        compute_loss=others.noise_loss,
    ),
    RealModel(
        name="Stable Diffusion 3",
        make=others.sd3,
        make_batches=partial(others.noised, rows=16, channels=4, encoder_hidden_states=(16, 64), pooled_projections=(64,)),
        package="diffusers",
        compute_loss=others.noise_loss,
    ),
    *(
        RealModel(
            name=name,
            make=partial(others.timm_model, key, **settings),
            make_batches=others.pictures,
            package="timm",
            compute_loss=others.classes_loss,
        )
        for name, key, settings in (
            ("ResNet-18", "resnet18", {}),
            ("ConvNeXt (timm)", "convnext_atto", {"depths": (1, 1, 1, 1)}),
            (
                "ViT (timm)",
                "vit_tiny_patch16_224",
                others.VIT,
            ),
        )
    ),
)
MODELS = {model.name: model for model in _LIST}
