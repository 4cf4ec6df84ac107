"""The migration engine: a queue and I/O threads for each direction between the device and the storage
tier."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from planner.errors import StorageFullError
from runtime.storage.link import Link, Transfer
from runtime.storage.store import Slot, Store, align_up

__all__ = ["Engine", "Link", "LinkRates", "Transfer"]

WRITE, READ = "device->storage", "storage->device"
_EXIT_SECONDS = 5.0
"""How long the interpreter's exit waits for pieces that are moving, in all."""

_LATENCY_TRIALS = 9
_RATE_TRIALS = 3
_BLOCKS = 8
"""A rate is measured over so many blocks in a row."""

OnDone = Callable[[Transfer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What the two links carry. Rates: each direction alone; `duplex_...`: while the other one is busy too.

    A latency is what one block of one page takes from submission to its end.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    write_latency_seconds: float
    read_latency_seconds: float
    duplex_write_bytes_per_second: float
    duplex_read_bytes_per_second: float


class Engine:
    """Carries blocks between memory and the slots of `store`, in both directions at once. Safe from any
    thread.

    threads: I/O threads of each direction. chunk_bytes: the least that one of them moves at a time.
    stuck_after_seconds: a drive that needs longer for one piece does not answer any more, see `check`. Only the
    process that made it can use it, no forked child. The store stays the caller's: close it after the engine.
    """

    def __init__(
        self, store: Store, *, threads: int = 4, chunk_bytes: int = 8 << 20, stuck_after_seconds: float = 120.0
    ) -> None:
        self._store = store
        self._threads = threads
        self._chunk_bytes = align_up(chunk_bytes)
        self._stuck_after_seconds = stuck_after_seconds
        self.write_link, self.read_link = self._open_links()
        self.links = MappingProxyType({WRITE: self.write_link, READ: self.read_link})
        atexit.register(self._abandon)

    def write(self, slot: Slot, address: int, on_done: OnDone) -> Transfer:
        """Queue a copy from memory to storage, see `Link.submit`. Never blocks."""
        return self.write_link.submit(slot, address, on_done)

    def read(self, slot: Slot, address: int, on_done: OnDone) -> Transfer:
        """Queue a copy from storage to memory, see `Link.submit`. Never blocks."""
        return self.read_link.submit(slot, address, on_done)

    def measure(self, size_bytes: int = 64 << 20) -> LinkRates:
        """Measure both links by real transfers of up to `size_bytes` each way; they count in no counter.
        Blocks.

        Takes as much memory meanwhile, and as much room in the store: less if there is none, but at least 1
        MiB. Meant for an idle engine. Raises StorageFullError, StorageIOError.
        """
        slots = self._slots_to_measure(size_bytes)
        links = self._open_links()
        try:
            return _measure(*links, slots[:-1], slots[-1])
        finally:
            for link in links:
                link.close()
            for slot in slots:
                self._store.release(slot)

    def check(self) -> None:
        """Raises StorageIOError if a drive has not answered for `stuck_after_seconds`. Never blocks."""
        self.write_link.check()
        self.read_link.check()

    def close(self) -> None:
        """Wait until everything that was submitted has ended, and stop the threads. Blocks. May be called
        again.

        Raises StorageError if something went wrong of which nobody has been told yet, or a drive does not answer.
        """
        atexit.unregister(self._abandon)
        try:
            self.write_link.close()
        finally:
            self.read_link.close()

    def _open_links(self) -> tuple[Link, Link]:
        size, stuck = self._chunk_bytes, self._stuck_after_seconds
        return (
            Link(WRITE, self._store.write_piece, threads=self._threads, piece_bytes=size, stuck_after_seconds=stuck),
            Link(READ, self._store.read_piece, threads=self._threads, piece_bytes=size, stuck_after_seconds=stuck),
        )

    def _abandon(self) -> None:
        """At exit: no thread may be moving bytes while the interpreter goes away, but nobody waits for the
        queue."""
        threads = 2 * self._threads
        for link in (self.write_link, self.read_link):
            link.close(drop_queued=True, timeout_seconds=_EXIT_SECONDS / threads)

    def _slots_to_measure(self, size_bytes: int) -> list[Slot]:
        """Equal slots that add up to `size_bytes`, or to less if there is no room, and one of a page."""
        size = align_up(size_bytes // _BLOCKS)
        while True:
            slots: list[Slot] = []
            try:
                for number in range(_BLOCKS):
                    slots.append(self._store.allocate(size, f"measurement {number}"))
                return [*slots, self._store.allocate(1, "measurement")]
            except StorageFullError:
                for slot in slots:
                    self._store.release(slot)
                if size * _BLOCKS <= 1 << 20:
                    raise
                size = align_up(size // 2)


def _measure(write: Link, read: Link, slots: list[Slot], small: Slot) -> LinkRates:
    with mmap.mmap(-1, sum(slot.size_bytes for slot in slots)) as memory:
        for offset in range(0, len(memory), 1 << 20):
            memory[offset : offset + (1 << 20)] = os.urandom(min(1 << 20, len(memory) - offset))
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(start)
        try:
            _finish_times(
                [(write, slots)], address
            )  # the first write of an extent costs more than all later ones
            write_rate = _rate(write, slots, address)
            read_rate = _rate(read, slots, address)
            duplex_write, duplex_read = _duplex_rates((write, read), (write_rate, read_rate), slots, address)
            return LinkRates(
                write_bytes_per_second=write_rate,
                read_bytes_per_second=read_rate,
                write_latency_seconds=_latency(write, small, address),
                read_latency_seconds=_latency(read, small, address),
                duplex_write_bytes_per_second=duplex_write,
                duplex_read_bytes_per_second=duplex_read,
            )
        finally:
            del start  # else the memory could not be closed


def _finish_times(work: Sequence[tuple[Link, Sequence[Slot]]], address: int) -> list[float]:
    """Move blocks over several links at once, one after the other in memory. Seconds until each link was
    done."""
    begun = time.perf_counter()
    ends: list[float] = []
    transfers: list[Transfer] = []
    for index, (link, slots) in enumerate(work):
        ends.append(0.0)

        def ended(transfer: Transfer, index: int = index) -> None:
            ends[index] = max(ends[index], time.perf_counter() - begun)

        for slot in slots:
            transfers.append(link.submit(slot, address, ended))
            address += slot.size_bytes
    for transfer in transfers:
        transfer.wait()
    return ends


def _rate(link: Link, slots: Sequence[Slot], address: int) -> float:
    size = sum(slot.size_bytes for slot in slots)
    return size / median(_finish_times([(link, slots)], address)[0] for _ in range(_RATE_TRIALS))


def _latency(link: Link, slot: Slot, address: int) -> float:
    return median(_finish_times([(link, [slot])], address)[0] for _ in range(_LATENCY_TRIALS))


def _duplex_rates(
    links: tuple[Link, Link], rates: tuple[float, float], slots: Sequence[Slot], address: int
) -> tuple[float, float]:
    """Rates of both links while both are busy.

    One of them ends first; what the other carries after that, it carries at its own full rate.
    """
    half = len(slots) // 2
    work = list(zip(links, (slots[:half], slots[half:]), strict=True))
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(_RATE_TRIALS):
        ends = _finish_times(work, address)
        shared = min(ends)
        for index, end in enumerate(ends):
            size = sum(slot.size_bytes for slot in work[index][1])
            together = size - rates[index] * (end - shared)
            # `rates` are measurements too: half of the average is the least that is believed.
            found[index].append(max(together / shared, size / end / 2))
    return median(found[0]), median(found[1])
