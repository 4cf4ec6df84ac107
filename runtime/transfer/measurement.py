"""Measures two links by real transfers, and verifies that bytes come back unchanged: with memory of the device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median

import torch

from planner.errors import StorageError, StorageFullError
from runtime.storage import ALIGNMENT_BYTES, Slot, Store, align_up
from runtime.transfer.link import Link, Transfer

_MEASURED_BLOCKS = 8  # a rate is measured over so many blocks, one after the other
_LATENCY_TRIALS = 9
_RATE_TRIALS = 3
_FILL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates and latencies of the two links. `duplex_...`: while both links are busy; the other rates: each link alone.

    A latency is the time from the submission of a block of one page to its end.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    write_latency_seconds: float
    read_latency_seconds: float
    duplex_write_bytes_per_second: float
    duplex_read_bytes_per_second: float

    def __str__(self) -> str:
        write, read = self.write_bytes_per_second / 1e9, self.read_bytes_per_second / 1e9
        both = self.duplex_write_bytes_per_second / 1e9, self.duplex_read_bytes_per_second / 1e9
        return f"writes {write:.2f} GB/s, reads {read:.2f} GB/s, both at once {both[0]:.2f} and {both[1]:.2f}"


def slots_to_measure(store: Store, size_bytes: int) -> list[Slot]:
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


def measure(links: tuple[Link, Link], slots: Sequence[Slot], memory: TorchMemory) -> LinkRates:
    """Measure the rates of (write, read) over several slots, one after the other, and the latencies of the last one.

    The device works meanwhile, see `TorchMemory`. Waits until all transfers have ended.
    """
    write, read = links
    *slots, small = slots
    size = sum(slot.size_bytes for slot in slots)
    buffer = memory.allocate(size)
    address = buffer.data_ptr()
    with memory.load():
        for offset in range(0, size, _FILL_BYTES):
            buffer[offset : offset + _FILL_BYTES].copy_(_random_bytes(min(_FILL_BYTES, size - offset)))
        _finish_times([(write, slots)], address)  # the first write of an extent takes longer than all later ones
        write_rate = _rate(write, slots, address)
        read_rate = _rate(read, slots, address)
        duplex_write, duplex_read = _duplex_rates(links, (write_rate, read_rate), slots, address)
        return LinkRates(
            write_bytes_per_second=write_rate,
            read_bytes_per_second=read_rate,
            write_latency_seconds=_latency(write, small, address),
            read_latency_seconds=_latency(read, small, address),
            duplex_write_bytes_per_second=duplex_write,
            duplex_read_bytes_per_second=duplex_read,
        )


def verify(links: tuple[Link, Link], slots: Sequence[Slot], memory: TorchMemory) -> None:
    """Write random bytes to `slots`, read them back to other memory and compare. Waits until all of that is done.

    Raises StorageError if the bytes differ or could not be moved.
    """
    write, read = links
    size = sum(slot.size_bytes for slot in slots)
    content, buffer = _random_bytes(size), memory.allocate(2 * size)
    buffer[:size].copy_(content)
    _finish_times([(write, slots)], buffer.data_ptr())
    _finish_times([(read, slots)], buffer.data_ptr() + size)
    if not torch.equal(buffer[size:].cpu(), content):
        places = ", ".join(sorted({str(extent.path) for slot in slots for extent in slot.extents}))
        raise StorageError(
            f"{size:,} bytes that were written to {places} came back different; check the drives, or give another "
            "storage directory"
        )


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


def _rate(link: Link, slots: Sequence[Slot], address: int) -> float:
    size = sum(slot.size_bytes for slot in slots)
    return size / median(_finish_times([(link, slots)], address)[0] for _ in range(_RATE_TRIALS))


def _latency(link: Link, slot: Slot, address: int) -> float:
    return median(_finish_times([(link, [slot])], address)[0] for _ in range(_LATENCY_TRIALS))


def _duplex_rates(
    links: tuple[Link, Link], rates: tuple[float, float], slots: Sequence[Slot], address: int
) -> tuple[float, float]:
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
    load: within, the device works as it will while blocks move. A store is measured so.
    """

    def __init__(
        self, device: torch.device, *, load: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        self._device = device
        self.load = load
        self.on_host = device.type == "cpu"

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
