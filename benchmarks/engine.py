"""The migration engine, with and without checksums, compared with raw direct I/O: the same bytes, files and number of threads."""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.results import Figure
from benchmarks.turns import Scale
from runtime.storage import PosixStore, Slot
from runtime.transfer import Engine, Transfer

SLOT_BYTES = 32 << 20
SLOTS = 16
CHUNK_BYTES = 8 << 20
THREADS = 4
DIRECTIONS = ("device->storage", "storage->device")

Timed = Callable[[str], float]


def raw(slots: Sequence[Slot], address: int, pool: ThreadPoolExecutor) -> Timed:
    """Return a function that times pread or pwrite calls of CHUNK_BYTES over the extents of the slots, to or from `address`."""

    def transfer(task: tuple[str, int, int, int, int]) -> None:
        direction, descriptor, offset, place, length = task
        buffer = (ctypes.c_char * length).from_address(place)
        call = os.pwritev if direction == DIRECTIONS[0] else os.preadv
        if call(descriptor, [buffer], offset) != length:
            raise OSError(f"a transfer of {length} bytes was cut short")

    def timed(direction: str) -> float:
        tasks = []
        place = address
        for slot in slots:
            for extent in slot.extents:
                for start in range(0, extent.length_bytes, CHUNK_BYTES):
                    length = min(CHUNK_BYTES, extent.length_bytes - start)
                    tasks.append((direction, extent.file_descriptor, extent.offset_bytes + start, place, length))
                    place += length
        started = time.perf_counter()
        list(pool.map(transfer, tasks))
        return time.perf_counter() - started

    return timed


def through(engine: Engine, slots: Sequence[Slot], address: int) -> Timed:
    """Return a function that times the same bytes through the engine: it queues all of them, then waits."""

    def ended(transfer: Transfer) -> None:
        pass  # `Transfer.wait` raises its error

    def timed(direction: str) -> float:
        submit = engine.write if direction == DIRECTIONS[0] else engine.read
        places = range(address, address + SLOT_BYTES * len(slots), SLOT_BYTES)
        started = time.perf_counter()
        transfers = [submit(slot, place, ended) for slot, place in zip(slots, places, strict=True)]
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - started

    return timed


@contextmanager
def store_and_memory(folder: Path) -> Iterator[tuple[PosixStore, list[Slot], int]]:
    """Yield a store in `folder`, SLOTS slots of SLOT_BYTES, and the address of as much memory."""
    total = SLOT_BYTES * SLOTS
    memory = mmap.mmap(-1, total)
    memory.write(os.urandom(1 << 20) * (total >> 20))
    store = PosixStore([folder], budget_bytes=None)
    try:
        slots = [store.allocate(SLOT_BYTES, f"benchmark {index}") for index in range(SLOTS)]
        yield store, slots, ctypes.addressof(ctypes.c_char.from_buffer(memory))
    finally:
        store.close()


def measure(scale: Scale) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return the bytes per second of both in each direction, measured in turns, and their ratio."""
    total = SLOT_BYTES * SLOTS
    samples: dict[str, list[float]] = {}
    with store_and_memory(scale.output) as (store, slots, address), ThreadPoolExecutor(THREADS) as pool:
        engines = {"engine": Engine(store, threads=THREADS), "checksums": Engine(store, threads=THREADS, checksums=True)}
        ways = {"raw": raw(slots, address, pool)} | {name: through(each, slots, address) for name, each in engines.items()}
        for turn in range(scale.rounds + 2):
            for direction in DIRECTIONS:
                for way in sorted(ways, reverse=bool(turn % 2)):
                    seconds = ways[way](direction)
                    if turn:  # the first turn allocates the file's blocks
                        samples.setdefault(f"{way} {direction}", []).append(total / seconds)
        for engine in engines.values():
            engine.close()
        direct = "direct I/O" if store.direct else "buffered: this file system refuses direct I/O"
    figures = []
    for direction in DIRECTIONS:
        rates = {way: median(samples[f"{way} {direction}"]) for way in ways}
        for way, rate in rates.items():
            figures.append(Figure(name=f"{way}, {direction}", value=rate / 1e9, unit="GB/s", note=direct))
        figures += [
            Figure(name=f"engine / raw, {direction}", value=rates["engine"] / rates["raw"], unit="", aim=">= 0.90"),
            Figure(name=f"checksums / engine, {direction}", value=rates["checksums"] / rates["engine"], unit=""),
        ]
    return tuple(figures), samples
