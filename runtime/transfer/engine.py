"""The migration engine: the two links between the device and a lower tier, over one store."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Literal

from planner.errors import StorageFullError, UnsupportedError
from runtime.storage import ALIGNMENT_BYTES, Checksums, DeviceMemory, HostMemory, Slot, Store, align_up
from runtime.transfer import measurement
from runtime.transfer.link import Link, OnDone, Ready, Transfer
from runtime.transfer.measurement import LinkRates

__all__ = ["Engine", "Link", "LinkRates", "OnDone", "Ready", "Transfer"]

_EXIT_SECONDS = 5.0
"""How long the interpreter's exit waits for pieces that are moving, in all."""

_BLOCKS = 8
"""A rate is measured over so many blocks in a row."""


class Engine:
    """Carries blocks between memory and the slots of `store`, in both directions at once. Safe from any
    thread.

    tier: what the store is; the links are called "device->storage" and "storage->device", or likewise with "host".
    memory: where the addresses point. checksums: check that what is read is what was written, see
    [Note: What a checksum covers]. threads: I/O threads of each direction and drive. chunk_bytes: the least that one of
    them moves at a time. stuck_after_seconds: a drive that needs longer for one piece does not answer any more, see
    `check`. Only the process that made it can use it, no forked child. The store stays the caller's: close it after the
    engine. Raises UnsupportedError for checksums of memory that the processor cannot read.
    """

    def __init__(
        self,
        store: Store,
        *,
        tier: Literal["storage", "host"] = "storage",
        memory: DeviceMemory | None = None,
        checksums: bool = False,
        threads: int = 4,
        chunk_bytes: int = 8 << 20,
        stuck_after_seconds: float = 120.0,
    ) -> None:
        self._store = store
        self._memory = memory or HostMemory()
        if checksums and not self._memory.on_host:
            raise UnsupportedError(
                "checksums are computed by the processor, which cannot read the memory that blocks are copied from here; "
                "leave the option checksums out"
            )
        self._checksums = Checksums(store) if checksums else None
        self._names = f"device->{tier}", f"{tier}->device"
        self._threads = threads
        self._chunk_bytes = align_up(chunk_bytes)
        self._stuck_after_seconds = stuck_after_seconds
        self.write_link, self.read_link = self._open_links()
        self.links = MappingProxyType({link.name: link for link in (self.write_link, self.read_link)})
        atexit.register(self._abandon)

    def write(self, slot: Slot, address: int, on_done: OnDone, ready: Ready | None = None) -> Transfer:
        """Queue a copy from memory to the slot, see `Link.submit`. Never blocks."""
        return self.write_link.submit(slot, address, on_done, ready)

    def read(self, slot: Slot, address: int, on_done: OnDone, ready: Ready | None = None) -> Transfer:
        """Queue a copy from the slot to memory, see `Link.submit`. Never blocks."""
        return self.read_link.submit(slot, address, on_done, ready)

    def forget_sums(self, slot: Slot) -> None:
        """Something else may have written to the slot: its checksums are void until it is written again."""
        if self._checksums is not None:
            self._checksums.forget(slot)

    def measure(self, size_bytes: int = 64 << 20) -> LinkRates:
        """Measure both links by real transfers of up to `size_bytes` each way; they count in no counter.
        Blocks.

        Takes as much memory meanwhile, and as much room in the store: less if there is none, but at least 1
        MiB. Meant for an idle engine. Raises StorageFullError, StorageIOError.
        """
        slots = self._slots_to_measure(size_bytes)
        try:
            with self._links_to_measure() as links:
                return measurement.measure(links, slots[:-1], slots[-1], self._memory)
        finally:
            for slot in slots:
                self._store.release(slot)

    def verify(self, size_bytes: int = 4 << 20) -> None:
        """Write so many random bytes, read them back and compare. Counts in no counter. Blocks.

        Takes room as `measure` does, and twice as much memory. Raises StorageError, also where no error was reported but
        bytes differ.
        """
        slots = self._slots_to_measure(size_bytes)
        try:
            with self._links_to_measure() as links:
                measurement.verify(links, slots, self._memory)
        finally:
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
        pieces = self._checksums or self._store
        write, read = (
            Link(
                name,
                move,
                drives=self._store.drives,
                threads=self._threads,
                piece_bytes=self._chunk_bytes,
                stuck_after_seconds=self._stuck_after_seconds,
            )
            for name, move in zip(self._names, (pieces.write_piece, pieces.read_piece), strict=True)
        )
        return write, read

    @contextmanager
    def _links_to_measure(self) -> Iterator[tuple[Link, Link]]:
        with ExitStack() as last:
            links = self._open_links()
            for link in links:
                last.callback(link.close)
            yield links

    def _abandon(self) -> None:
        """At exit: no thread may be moving bytes while the interpreter goes away, but nobody waits for the
        queue."""
        links = (self.write_link, self.read_link)
        threads = sum(link.thread_count for link in links)
        for link in links:
            link.close(drop_queued=True, timeout_seconds=_EXIT_SECONDS / threads)

    def _slots_to_measure(self, size_bytes: int) -> list[Slot]:
        """Equal slots that add up to `size_bytes`, or to less if there is no room, and one of a page."""
        size = align_up(size_bytes // _BLOCKS)
        while True:
            slots: list[Slot] = []
            try:
                for number in range(_BLOCKS):
                    slots.append(self._store.allocate(size, f"measurement {number}"))
                return [*slots, self._store.allocate(ALIGNMENT_BYTES, "measurement")]  # all of it content, to be compared
            except StorageFullError:
                for slot in slots:
                    self._store.release(slot)
                if size * _BLOCKS <= 1 << 20:
                    raise
                size = align_up(size // 2)
