"""A link that is held to a rate: as fast as that at the most, and the same bytes."""

from __future__ import annotations

from pathlib import Path

from runtime.storage.posix import PosixStore
from runtime.transfer.engine import Engine

RATE = 2e7
"""Far below what any drive reaches here, page cache included."""


def test_an_engine_with_a_limit(tmp_path: Path) -> None:
    store = PosixStore([tmp_path], budget_bytes=None)
    engine = Engine(store, threads=2, chunk_bytes=64 << 10, limit_bytes_per_second=RATE)
    try:
        engine.verify(256 << 10)
        rates = engine.measure(1 << 20)
    finally:
        engine.close()
        store.close()
    assert 0 < rates.write_bytes_per_second < 1.5 * RATE and 0 < rates.read_bytes_per_second < 1.5 * RATE
