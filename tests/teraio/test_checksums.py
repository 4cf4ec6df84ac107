"""The options checksums and debug from end to end: what is damaged in a tier stops training, and otherwise nothing changes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import teraio
from planner import ChecksumError
from runtime.storage import Chunk, HostStore, PosixStore, Slot

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


# -- debug

STORES: dict[str, Any] = {"host": HostStore, "storage": PosixStore}


def losses_with_debug(tier: str, folder: Path, *, debug: bool) -> list[float]:
    where = {"host_budget": "64MiB"} if tier == "host" else {"storage": folder}
    return train({"memory_budget": "36MiB", "debug": debug, **where}, tier=tier)


def damage_what_is_read(monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    """One bit of each piece of a block; measurements get through, else the tier would not be used at all."""
    store = STORES[tier]
    read_chunk = store.read_chunk

    def read_and_damage(self: Any, slot: Slot, piece: Chunk, address: int) -> None:
        read_chunk(self, slot, piece, address)
        if "measurement" not in slot.name:
            ctypes.c_ubyte.from_address(address + piece.slot_offset_bytes).value ^= 1

    monkeypatch.setattr(store, "read_chunk", read_and_damage)


@pytest.mark.parametrize("tier", STORES)
def test_a_damaged_byte_stops_training(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage_what_is_read(monkeypatch, tier)
    with pytest.raises(ChecksumError, match=rf"block '.+' in .+ \({tier} tier\) from offset \d+ on came back different"):
        losses_with_debug(tier, tmp_path, debug=True)


@pytest.mark.parametrize("tier", STORES)
def test_without_damage_the_debug_mode_changes_nothing(tier: str, tmp_path: Path) -> None:
    assert losses_with_debug(tier, tmp_path, debug=True) == losses_with_debug(tier, tmp_path, debug=False)
