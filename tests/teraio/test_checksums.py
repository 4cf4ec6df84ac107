"""The option checksums from end to end: damaged spill files stop training, undamaged ones change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import teraio
from planner import ChecksumError

from ..training import begin

STEPS = 2


class Chain(nn.Module):
    """Activations of 4 MiB each, which only teraio knows of, between small weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def train(options: Mapping[str, Any], *, tier: str | None = None, meanwhile: Callable[[], None] = lambda: None) -> list[float]:
    """Return the losses. tier: where blocks must come from. meanwhile: called between forward and backward."""
    training = begin(
        Chain, lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)], {**options, "unlink_spill_files": False}
    )
    losses: list[float] = []

    def step(batch: torch.Tensor, index: int) -> None:
        loss = training.model(batch)
        meanwhile()
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    training.run(itertools.repeat(torch.randn(16384, 64), STEPS), step)
    training.finish()
    if tier is not None:
        (status,) = training.progress[-1]
        assert status.moved_bytes[f"{tier}->device"] > 8 << 20
    return losses


def flip_a_bit_of_every_page() -> None:
    (status,) = teraio.status()
    for directory in status.spill_directories:
        (path,) = Path(directory).glob("*.spill")
        with open(path, "r+b") as file:
            content = bytearray(file.read())
            for place in range(3, len(content), 4096):  # signs of numbers
                content[place] ^= 0x80
            file.seek(0)
            file.write(content)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    return {"memory_budget": "30MiB", "storage": tmp_path}


def test_a_damaged_spill_file_stops_training(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ChecksumError, match="came back different") as raised:
        train({**options, "checksums": True}, meanwhile=flip_a_bit_of_every_page)
    assert raised.value.path.startswith(str(tmp_path))


def test_a_warning_says_what_cannot_be_checked(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("teraio.machine.cpu.system_tells", lambda: False)
    train({**options, "checksums": True})
    assert "no byte of parameters, gradients and optimizer states is checked" in caplog.text


def test_without_damage_checksums_change_nothing_and_without_checksums_nobody_hears_of_damage(
    options: dict[str, object],
) -> None:
    expected = train({})
    assert train({**options, "checksums": True}, tier="storage") == expected
    assert train(options, tier="storage", meanwhile=flip_a_bit_of_every_page) != expected
