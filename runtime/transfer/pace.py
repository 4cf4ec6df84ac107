"""Holds a link to a rate, so that benchmarks can measure a slower drive than the machine has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from runtime.storage import Chunk, Slot

MoveChunk = Callable[[Slot, Chunk, int], None]


class Pace:
    """Calls `move` for chunks, all together at `bytes_per_second` at the most. For any number of threads."""

    def __init__(self, move: MoveChunk, bytes_per_second: float) -> None:
        self._move = move
        self._seconds_per_byte = 1.0 / bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __call__(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Move a chunk, and wait until its time is over: chunks take theirs one after the other."""
        with self._lock:
            ends = max(self._free_at, time.perf_counter()) + chunk.length_bytes * self._seconds_per_byte
            self._free_at = ends
        self._move(slot, chunk, address)
        time.sleep(max(ends - time.perf_counter(), 0.0))
