"""The migration engine: the two links between the device and a lower tier, over one store."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch

from planner.errors import UnsupportedError
from runtime.storage import Checksums, Chunk, ChunkIO, FileDiffers, Slot, Store, UnchangedChunks, align_up
from runtime.transfer import measurement
from runtime.transfer.link import Link, OnDone, Ready, Transfer
from runtime.transfer.measurement import LinkRates, TorchMemory

_EXIT_SECONDS = 5.0  # how long the exit of the interpreter waits for chunks that are moving, over all threads


class Engine:
    """Copies blocks between memory and the slots of `store`, in both directions at once. Safe from any thread.

    tier: the tier of the store. The links are called "device->storage" and "storage->device", or likewise with "host".
    memory: the memory that the addresses point to, by default main memory.
    checksums: check that every block is read as it was written, see [Note: What a checksum covers].
    unchanged: do not write what a slot holds already, see [Note: Writes that change nothing].
    threads: I/O threads per direction and drive.
    chunk_bytes: the smallest number of bytes that a thread copies at a time.
    stuck_after_seconds: if a drive needs longer for one chunk, it no longer answers, see `check`.
    chunk_io: copies single chunks in the thread that calls, checked as all others.

    Only the process that made the engine can use it, not a forked child. The caller owns the store: close it after the engine.
    Raises UnsupportedError for checksums of memory that the processor cannot read; `unchanged` does nothing there.
    """

    def __init__(
        self,
        store: Store,
        *,
        tier: Literal["storage", "host"] = "storage",
        memory: TorchMemory | None = None,
        checksums: bool = False,
        unchanged: bool = False,
        threads: int = 4,
        chunk_bytes: int = 8 << 20,
        stuck_after_seconds: float = 120.0,
    ) -> None:
        self._store = store
        self._memory = memory or TorchMemory(torch.device("cpu"))
        if checksums and not self._memory.on_host:
            raise UnsupportedError(
                "checksums are computed by the processor, which cannot read the memory that blocks are copied from here; "
                "leave the option checksums out"
            )
        self._checksums = Checksums(store.write_chunk, store.read_chunk) if checksums else None
        self.chunk_io: ChunkIO = self._checksums or store
        self._unchanged = UnchangedChunks(self.chunk_io.read_chunk) if unchanged and self._memory.on_host else None
        self._names = f"device->{tier}", f"{tier}->device"
        self._link = partial(
            Link,
            drives=store.drives,
            threads=threads,
            chunk_bytes=align_up(chunk_bytes),
            stuck_after_seconds=stuck_after_seconds,
        )
        self.write_link, self.read_link = self._open_links()
        self.links = MappingProxyType({link.name: link for link in (self.write_link, self.read_link)})
        atexit.register(self._abandon)

    def write(self, slot: Slot, address: int, on_done: OnDone, ready: Ready | None = None) -> Transfer:
        """Queue a copy from memory to the slot, see `Link.submit`. Never waits.

        A slot in a file of the user is only compared with the memory. The transfer fails with FileDiffers if they differ.
        """
        return self.write_link.submit(slot, address, on_done, ready)

    def read(self, slot: Slot, address: int, on_done: OnDone, ready: Ready | None = None) -> Transfer:
        """Queue a copy from the slot to memory, see `Link.submit`. Never waits."""
        return self.read_link.submit(slot, address, on_done, ready)

    def forget_sums(self, slot: Slot) -> None:
        """Drop the checksums of a slot that something else may have written to. It has none until it is written again."""
        if self._checksums is not None:
            self._checksums.forget(slot)

    def watch(self, slot: Slot, *, unchanged: bool) -> None:
        """Call before a write of the slot. unchanged: the memory probably holds what the slot holds; if False, it does not."""
        if self._unchanged is None:
            return
        if unchanged:
            self._unchanged.watch(slot)
        else:
            self._unchanged.forget(slot)

    def serve(self, slot: Slot) -> None:
        """Call once for a slot in a file of the user, before it is read: its drive may be another one than those of the store."""
        self.watch(slot, unchanged=True)
        for link in self.links.values():
            for extent in slot.extents:
                link.add_drive(extent.drive)

    def measure(self, size_bytes: int = 64 << 20) -> LinkRates:
        """Measure both links by real transfers of up to `size_bytes` each way, which no counter counts.

        Waits until all transfers have ended; the engine should be idle. Takes `size_bytes` of memory and of the store during
        that time, or less if the store has less, but at least 1 MiB. Raises StorageFullError, StorageIOError.
        """
        with self._trial(size_bytes) as (links, slots):
            return measurement.measure(links, slots, self._memory)

    def verify(self, size_bytes: int = 4 << 20) -> None:
        """Write `size_bytes` random bytes, read them back and compare. No counter counts them.

        Waits until both transfers have ended. Takes bytes of the store as `measure` does, and twice as much memory.
        Raises StorageError if the store reports an error, or if bytes differ.
        """
        with self._trial(size_bytes) as (links, slots):
            measurement.verify(links, slots, self._memory)

    def check(self) -> None:
        """Raise StorageIOError if a drive has not answered for `stuck_after_seconds`. Never waits."""
        self.write_link.check()
        self.read_link.check()

    def close(self) -> None:
        """Wait until everything that was submitted has ended, and stop the threads. May be called again.

        Raises StorageError if an `on_done` has raised and nobody was told yet, or if a drive does not answer.
        """
        atexit.unregister(self._abandon)
        try:
            self.write_link.close()
        finally:
            self.read_link.close()

    def _open_links(self) -> tuple[Link, Link]:
        read_chunk = self.chunk_io.read_chunk if self._unchanged is None else self._unchanged.read_chunk
        outward, inward = self._names
        return self._link(outward, self.chunk_io.write_chunk, is_there=self._is_there), self._link(inward, read_chunk)

    def _is_there(self, slot: Slot, chunk: Chunk, address: int) -> bool:
        """Whether a slot holds the bytes of a chunk already. Raises FileDiffers where it must, since it is in the user's file."""
        if self._unchanged is not None and self._unchanged.holds(slot, chunk, address):
            return True
        if slot.file is None:
            return False
        if slot.file.holds(slot, chunk, address, self._memory.bytes_at):
            return True
        raise FileDiffers(f"block {slot.name!r} differs from its file")

    @contextmanager
    def _trial(self, size_bytes: int) -> Iterator[tuple[tuple[Link, Link], list[Slot]]]:
        """Yield links of their own, which count for nobody, and slots to copy from and to."""
        with ExitStack() as last:
            slots = measurement.slots_to_measure(self._store, size_bytes)
            for slot in slots:
                last.callback(self._store.release, slot)
            links = self._open_links()
            for link in links:  # closed first: nothing moves when the slots are released
                last.callback(link.close)
            yield links, slots

    def _abandon(self) -> None:
        """Wait at exit until no thread is moving bytes, and drop what is queued."""
        # The interpreter goes next, with the memory that threads read and write.
        links = (self.write_link, self.read_link)
        threads = sum(link.thread_count for link in links)
        for link in links:
            link.close(drop_queued=True, timeout_seconds=_EXIT_SECONDS / threads)
