"""Measures the copies that a GPU makes by itself to the host tier and back: each direction alone, and both at once."""

from __future__ import annotations

import time
from statistics import median

import torch

from planner.errors import StorageError
from runtime.cuda.streams import CudaStreams
from runtime.device import Lane
from runtime.storage import HostStore, Slot
from runtime.system import storage_swap
from runtime.transfer import LinkRates

_COPIES = 8
_TRIALS = 3
_LATENCY_TRIALS = 9
_LANES = (Lane.OUTWARD, Lane.INWARD)


def measure_host_links(streams: CudaStreams, store: HostStore, size_bytes: int = 256 << 20) -> LinkRates:
    """Measure rates over copies of `size_bytes` in all, by the GPU's clock, and the latency of a small copy.

    Waits until all copies have ended. Takes `size_bytes` of the GPU and of the store during that time; less if one of them
    has less, but at least 1 MiB. Raises StorageFullError if the store has less than that, StorageError if the GPU has.
    """
    slot, area = _largest_areas(streams, store, size_bytes)
    try:
        device = storage_swap.address(area)
        for lane in _LANES:  # work that was queued before may still use what is this memory now (rule 2)
            streams.wait(lane, streams.record(Lane.COMPUTE))
        _seconds(streams, store, slot, device, _LANES)  # the first copies of a process are slower
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
    """Return a slot and GPU memory of the same size, as large as possible: the model may leave little memory on the GPU."""
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
    """Let each lane copy its share of the slot, in several copies. Return the seconds of each lane by the GPU's clock."""
    marks = []
    ranges = _ranges(store, slot, device)
    share = len(ranges) // len(lanes)
    begins = [streams.mark_lane(lane) for lane in lanes]
    for number in range(share):  # the lanes take turns, so that none of them waits for the host
        for index, lane in enumerate(lanes):
            _copy(streams, lane, *ranges[index * share + number])
    marks = [streams.mark_lane(lane) for lane in lanes]
    return [end.seconds_since(begin) for begin, end in zip(begins, marks, strict=True)]


def _ranges(store: HostStore, slot: Slot, device: int) -> list[tuple[int, int, int]]:
    """Cut the slot into ranges of equal length, shorter at the ends of extents: host address, device address, bytes."""
    step = max(slot.size_bytes // (2 * _COPIES), 1 << 16)
    ranges = []
    for extent in slot.extents:
        host = store.address_of(extent)
        for begin in range(0, extent.length_bytes, step):
            length = min(step, extent.length_bytes - begin)
            ranges.append((host + begin, device, length))
            device += length
    return ranges


def _copy(streams: CudaStreams, lane: Lane, host: int, device: int, size_bytes: int) -> None:
    target, source = (host, device) if lane is Lane.OUTWARD else (device, host)
    streams.copy(lane, target=target, source=source, size_bytes=size_bytes)


def _latency(streams: CudaStreams, store: HostStore, slot: Slot, device: int, lane: Lane) -> float:
    """Return the seconds from the request of a copy of one page until the host knows that it has ended."""
    host = store.address_of(slot.extents[0])
    trials = []
    for _ in range(_LATENCY_TRIALS):
        begun = time.perf_counter()
        _copy(streams, lane, host, device, 4096)
        streams.record(lane).wait()
        trials.append(time.perf_counter() - begun)
    return median(trials)
