"""Captures the traces of `traces/captured` anew: full-size trainings that need no memory to capture.

python -m tools.captured_traces [NAME ...]      all of them by default; Llama-3-70B takes minutes
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import planner
from examples.gpt import GPT, GPTConfig
from examples.llama import SIZES, LlamaConfig, llama
from teraio.capturing import capture
from tools.captured_models import MixtureOfExperts, ViT

FOLDER = Path(__file__).resolve().parents[1] / "traces" / "captured"
PAPER = FOLDER / "h100-nvl-four-drives.json"
"""The machine of TERAIO (Yuan et al., 2025), one of its two GPUs with four of its eight drives."""

GRANITE_8B = LlamaConfig(
    layers=36, width=4096, heads=32, key_value_heads=8, feed_forward=14336, vocabulary=49152, tied=True, loss_tokens=2048
)
"""Granite-8B-code (Mishra et al., 2024). Its biases (0.01 % of it) are left out."""


Training = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor] | None]
"""A model, the inputs of a step, and the loss of what the model returns; None if that is the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A training to capture, and for which machine: a name or a file. tokens, samples: of a step."""

    title: str
    name: str
    hardware: str | Path
    make: Callable[[], Training]
    tokens: int | None = None
    samples: int | None = None

    @property
    def path(self) -> Path:
        """Where its trace is kept."""
        return FOLDER / f"{self.name}.json.gz"

    def trace(self) -> planner.Trace:
        """Capture it: AdamW, fused, one forward and one backward pass for each update."""
        with torch.device("meta"):
            model, inputs, loss = self.make()
        return capture(
            model,
            inputs,
            loss=loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
            hardware=self.hardware,
            name=self.title,
            tokens=self.tokens,
            samples=self.samples,
        )


def _llama(config: LlamaConfig, batch: int, dtype: torch.dtype = torch.float32) -> Callable[[], Training]:
    def make() -> Training:
        tokens = torch.zeros(batch, 2048, dtype=torch.long)
        return llama(config, device="meta", dtype=dtype), (tokens, tokens), None

    return make


def _gpt2() -> Training:
    model = GPT(GPTConfig(layers=12, width=768, heads=12, context=1024, vocabulary=50257))
    model.head.weight = model.tokens.weight
    tokens = torch.zeros(16, 1024, dtype=torch.long)
    return model, (tokens, tokens), None


def _vit() -> Training:
    return ViT(layers=24, width=1024, heads=16), (torch.zeros(128, 3, 224, 224),), _cross_entropy


def _moe() -> Training:
    model = MixtureOfExperts(layers=12, width=1024, heads=16, experts=16, hidden=2048, chosen=2, vocabulary=32000)
    return model.to(torch.bfloat16), (torch.zeros(8, 2048, dtype=torch.long),), _cross_entropy


def _cross_entropy(logits: Tensor) -> Tensor:
    rows = logits.flatten(0, -2)
    return functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long, device=rows.device))


CAPTURES = (
    Capture(
        title="Llama-3-8B, 4 x 2048, fp32",
        name="llama-3-8b",
        hardware=PAPER,
        make=_llama(SIZES["llama-3-8b"], 4),
        tokens=4 * 2048,
    ),
    Capture(
        title="Granite-8B-code, 12 x 2048, fp32",
        name="granite-8b-code",
        hardware=PAPER,
        make=_llama(GRANITE_8B, 12),
        tokens=12 * 2048,
    ),
    Capture(
        title="Llama-3-70B, 2 x 2048, fp32",
        name="llama-3-70b",
        hardware=PAPER,
        make=_llama(SIZES["llama-3-70b"], 2),
        tokens=2 * 2048,
    ),
    Capture(title="GPT-2 124M, 16 x 1024, fp32", name="gpt2-124m", hardware="rtx4090", make=_gpt2, tokens=16 * 1024),
    Capture(
        title="Llama-3.2-1B, 4 x 2048, bf16",
        name="llama-3.2-1b-bf16",
        hardware="rtx4090",
        make=_llama(SIZES["llama-3.2-1b"], 4, torch.bfloat16),
        tokens=4 * 2048,
    ),
    Capture(title="ViT-L/16, 128 images, fp32", name="vit-l-16", hardware="rtx4090", make=_vit, samples=128),
    Capture(
        title="Mixture of experts, 8 x 2048, bf16", name="mixture-of-experts", hardware="rtx4090", make=_moe, tokens=8 * 2048
    ),
)


def main(names: list[str]) -> None:
    """Capture the trainings with these names; all without names."""
    known = [each.name for each in CAPTURES]
    unknown = sorted(set(names) - set(known))
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    for each in CAPTURES:
        if not names or each.name in names:
            trace = each.trace()
            trace.save(each.path)
            print(f"{each.path.name}: {len(trace.stages)} stages, {len(trace.blocks)} blocks, {each.path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
