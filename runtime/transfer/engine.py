"""The migration engine: the two links between the device and a lower tier, over one store; and how it measures them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import torch

from planner.errors import StorageError, StorageFullError, UnsupportedError
from runtime.storage import ALIGNMENT_BYTES, Checksums, Chunk, ChunkIO, Slot, Store, UnchangedChunks, align_up, compare_file
from runtime.transfer.link_queue import Link, Transfer

_EXIT_SECONDS = 5.0  # how long the exit of the interpreter waits for chunks that are moving, over all threads


class Engine:
    """Copies blocks between memory and the slots of `store`, in both directions at once. Safe from any thread.

    The links are called "device->storage" and "storage->device", or likewise with "host".
    memory: the memory that the addresses point to, by default main memory.
    checksums: check that every block is read as it was written, see [Note: What a checksum covers].
    unchanged: do not write what a slot holds already, see [Note: Writes that change nothing].
    threads: I/O threads per direction and drive.
    chunk_bytes: the smallest number of bytes that a thread copies at a time.
    stuck_after_seconds: if a drive needs longer for one chunk, it no longer answers, see `check`.
    chunk_io: copies single chunks in the thread that calls, checked as all others.
    write, read: queue a copy from memory to a slot, or back, see `Link.submit`. A slot in a file of the user is only compared
    with the memory: the transfer fails with FileDiffers if they differ.

    Only the process that made the engine can use it, not a forked child. The caller owns the store: close it after the engine.
    Raises UnsupportedError for checksums of memory that the processor cannot read; `unchanged` does nothing there.
    """

    def __init__(
        self,
        store: Store,
        *,
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
        self._link = partial(
            Link,
            drives=store.drives,
            threads=threads,
            chunk_bytes=align_up(chunk_bytes),
            stuck_after_seconds=stuck_after_seconds,
        )
        self.write_link, self.read_link = self._open_links()
        self.write, self.read = self.write_link.submit, self.read_link.submit
        self.links = MappingProxyType({link.name: link for link in (self.write_link, self.read_link)})
        atexit.register(self._abandon)

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
        """Measure both links by real transfers of up to `size_bytes` each way, which no counter counts: rates over several
        slots, one after the other, and latencies of a slot of one page. The device works meanwhile, see `TorchMemory`.

        Waits until all transfers have ended; the engine should be idle. Takes `size_bytes` of memory and of the store during
        that time, or less if the store has less, but at least 1 MiB. Raises StorageFullError, StorageIOError.
        """
        with self._trial(size_bytes) as (links, (*slots, small)):
            size = sum(slot.size_bytes for slot in slots)
            buffer = self._memory.allocate(size)
            address = buffer.data_ptr()
            with self._memory.load():
                for offset in range(0, size, _FILL_BYTES):
                    buffer[offset : offset + _FILL_BYTES].copy_(_random_bytes(min(_FILL_BYTES, size - offset)))
                _finish_times([(links[0], slots)], address)  # the first write of an extent takes longer than all later ones
                rates = [size / _median_seconds(link, slots, address, _RATE_TRIALS) for link in links]
                duplex = _duplex_rates(links, rates, slots, address)
                latencies = [_median_seconds(link, [small], address, _LATENCY_TRIALS) for link in links]
                return LinkRates(*map(OneWay, rates, latencies, duplex))

    def verify(self, size_bytes: int = 4 << 20) -> None:
        """Write `size_bytes` random bytes, read them back and compare. No counter counts them.

        Waits until both transfers have ended. Takes bytes of the store as `measure` does, and twice as much memory.
        Raises StorageError if the store reports an error, or if bytes differ.
        """
        with self._trial(size_bytes) as ((write, read), slots):
            size = sum(slot.size_bytes for slot in slots)
            content, buffer = _random_bytes(size), self._memory.allocate(2 * size)
            buffer[:size].copy_(content)
            _finish_times([(write, slots)], buffer.data_ptr())
            _finish_times([(read, slots)], buffer.data_ptr() + size)
            if not torch.equal(buffer[size:].cpu(), content):
                places = ", ".join(sorted({str(extent.path) for slot in slots for extent in slot.extents}))
                raise StorageError(
                    f"{size:,} bytes that were written to {places} came back different; check the drives, or give another "
                    "storage directory"
                )

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
        tier = self._store.tier
        return self._link(f"device->{tier}", self._write_chunk), self._link(f"{tier}->device", read_chunk)

    def _write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> bool:
        """Write a chunk, unless the slot holds its bytes already. Return whether it was written. Raises FileDiffers where the
        slot must hold them, since it is in the user's file.
        """
        if self._unchanged is not None and self._unchanged.holds(slot, chunk, address):
            return False
        if slot.file is not None:
            compare_file(slot.file, slot, chunk, address, self._memory.bytes_at)
            return False
        self.chunk_io.write_chunk(slot, chunk, address)
        return True

    @contextmanager
    def _trial(self, size_bytes: int) -> Iterator[tuple[tuple[Link, Link], list[Slot]]]:
        """Yield links of their own, which count for nobody, and slots to copy from and to."""
        with ExitStack() as last:
            slots = _slots_to_measure(self._store, size_bytes)
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
            link.close(within_seconds=_EXIT_SECONDS / threads)


# -- measuring

_MEASURED_BLOCKS = 8  # a rate is measured over so many blocks, one after the other
_LATENCY_TRIALS = 9
_RATE_TRIALS = 3
_FILL_BYTES = 1 << 20


class OneWay(NamedTuple):
    """Rate and latency of one link while the other is idle, and its rate while both are busy.

    The latency is the time from the submission of a block of one page to its end.
    """

    bytes_per_second: float
    latency_seconds: float
    duplex_bytes_per_second: float


class LinkRates(NamedTuple):
    """Those of the two links. write: of copies from the device; read: of copies to it."""

    write: OneWay
    read: OneWay

    def __str__(self) -> str:
        alone, both = ([each[at] / 1e9 for each in self] for at in (0, 2))
        return f"writes {alone[0]:.2f} GB/s, reads {alone[1]:.2f} GB/s, both at once {both[0]:.2f} and {both[1]:.2f}"


def _slots_to_measure(store: Store, size_bytes: int) -> list[Slot]:
    """Return equal slots that add up to `size_bytes`, or to less if the store is nearly full, and a last one of a page.

    Raises StorageFullError if there is less room than 1 MiB.
    """
    size = align_up(size_bytes // _MEASURED_BLOCKS)
    while True:
        slots: list[Slot] = []
        try:
            for number in range(_MEASURED_BLOCKS):
                slots.append(store.allocate(size, f"measurement {number}"))
            return [*slots, store.allocate(ALIGNMENT_BYTES, "measurement")]  # full pages, which `verify` compares
        except StorageFullError:
            for slot in slots:
                store.release(slot)
            if size * _MEASURED_BLOCKS <= 1 << 20:
                raise
            size = align_up(size // 2)


def _random_bytes(size_bytes: int) -> torch.Tensor:
    # A copy from pageable memory returns when it has ended, so other streams and drives may read the bytes then.
    return torch.frombuffer(bytearray(os.urandom(size_bytes)), dtype=torch.uint8)


def _finish_times(work: Sequence[tuple[Link, Sequence[Slot]]], address: int) -> list[float]:
    """Move blocks over several links at once. The blocks follow each other in memory.

    Return for each link the seconds until it was done.
    """
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


def _median_seconds(link: Link, slots: Sequence[Slot], address: int, trials: int) -> float:
    return median(_finish_times([(link, slots)], address)[0] for _ in range(trials))


def _duplex_rates(links: tuple[Link, Link], rates: Sequence[float], slots: Sequence[Slot], address: int) -> tuple[float, float]:
    """Return the rates of both links while both are busy."""
    half = len(slots) // 2
    work = list(zip(links, (slots[:half], slots[half:]), strict=True))
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(_RATE_TRIALS):
        ends = _finish_times(work, address)
        shared = min(ends)  # from then on the other one moves bytes at the rate that it has alone
        for index, end in enumerate(ends):
            size = sum(slot.size_bytes for slot in work[index][1])
            together = size - rates[index] * (end - shared)
            # `rates` are measured too, so the result may be wrong: return at least half of the average rate.
            found[index].append(max(together / shared, size / end / 2))
    return median(found[0]), median(found[1])


class TorchMemory:
    """The memory of `device`: the addresses that an engine is given point there.

    on_host: whether the processor can read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_host = device.type == "cpu"

    def load(self) -> AbstractContextManager[None]:
        """Within, the device works as it will while blocks move. A store is measured so. This one does nothing."""
        return contextlib.nullcontext()

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Return a copy of memory that is ready. For any thread. This one is of main memory only."""
        return ctypes.string_at(address, size_bytes)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return aligned memory. Raises StorageError if there is none."""
        try:
            return aligned(lambda size: torch.empty(size, dtype=torch.uint8, device=self._device), size_bytes)
        except torch.OutOfMemoryError as error:
            raise StorageError(
                f"{self._device} has no {size_bytes:,} bytes free to try the storage path with; free memory there before the "
                "model is compiled"
            ) from error


def aligned(make: Callable[[int], torch.Tensor], size_bytes: int) -> torch.Tensor:
    """Return a tensor of bytes that begins at a multiple of ALIGNMENT_BYTES. make: returns one that may begin anywhere."""
    tensor = make(size_bytes)
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        tensor = make(size_bytes + ALIGNMENT_BYTES)
    skipped = -tensor.data_ptr() % ALIGNMENT_BYTES
    return tensor[skipped : skipped + size_bytes]
