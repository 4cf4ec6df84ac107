"""What runs in tiles: the smallest budgets of captured models with and without tiles, and the time of a training with them.

The models have two layers each, since layers are alike: what sets the smallest budget shows. Their losses are those of a plain
`cross_entropy` over all tokens at once.
"""

import dataclasses
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import teraio
from benchmarks.budgets import budgeted
from benchmarks.results import Figure
from benchmarks.turns import Scale, first_in_line, ratios, spread, take_turns, tensor_peak, warm_up, workers
from examples.gpt import GPT, GPTConfig
from examples.llama import SIZES, llama
from examples.training import Setting
from planner import Trace, floor

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]

GIB = 1 << 30
VOCABULARIES = (8_192, 32_768, 128_256, 262_144)
LENGTHS = (8_192, 32_768, 131_072, 1_048_576)
BATCHES = (1, 4, 16)
SLOWER = "<= 1.05"
HEAD = "128MiB"
"""Of the training that is timed, the head needs more, and no other layer does."""


def captured_floor(model: Callable[[], torch.nn.Module], batch: int, time: int, tiles: str | int) -> tuple[int, str]:
    """Return the smallest budget of a training that was captured for an H100, with updates in slices, and what sets it."""

    def training() -> Callable[[], object]:
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)
        compiled = torch.compile(made, backend="teraio", options={"tiles": tiles})
        tokens = torch.zeros(batch, time, dtype=torch.long, device="cuda")

        def step() -> None:
            compiled(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    trace: Trace = teraio.capture(training, hardware="h100")
    size, stage = floor(trace, in_slices=True)
    return size, trace.stages[stage].name


def of_llama(name: str, vocabulary: int = 128_256) -> Callable[[], torch.nn.Module]:
    """Return what makes two layers of a Llama in bf16, with its loss over all tokens at once."""
    config = dataclasses.replace(SIZES[name], layers=2, loss_tokens=1 << 40, vocabulary=vocabulary)
    return lambda: llama(config, device="cuda", dtype=torch.bfloat16)


def of_gpt(context: int) -> Callable[[], torch.nn.Module]:
    """Return what makes two layers of a GPT-2 of 124M parameters, in 32 bits."""
    return lambda: GPT(GPTConfig(layers=2, width=768, heads=12, context=context, vocabulary=50_257)).to("cuda")


class _WithLoss(torch.nn.Module):
    """A causal model of transformers with a loss over all tokens, in place of scores that it returns."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # No mask: transformers would make one of all tokens by all tokens.
        hidden = self.model.model(input_ids=tokens, attention_mask={"full_attention": None}, use_cache=False).last_hidden_state
        return torch.nn.functional.cross_entropy(self.model.lm_head(hidden).flatten(0, 1), targets.flatten())


def of_qwen3(layers: int = 2) -> torch.nn.Module:
    """Return Qwen3-8B in bf16, with so many of its 36 layers and random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=LENGTHS[-1],
        tie_word_embeddings=False,
    )
    make: Any = Qwen3ForCausalLM._from_config
    with torch.device("cuda"):
        return _WithLoss(make(config, attn_implementation="sdpa")).to(torch.bfloat16)


def measure(scale: Scale) -> Measured:
    """Return smallest budgets against vocabulary, length and batch, and the time of tiles where both ways fit."""
    figures: list[Figure] = []
    cases: dict[str, list[tuple[int, Callable[[], torch.nn.Module], int, int]]] = {
        "llama-3.2-1b, 4 x 2,048, vocabulary": [(v, of_llama("llama-3.2-1b", vocabulary=v), 4, 2048) for v in VOCABULARIES],
        "llama-3-8b, 1 sequence, length": [(length, of_llama("llama-3-8b"), 1, length) for length in LENGTHS],
        "qwen3-8b, 1 sequence, length": [(length, of_qwen3, 1, length) for length in LENGTHS],
        "gpt2-124m, 1,024 tokens, batch": [(batch, of_gpt(1024), batch, 1024) for batch in BATCHES],
    }
    for name, rows in cases.items():
        for number, model, batch, time in rows:
            whole, stage = captured_floor(model, batch, time, "off")
            tiled, then = captured_floor(model, batch, time, whole // 8)
            figures.append(Figure(name=f"{name} {number:,}: whole", value=whole / GIB, unit="GiB", note=stage))
            figures.append(Figure(name=f"{name} {number:,}: in tiles", value=tiled / GIB, unit="GiB", note=then))
    timed, seconds = _time(scale)
    return (*figures, *timed), seconds


def _time(scale: Scale) -> Measured:
    """Train a GPT with a large vocabulary at a budget at which it fits whole, too, by both ways in turns."""
    model = GPTConfig(layers=scale.layers, width=256, heads=4, context=512, vocabulary=16_384)
    plain = Setting.model_validate({"backend": "teraio", "model": model, "batch": 4, "device": scale.device})
    budget = budgeted(dataclasses.replace(scale, batch=4), int(0.7 * tensor_peak(plain, "peak", scale.output)))
    base = plain.model_copy(update={"options": budget.options})
    settings = {way: base.model_copy(update={"options": base.options | {"tiles": way}}) for way in ("off", HEAD)}
    with first_in_line(), workers(settings, scale.output) as running:
        phases = {name: warm_up(worker, 6) for name, worker in running.items()}
        taken = take_turns(running, 2 * scale.rounds)
    seconds = {name: [step.seconds for step in steps] for name, steps in taken.items()}
    by_round = ratios(seconds[HEAD], seconds["off"])
    figures = [Figure(name=f"tiles {way}", value=median(each), unit="s", note=phases[way]) for way, each in seconds.items()]
    figures.append(Figure(name="tiles / whole", value=median(by_round), unit="", aim=SLOWER, note=spread(by_round)))
    return tuple(figures), seconds
