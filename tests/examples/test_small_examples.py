"""The examples for diffusion, LoRA and reinforcement learning: each trains within its budget, and does what its page says."""

import re
from collections.abc import Iterator
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from examples import diffusion, lora, reinforce

from ..training import forget

ROW = r"(?:loss|reward) (\d\.\d+)"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    forget()
    yield
    forget()


def said(example: ModuleType, arguments: str) -> str:
    app = typer.Typer()
    app.command()(example.main)
    outcome = CliRunner().invoke(app, [*arguments.split(), "--codegen", "eager"])
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    return outcome.output


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_a_diffusion_transformer_learns_within_its_budget() -> None:
    text = said(diffusion, "--memory-budget 48MiB --layers 1 --batch 4 --steps 6")
    losses = numbers(ROW, text)
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert numbers(r"at most (\d+) MiB on the device", text)[0] <= 48 and numbers(r"(\d+) MiB moved", text)[0] > 0


def test_lora_trains_a_model_that_is_larger_than_the_device() -> None:
    text = said(lora, "--memory-budget 28MiB --layers 3 --batch 1 --steps 3")
    (weights,), (held,) = numbers(r"weights of (\d+)", text), numbers(r"at most (\d+) MiB on the device", text)
    assert held <= 28 < weights and len(numbers(ROW, text)) == 3
    assert numbers(r"(\d+) MiB read", text)[0] > weights


def test_the_device_is_the_sampler_s_while_it_samples() -> None:
    text = said(reinforce, "--memory-budget 56MiB --layers 1 --context 4 --rounds 2 --updates 1")
    assert numbers(r"(\d+) MiB left", text)[-1] > 8 and len(numbers(ROW, text)) == 2
    assert numbers(r"at most (\d+) MiB on the device", text)[0] <= 56
