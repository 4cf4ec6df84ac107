"""The option checksums from end to end: damaged spill files stop training, undamaged ones change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import teraio
from planner import ChecksumError

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


def train(damage: bool, options: dict[str, object]) -> list[float]:
    """Losses; where `damage`, all spill files change between forward and backward."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Chain()
    compiled = torch.compile(model, backend="teraio", options={"codegen": "eager", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(16384, 64)
    losses = []
    for _ in range(STEPS):
        loss = compiled(batch)
        if damage:
            flip_a_bit_of_every_page()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if options:
        (status,) = teraio.status()
        assert status.moved_bytes["storage->device"] > 8 << 20
    teraio.reset()
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
    return {"memory_budget": "36MiB", "storage": tmp_path}


def test_a_damaged_spill_file_stops_training(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ChecksumError, match="came back different") as raised:
        train(True, {**options, "checksums": True})
    assert raised.value.path.startswith(str(tmp_path))


def test_without_damage_checksums_change_nothing_and_without_checksums_nobody_hears_of_damage(
    options: dict[str, object],
) -> None:
    expected = train(False, {})
    assert train(False, {**options, "checksums": True}) == expected
    assert train(True, options) != expected
