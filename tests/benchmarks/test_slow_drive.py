"""Drives that are held to a rate: as fast as that at the most, and the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.slow_drive import hold_drives_to
from runtime.storage import PosixStore
from runtime.transfer import Engine

RATE = 2e7
"""Far below what any drive reaches here, page cache included."""


def test_both_directions_are_held_to_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write_chunk", "read_chunk"):
        monkeypatch.setattr(PosixStore, name, getattr(PosixStore, name))  # put back at the end
    hold_drives_to(RATE)
    store = PosixStore([tmp_path], budget_bytes=None)
    engine = Engine(store, threads=2, chunk_bytes=64 << 10)
    try:
        engine.verify(256 << 10)
        rates = engine.measure(1 << 20)
    finally:
        engine.close()
        store.close()
    assert 0 < rates.write_bytes_per_second < 1.5 * RATE and 0 < rates.read_bytes_per_second < 1.5 * RATE
