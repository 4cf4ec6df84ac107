"""Measures two links by real transfers, and verifies that bytes come back unchanged."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from planner.errors import StorageError
from runtime.storage import Slot
from runtime.transfer.link import Link, Transfer
from runtime.transfer.torch_memory import TorchMemory

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


def measure(links: tuple[Link, Link], slots: Sequence[Slot], small: Slot, memory: TorchMemory) -> LinkRates:
    """Measure the rates of (write, read) over several `slots`, one after the other, and the latencies of `small`.

    The device works meanwhile, see `TorchMemory`. Waits until all transfers have ended.
    """
    write, read = links
    size = sum(slot.size_bytes for slot in slots)
    with memory.allocate(size) as buffer, memory.load():
        for offset in range(0, size, _FILL_BYTES):
            buffer.write(offset, os.urandom(min(_FILL_BYTES, size - offset)))
        address = buffer.address
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
    content = os.urandom(size)
    with memory.allocate(2 * size) as buffer:
        buffer.write(0, content)
        _finish_times([(write, slots)], buffer.address)
        _finish_times([(read, slots)], buffer.address + size)
        if buffer.read(size, size) != content:
            places = ", ".join(sorted({str(extent.path) for slot in slots for extent in slot.extents}))
            raise StorageError(
                f"{size:,} bytes that were written to {places} came back different; check the drives, or give another "
                "storage directory"
            )


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
    """Return the rates of both links while both are busy.

    One of them ends first. From then on the other one moves bytes at the rate that it has alone.
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
            # `rates` are measured too, so the result may be wrong: return at least half of the average rate.
            found[index].append(max(together / shared, size / end / 2))
    return median(found[0]), median(found[1])
