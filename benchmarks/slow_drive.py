"""A worker whose drives are held to a rate: `python -m benchmarks.slow_drive`, see `examples.worker`."""

import os
import threading
import time
from collections.abc import Callable

from examples.worker import serve
from runtime.storage import Chunk, PosixStore, Slot

RATE = "BENCHMARK_DRIVE_BYTES_PER_SECOND"
"""The environment variable with the rate of each direction."""

MoveChunk = Callable[[PosixStore, Slot, Chunk, int], None]


def paced(move: MoveChunk, bytes_per_second: float) -> MoveChunk:
    """Return `move` held to a rate: chunks take their time one after the other, those of all threads and stores."""
    lock = threading.Lock()
    free_at = 0.0

    def move_slowly(store: PosixStore, slot: Slot, chunk: Chunk, address: int) -> None:
        nonlocal free_at
        with lock:
            free_at = ends = max(free_at, time.perf_counter()) + chunk.length_bytes / bytes_per_second
        move(store, slot, chunk, address)
        time.sleep(max(ends - time.perf_counter(), 0.0))

    return move_slowly


def hold_drives_to(bytes_per_second: float) -> None:
    """Let all stores in files of this process copy at this rate at the most, in each direction."""
    for name in ("write_chunk", "read_chunk"):
        setattr(PosixStore, name, paced(getattr(PosixStore, name), bytes_per_second))


if __name__ == "__main__":
    hold_drives_to(float(os.environ[RATE]))
    serve()
