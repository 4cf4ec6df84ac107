"""Measures what a GPU copies to the host tier and back by itself: each direction alone, and both at once."""

from __future__ import annotations

import time
from statistics import median

import torch

from planner.errors import StorageError
from runtime.cuda import storage_swap as storage_memory
from runtime.cuda.streams import CudaStreams
from runtime.device import Lane
from runtime.storage import HostStore, Slot
from runtime.transfer import LinkRates

_COPIES = 8
_TRIALS = 3
_LATENCY_TRIALS = 9
_LANES = (Lane.OUTWARD, Lane.INWARD)


def measure_host_links(streams: CudaStreams, store: HostStore, size_bytes: int = 256 << 20) -> LinkRates:
    """Rates over copies of `size_bytes` in all, by the GPU's clock, and the latency of a small one. Blocks.

    Takes as much memory of the GPU and of the store meanwhile; less if one of them has less, but at least 1 MiB.
    Raises StorageFullError where even that is missing, StorageError where the GPU has none.
    """
    slot, area = _largest_areas(streams, store, size_bytes)
    try:
        device = storage_memory.address(area)
        _seconds(streams, store, slot, device, _LANES)  # the first copies of a process set things up
        alone = [median(_seconds(streams, store, slot, device, (lane,))[0] for _ in range(_TRIALS)) for lane in _LANES]
        both = [_seconds(streams, store, slot, device, _LANES) for _ in range(_TRIALS)]
        together = [median(times) for times in zip(*both, strict=True)]
        latency = [_latency(streams, store, slot, device, lane) for lane in _LANES]
    finally:
        store.release(slot)
    size = slot.size_bytes
    return LinkRates(
        write_bytes_per_second=size / alone[0],
        read_bytes_per_second=size / alone[1],
        write_latency_seconds=latency[0],
        read_latency_seconds=latency[1],
        duplex_write_bytes_per_second=size / 2 / together[0],
        duplex_read_bytes_per_second=size / 2 / together[1],
    )


def _largest_areas(streams: CudaStreams, store: HostStore, size_bytes: int) -> tuple[Slot, torch.UntypedStorage]:
    """Of equal size: the model may leave little room on the GPU."""
    while True:
        slot = None
        try:
            slot = store.allocate(size_bytes, "measurement")
            return slot, streams.allocate(slot.size_bytes)
        except StorageError:
            if slot is not None:
                store.release(slot)
            if size_bytes <= 1 << 20:
                raise
            size_bytes //= 2


def _seconds(streams: CudaStreams, store: HostStore, slot: Slot, device: int, lanes: tuple[Lane, ...]) -> list[float]:
    """Each lane copies its share of the slot, in several copies; how long each took by the GPU's clock."""
    marks = []
    parts = _parts(store, slot, device)
    share = len(parts) // len(lanes)
    begins = [streams.mark_lane(lane) for lane in lanes]
    for number in range(share):  # in turns, so that no lane waits for the host
        for index, lane in enumerate(lanes):
            _copy(streams, lane, *parts[index * share + number])
    marks = [streams.mark_lane(lane) for lane in lanes]
    return [end.seconds_since(begin) for begin, end in zip(begins, marks, strict=True)]


def _parts(store: HostStore, slot: Slot, device: int) -> list[tuple[int, int, int]]:
    """The slot in pieces of equal length but for what the extents' ends cut off: host address, device address, bytes."""
    step = max(slot.size_bytes // (2 * _COPIES), 1 << 16)
    parts = []
    for extent in slot.extents:
        host = store.address_of(extent)
        for begin in range(0, extent.length_bytes, step):
            length = min(step, extent.length_bytes - begin)
            parts.append((host + begin, device, length))
            device += length
    return parts


def _copy(streams: CudaStreams, lane: Lane, host: int, device: int, size_bytes: int) -> None:
    target, source = (host, device) if lane is Lane.OUTWARD else (device, host)
    streams.copy(lane, target=target, source=source, size_bytes=size_bytes)


def _latency(streams: CudaStreams, store: HostStore, slot: Slot, device: int, lane: Lane) -> float:
    """Seconds from asking for a copy of a page until the host knows of its end."""
    host = store.address_of(slot.extents[0])
    trials = []
    for _ in range(_LATENCY_TRIALS):
        begun = time.perf_counter()
        _copy(streams, lane, host, device, 4096)
        streams.record(lane).wait()
        trials.append(time.perf_counter() - begun)
    return median(trials)
