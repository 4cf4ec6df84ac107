"""The Llama: sizes, attention and positions as published; and the command that trains it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from examples import train_llama
from examples.llama import SIZES, Llama, LlamaConfig, llama

ROOT = Path(__file__).resolve().parents[2]
SMALL = LlamaConfig(layers=2, width=64, heads=4, key_value_heads=2, feed_forward=96, vocabulary=256, tied=True, context=32)

PARAMETERS = {
    "tiny": 12_718_592,
    "gpt2-124m": 123_551_232,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
}
"""Those of "llama-..." are the published ones. GPT-2 has 124,439,808: biases, and 786,432 for positions."""


def parameters(model: torch.nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def rows(seed: int = 0, count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(SMALL.vocabulary, (count, SMALL.context + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_the_published_parameters(name: str) -> None:
    with torch.device("meta"):
        assert parameters(Llama(SIZES[name])) == PARAMETERS[name]


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.float64)])
def test_the_loss_and_its_gradients_are_those_of_transformers(tied: bool, dtype: torch.dtype) -> None:
    """In fp64, grouped queries share their keys and values within the kernel."""
    transformers = pytest.importorskip("transformers", reason="in the extra dev")
    torch.manual_seed(0)
    ours: Any = llama(replace(SMALL, tied=tied), dtype=dtype)
    config = transformers.LlamaConfig(
        hidden_size=SMALL.width,
        intermediate_size=SMALL.feed_forward,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.key_value_heads,
        vocab_size=SMALL.vocabulary,
        rms_norm_eps=SMALL.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": SMALL.rotation_base},
        tie_word_embeddings=tied,
    )
    theirs = transformers.LlamaForCausalLM(config).to(dtype)
    pairs: list[tuple[Any, Any]] = [(ours.tokens, theirs.model.embed_tokens), (ours.norm, theirs.model.norm)]
    for one, other in zip(ours.layers, theirs.model.layers, strict=True):
        a, f, s, m = one.attention, one.feed_forward, other.self_attn, other.mlp
        pairs += [(one.attention_norm, other.input_layernorm), (one.feed_forward_norm, other.post_attention_layernorm)]
        pairs += [(a.query, s.q_proj), (a.key, s.k_proj), (a.value, s.v_proj), (a.output, s.o_proj)]
        pairs += [(f.gate, m.gate_proj), (f.up, m.up_proj), (f.down, m.down_proj)]
    pairs += [] if tied else [(ours.head, theirs.lm_head)]
    assert len(pairs) == len(list(ours.parameters())) == len(list(theirs.parameters()))
    with torch.no_grad():
        for mine, their in pairs:
            their.weight.copy_(mine.weight.normal_(std=0.1))
    tokens, targets = rows()
    loss = ours(tokens, targets)
    wanted = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, wanted.float(), rtol=1e-4, atol=1e-5)
    loss.backward()
    wanted.backward()
    for mine, their in pairs:
        torch.testing.assert_close(mine.weight.grad, their.weight.grad, rtol=1e-3, atol=1e-5)


def loss_and_gradients(dtype: torch.dtype, **changes: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = llama(replace(SMALL, **changes), dtype=dtype)
    loss = model(*rows())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_a_loss_in_pieces_and_checkpointed_layers_give_the_same_loss_and_gradients() -> None:
    whole, pieces = (loss_and_gradients(torch.float64, loss_tokens=count) for count in (1024, 20))
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other)
    plain, checkpointed = (loss_and_gradients(torch.float32, checkpointed_layers=count) for count in (0, 2))
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))


# -- the command

SHALLOW = replace(SIZES["tiny"], layers=2, context=64)


Call = Callable[..., Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    monkeypatch.setattr(train_llama, "SIZES", {"tiny": SHALLOW})
    app = typer.Typer()
    app.command()(train_llama.main)
    yield lambda *arguments: CliRunner().invoke(app, [*arguments], env={"COLUMNS": "300"})
    torch._dynamo.reset()


def test_a_budget_moves_tensors(call: Call, tmp_path: Path) -> None:
    tiers = ("--memory-budget", "84MiB", "--storage", str(tmp_path), "--codegen", "eager")
    outcome = call("--steps", "6", "--batch", "4", *tiers)
    assert outcome.exit_code == 0, outcome.output
    assert "profile" in outcome.output and "budget 84 MiB" in outcome.output
    for link in ("device->storage", "storage->device"):
        moved = next(line for line in outcome.output.splitlines() if link in line)
        assert not moved.endswith(" 0 MiB")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--memory-budget", "1MiB", "--storage", "/no/such/folder"), 1, "/no/such/folder is not a directory"),
        (("--size", "huge"), 2, "no size 'huge'; there are tiny"),
        (("--dtype", "int4"), 2, "dtype: Input should be 'float32' or 'bfloat16'"),
        (("--backend", "eager", "--memory-budget", "1GiB"), 2, "memory_budget: only the backend teraio"),
        (("--fsdp",), 2, "torchrun --nproc-per-node 2 -m examples.train_llama --fsdp"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], code: int, message: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What teraio refuses is one line."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    outcome = call(*arguments)
    assert outcome.exit_code == code and message in " ".join(outcome.output.split())
    assert code == 2 or outcome.output.startswith("OptionsError: ") and len(outcome.output.splitlines()) == 1
