"""The paths between a GPU and lower tiers: to drives by cuFile through KvikIO, or staging through pinned memory, and who copies
there; to the host tier, how fast the GPU copies by itself; and what keeps it computing while others are measured."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import torch

from planner.errors import StorageError, UnsupportedError
from runtime.cuda import streams as cuda_streams
from runtime.cuda.streams import CudaEvent, CudaStreams
from runtime.device import Lane
from runtime.storage import HostStore, KvikioStore, Slot, StagedStore, Store, align_up, cut_slot
from runtime.system import storage_swap
from runtime.transfer import LinkRates, OneWay, PathCandidate, TorchMemory, aligned


def cuda_candidates(
    directories: Sequence[Path], device: torch.device, *, budget_bytes: int | None, checksums: bool, forced: str | None = None
) -> tuple[PathCandidate, ...]:
    """Return the paths between the memory of `device` and spill files in `directories`.

    forced: the name of a path that is to be taken although it is slow.
    """

    def kvikio() -> Store:
        if checksums:  # they need the path through host memory, where the processor computes them
            raise UnsupportedError("checksums are computed by the processor, which does not see what cuFile moves; leave one out")
        store = KvikioStore(directories, budget_bytes=budget_bytes)
        # In its compatibility mode KvikIO goes through host memory, and its copies wait for the default stream, which in training
        # waits for stages.
        if not store.bypasses_host and forced != "kvikio":
            store.close()
            raise UnsupportedError(
                f"{store.description}: its copies would wait for stages; give storage_path='kvikio' to use it all the same"
            )
        return store

    def staged() -> Store:
        return StagedStore(directories, CudaCopier(device), budget_bytes=budget_bytes, checksums=checksums)

    return PathCandidate(name="kvikio", open=kvikio), PathCandidate(name="staged", open=staged)


class CudaCopier:
    """A `Copier` (see `StagedStore`) for `device`, with one stream for each calling thread.

    PyTorch's streams do not wait for the default stream, and the default stream does not wait for them. No call waits for
    the whole device. PyTorch has 32 streams per device. With more threads, some share a stream: the copies are then slower, but
    still correct.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._own = threading.local()

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return pinned memory. PyTorch takes powers of two from the system, so other sizes waste memory.

        Raises StorageError if the memory cannot be pinned.
        """
        try:
            return aligned(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), size_bytes)
        except RuntimeError as error:
            raise StorageError(
                f"cannot pin a staging buffer of {size_bytes:,} bytes: {error}; lower host_budget, or raise the limit on locked "
                "memory (ulimit -l, or the container's)"
            ) from error

    def copy(self, buffer: torch.Tensor, address: int, *, to_device: bool) -> Callable[[], None]:
        stream: torch.cuda.Stream | None = getattr(self._own, "stream", None)
        if stream is None:
            self._own.stream = stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # A waiting thread must sleep: there are many of them, and the training thread needs its core.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        # By PyTorch, not by `copy_by_driver`: on an H100, the driver refused some reads that threads asked it for themselves.
        memory = cuda_streams.device_memory(self._device, address, buffer.nbytes)
        target, source = (memory, buffer) if to_device else (buffer, memory)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        done.record(stream)
        return done.synchronize


class CudaMemory(TorchMemory):
    """The memory of a GPU, which computes while a store is measured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copier = CudaCopier(device)
        self._own = threading.local()

    def load(self) -> AbstractContextManager[None]:
        return computing(self._device)

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Return a copy of memory that is ready, by a stream and a pinned buffer of the calling thread. Waits for it."""
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < size_bytes:
            self._own.buffer = buffer = self._copier.buffer(size_bytes)
        self._copier.copy(buffer[:size_bytes], address, to_device=False)()
        return super().bytes_at(buffer.data_ptr(), size_bytes)


# -- measuring

_COPIES = 8
_TRIALS = 3
_LATENCY_TRIALS = 9
_LANES = (Lane.OUTWARD, Lane.INWARD)
_SIDE = 2048
_PRODUCTS = 32  # products of matrices that are queued at a time: about a millisecond


def measure_host_links(streams: CudaStreams, store: HostStore, size_bytes: int) -> LinkRates:
    """Measure rates over copies of `size_bytes` in all, by the GPU's clock, and the latency of a small copy.

    Each direction is measured alone, and both at once.

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
    size, ways = slot.size_bytes, zip(alone, latency, together, strict=True)
    return LinkRates(*(OneWay(size / own, first, size / 2 / shared) for own, first, shared in ways))


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
    chunks = cut_slot(slot, align_up(max(slot.size_bytes // (2 * _COPIES), 1 << 16)))  # equal, but at the ends of extents
    ranges = [(store.address + each.file_offset_bytes, device + each.slot_offset_bytes, each.length_bytes) for each in chunks]
    share = len(ranges) // len(lanes)
    begins = [streams.mark_lane(lane) for lane in lanes]
    for number in range(share):  # the lanes take turns, so that none of them waits for the host
        for index, lane in enumerate(lanes):
            _copy(streams, lane, *ranges[index * share + number])
    ends = [streams.mark_lane(lane) for lane in lanes]
    return [end.seconds_since(begin) for begin, end in zip(begins, ends, strict=True)]


def _copy(streams: CudaStreams, lane: Lane, host: int, device: int, size_bytes: int) -> None:
    target, source = (host, device) if lane is Lane.OUTWARD else (device, host)
    streams.copy(lane, target=target, source=source, size_bytes=size_bytes)


def _latency(streams: CudaStreams, store: HostStore, slot: Slot, device: int, lane: Lane) -> float:
    """Return the seconds from the request of a copy of one page until the host knows that it has ended."""
    host = store.address + slot.extents[0].offset_bytes
    trials = []
    for _ in range(_LATENCY_TRIALS):
        begun = time.perf_counter()
        _copy(streams, lane, host, device, 4096)
        streams.record(lane).wait()
        trials.append(time.perf_counter() - begun)
    return median(trials)


@contextlib.contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Within, a stream of `device` multiplies matrices, and the default stream waits for each millisecond of that.

    So paths to drives are measured as they will be in training. Takes 24 MiB of the device, and what cuBLAS takes. Without room
    for them the device stays idle. Waits at the end until the last product is done, and leaves nothing behind.
    """
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            factor = torch.full((_SIDE, _SIDE), 1e-3, dtype=torch.bfloat16, device=device)
            product = torch.empty_like(factor)
    except torch.OutOfMemoryError:
        yield
        return
    stop = threading.Event()

    def compute() -> None:
        before = CudaEvent(stream)
        while not stop.is_set():
            with torch.cuda.stream(stream):
                for _ in range(_PRODUCTS):
                    torch.mm(factor, factor, out=product)
            now = CudaEvent(stream)
            # KvikIO's compatibility mode copies on streams that wait for the default stream. In training that waits for the lane
            # of computation at the end of each region, so that such copies wait for stages. An idle GPU does not show that.
            torch.cuda.default_stream(device).wait_event(now.event)
            before.wait()  # never more than two portions ahead
            before = now
        before.wait()

    thread = threading.Thread(target=compute, name="teraio computes while it measures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        torch._C._cuda_clearCublasWorkspaces()  # this stream's: 32 MiB on Hopper, which nobody would use again
