"""The lanes, the clock and the memory of an NVIDIA GPU, also in pieces.

The order of copies is in `runtime/cuda/mover.py`, the rules for it in `runtime/device.py`, [Note: What orders what].
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from runtime.cuda.compaction import gather, history_of, serve
from runtime.device import COMPUTE, INWARD, MIN_MOVED_BYTES, OUTWARD, USER, DeviceBytes, DeviceMemoryError, Event, Lane

# -- calls of the driver: there are hundreds of copies an iteration, and PyTorch takes the host several times as long

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the calling thread has used no GPU yet


def copy_by_driver(stream: torch.cuda.Stream, *, target: int, source: int, size_bytes: int) -> None:
    """Queue a copy between two addresses, of a GPU or of main memory, in `stream`. Waits for it if main memory is not pinned.

    Raises RuntimeError if the driver refuses it, or with an earlier error of the device.
    """
    status = _calls().cuMemcpyAsync(target, source, size_bytes, stream.cuda_stream)
    if status == _NO_CONTEXT:
        stream.record_event()  # gives the thread the context that PyTorch works in
        status = _calls().cuMemcpyAsync(target, source, size_bytes, stream.cuda_stream)
    if status:
        name = ctypes.c_char_p()
        _calls().cuGetErrorName(status, ctypes.byref(name))
        found = name.value.decode() if name.value else "unknown"
        raise RuntimeError(
            f"CUDA error {status} ({found}) in a copy of {size_bytes:,} bytes from {source:#x} ({_known_range(source)}) to "
            f"{target:#x} ({_known_range(target)})"
        )


_RANGE_BEGIN, _RANGE_SIZE = 11, 12  # CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE


def _known_range(address: int) -> str:
    """Return in which allocation, mapping or registration an address is, as the driver knows it."""
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    for value, attribute in ((begin, _RANGE_BEGIN), (size, _RANGE_SIZE)):
        if _calls().cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address)):
            return "unknown to the driver"
    return f"in {size.value:,} bytes from {begin.value:#x}"


@functools.cache
def _calls() -> Any:
    # Calls keep the interpreter's lock: whoever lets go of it may wait milliseconds until another thread gives it back.
    library = ctypes.PyDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return library


# -- lanes and memory

_HERE = contextlib.nullcontext()
_LONGEST_HISTORY = 100_000  # allocations and frees of one stage
_PAGE_BYTES = 20 << 20  # the allocator takes memory in such units
_LEFT_BYTES = 64 << 20  # for small blocks, which have pages of their own
_SMALL_BYTES = 1 << 20  # blocks up to this size
_TRIES = 16  # to fill a gap: what is free elsewhere comes first


def device_memory(device: torch.device, address: int, size_bytes: int) -> torch.Tensor:
    """Return a tensor over bytes in the memory of a GPU. It owns nothing."""
    return torch.as_tensor(DeviceBytes(address, size_bytes), device=device)


class CudaEvent:
    """A point in a lane of a GPU. timed: with the time of the GPU's clock."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool = False) -> None:
        # A thread that waits for it sleeps, because the training thread needs its core.
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Return the seconds between two timed points."""
        earlier.event.synchronize()  # it need not come first: the user may have gone on in another stream
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaStreams:
    """`Streams` and `Device` of one GPU, and the counters of its allocator. Each lane has a stream; none is the NULL stream.

    Stages run on a separate stream, not on the user's stream. Events join the two where a region begins and ends.
    The memory of a stage comes from the pool of that stream, so freed memory is used again in the order of computation.

    spare_bytes: bytes that count as taken. They stand for free memory in ranges that are too small to use, and for memory
    that libraries allocate at their first use within a stage (one cuBLAS workspace for each thread).
    limit_bytes: the most that PyTorch's allocator may reserve while a region runs. It gives cached memory back to the device
    before it raises OutOfMemoryError. User code may take more, because its temporary memory is not known before; training
    need not end for that.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.in_region = False
        self.spare_bytes = 0
        self.limit_bytes: int | None = None
        self._total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        own = (COMPUTE, OUTWARD, INWARD)
        # PyTorch hands out the 32 streams of each priority in turns. The I/O threads use the other priority, so they share none.
        self._streams = {lane: torch.cuda.Stream(self.device, priority=-1) for lane in own}  # type: ignore[no-untyped-call]
        self._streams[USER] = torch.cuda.current_stream(self.device)
        self.pieces = AllocatorPieces(self, self._streams[COMPUTE])

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Send computation to the lane of computation. The user's current stream waits for it at the end."""
        user = self._streams[USER] = torch.cuda.current_stream(self.device)
        compute = self._streams[COMPUTE]
        compute.wait_stream(user)  # the region reads what user code has made
        self.in_region = True
        try:
            with torch.cuda.stream(compute), self._limited():
                yield
        finally:
            self.in_region = False
            user.wait_stream(compute)  # user code reads what the region has made

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        if self.limit_bytes is None:
            yield
            return
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(min(before, self.limit_bytes / self._total_bytes), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def record(self, lane: Lane) -> CudaEvent:
        return CudaEvent(self._streams[lane])

    def wait(self, lane: Lane, event: Event) -> None:
        self._streams[lane].wait_event(cast(CudaEvent, event).event)

    def mark_lane(self, lane: Lane) -> CudaEvent:
        return CudaEvent(self._streams[lane], timed=True)

    def copy(self, lane: Lane, *, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy between the GPU and main memory. If the main memory is not pinned, the call waits for the copy."""
        copy_by_driver(self._streams[lane], target=target, source=source, size_bytes=size_bytes)

    def fill(self, lane: Lane, address: int, size_bytes: int, value: int) -> None:
        with torch.cuda.stream(self._streams[lane]):
            device_memory(self.device, address, size_bytes).fill_(value)

    def read(self, lane: Lane, address: int, size_bytes: int) -> memoryview:
        with torch.cuda.stream(self._streams[lane]):  # a copy to pageable memory waits for the current stream
            return device_memory(self.device, address, size_bytes).cpu().numpy().data

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        # To switch to the stream that is the current one would take longer than the rest.
        with _HERE if self._computes else torch.cuda.stream(self._streams[COMPUTE]):
            try:
                # Not `torch.empty`: with deterministic algorithms, it fills the memory.
                area = torch.UntypedStorage(size_bytes, device=self.device)  # type: ignore[no-untyped-call]
                self.pieces.note_other(area.data_ptr())
                return area
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"{self.device} has no {size_bytes:,} bytes in one piece for a block that comes back, although the budget "
                    f"has room ({self.allocated_bytes:,} bytes allocated, {torch.cuda.memory_reserved(self.device):,} "
                    "reserved); lower memory_budget, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
                ) from error

    def can_move(self, storage: torch.UntypedStorage) -> bool:
        own = storage.device == self.device and storage.resizable()
        return own and storage.nbytes() >= MIN_MOVED_BYTES

    def trim(self, spare_bytes: int) -> None:
        """Do nothing: PyTorch's allocator gives cached memory back by itself before it exceeds the limit."""

    # -- Device

    def mark(self) -> CudaEvent:
        return CudaEvent(self._streams[COMPUTE] if self._computes else torch.cuda.current_stream(self.device), timed=True)

    @property
    def _computes(self) -> bool:
        """Whether what the calling thread queues goes to the lane of computation."""
        return torch._C._cuda_getCurrentRawStream(self.device.index) == self._streams[COMPUTE].cuda_stream

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def keep_until_computed(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cuda":  # blocks in main memory have no streams
            holder = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            holder.record_stream(self._streams[COMPUTE])

    def try_memory(self, size_bytes: int) -> None:
        self.allocate(size_bytes)

    def give_back_memory(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()

    def external_bytes(self, known_bytes: int) -> int:
        """Return the bytes that PyTorch has allocated beyond `known_bytes`, plus `spare_bytes`."""
        return max(self.allocated_bytes - known_bytes, 0) + self.spare_bytes

    # -- memory

    @property
    def allocated_bytes(self) -> int:
        """Bytes that PyTorch has allocated on the GPU and not freed."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that PyTorch's allocator has taken from the GPU, handed out or not."""
        return torch.cuda.memory_reserved(self.device)

    @property
    def free_bytes(self) -> int:
        """Bytes of the GPU that PyTorch could allocate, in pieces or not."""
        return torch.cuda.mem_get_info(self.device)[0] + self.reserved_bytes - self.allocated_bytes

    @property
    def retries(self) -> int:
        """See `Device.retries`."""
        return int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        """Forget the peak so far, also for `torch.cuda.max_memory_allocated`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak_bytes(self) -> int:
        """The highest `allocated_bytes` since the last reset."""
        return torch.cuda.max_memory_allocated(self.device)


class AllocatorPieces:
    """`Pieces` of one GPU, and the `Pool` of its lane of computation. compute: the stream of that lane."""

    def __init__(self, streams: CudaStreams, compute: torch.cuda.Stream) -> None:
        self.allocate = streams.allocate
        self._streams = streams
        self._device = streams.device
        self._compute = compute
        self._others: list[int] | None = None  # while a stage is recorded

    # -- Pieces

    def begin_recording(self) -> bool:
        if torch._C._cuda_isHistoryEnabled():
            return False  # the user records, and would lose it
        self._others = []
        self._record("all")
        return True

    def note_other(self, address: int) -> None:
        """A block was allocated there, not what a stage has asked for."""
        if self._others is not None:
            self._others.append(address)

    def recorded(self) -> Sequence[int]:
        trace = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        self._record(None)
        others, self._others = self._others or (), None
        own = [event for event in trace if event["stream"] == self._compute.cuda_stream]
        return history_of(own, max(MIN_MOVED_BYTES, _SMALL_BYTES + 1), others)

    def gather(
        self,
        history: Sequence[int],
        movable: Callable[[], MutableMapping[int, int]],
        move: Callable[[int, torch.UntypedStorage], None],
        let_go: Callable[[int], bool],
    ) -> bool:
        if not self._streams.in_region:  # what user code queues comes before what is queued there only where a region begins
            return False
        taken = self._all_segments()
        own = self._own(taken)
        if serve(own, history):
            return True
        if not all(segment["is_expandable"] for segment in own):
            return False  # it cannot be helped where the user's settings keep ranges apart
        self._fill_gaps(taken)
        gather(self, history, movable, move, let_go)
        return False

    def _fill_gaps(self, taken: Sequence[Mapping[str, Any]]) -> None:
        """Take from the device what the limit leaves: where retries have left gaps, the lowest first, so that it joins what lies
        around it. The allocator takes the first gap that is large enough, if it has nothing free that is."""
        limit_bytes = (self._streams.limit_bytes or 0) - _LEFT_BYTES
        reserved = sum(segment["total_size"] for segment in taken if segment["device"] == self._device.index)
        held = []
        with contextlib.suppress(DeviceMemoryError):
            for below, above in pairwise(sorted(self._own(taken), key=lambda segment: segment["address"])):
                end, last = below["address"] + below["total_size"], below["blocks"][-1]
                begin = end - last["size"] if last["state"] == "inactive" else end
                for _ in range(_TRIES):
                    room = limit_bytes - reserved
                    if room < _PAGE_BYTES:
                        return
                    held.append(self.allocate(end - begin + min(room, above["address"] - end)))
                    reserved = self._streams.reserved_bytes
                    if held[-1].data_ptr() == begin:
                        break
            if limit_bytes - reserved >= _PAGE_BYTES:
                self.allocate(limit_bytes - reserved)

    def copy(self, address: int, fresh: torch.UntypedStorage) -> None:
        copy_by_driver(self._compute, target=fresh.data_ptr(), source=address, size_bytes=fresh.nbytes())

    # -- Pool

    def segments(self) -> Sequence[Mapping[str, Any]]:
        return self._own(self._all_segments())

    def _all_segments(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
        return found

    def _own(self, segments: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        stream = self._compute.cuda_stream
        large = (segment for segment in segments if segment["stream"] == stream and segment["segment_type"] == "large")
        return [segment for segment in large if tuple(segment["segment_pool_id"]) == (0, 0)]  # no pool of the user's

    def _record(self, what: str | None) -> None:
        record = torch.cuda.memory._record_memory_history
        record(what, context=None, stacks="python", max_entries=_LONGEST_HISTORY, clear_history=True)  # type: ignore[arg-type]
