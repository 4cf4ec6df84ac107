"""The option debug from end to end, on CPU: what is lost in any tier stops training, and otherwise nothing changes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from planner import ChecksumError
from runtime.storage import Chunk, HostStore, PosixStore, Slot

from .test_checksums import train

STORES: dict[str, Any] = {"host": HostStore, "storage": PosixStore}


def losses(tier: str, folder: Path, *, debug: bool) -> list[float]:
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
        losses(tier, tmp_path, debug=True)


@pytest.mark.parametrize("tier", STORES)
def test_without_damage_the_debug_mode_changes_nothing(tier: str, tmp_path: Path) -> None:
    assert losses(tier, tmp_path, debug=True) == losses(tier, tmp_path, debug=False)
