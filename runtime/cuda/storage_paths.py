"""The storage paths between a GPU and drives: cuFile through KvikIO, or staging through pinned memory, and who copies there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from planner.errors import StorageError, UnsupportedError
from runtime.cuda.streams import device_bytes, host_bytes
from runtime.storage import ALIGNMENT_BYTES, KvikioStore, StagedStore, Store, align_up
from runtime.transfer import PathCandidate, TorchMemory


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
    """A `Copier` (see `StagedStore`) for `device`, with one stream for each calling thread and direction.

    PyTorch's streams do not wait for the default stream, and the default stream does not wait for them. No call waits for
    the whole device. PyTorch has 32 streams per device. With more than 16 threads, some share a stream: the copies are then
    slower, but still correct.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._own = threading.local()

    def buffer(self, size_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(size_bytes)

    def to_host(self, target_address: int, source_address: int, size_bytes: int) -> CudaCopy:
        source = self._on_device(source_address, size_bytes)
        return _begin(self._stream("to_host"), host_bytes(target_address, size_bytes), source)

    def to_device(self, target_address: int, source_address: int, size_bytes: int) -> CudaCopy:
        target = self._on_device(target_address, size_bytes)
        return _begin(self._stream("to_device"), target, host_bytes(source_address, size_bytes))

    def _stream(self, direction: str) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._own, direction, None)
        if stream is None:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            setattr(self._own, direction, stream)
        return stream

    def _on_device(self, address: int, size_bytes: int) -> torch.Tensor:
        tensor = device_bytes(address, size_bytes, self._device)
        if tensor.data_ptr() != address:  # the address is of another device, and PyTorch has made a copy on this one
            raise StorageError(
                f"address {address:#x} is not in the memory of {self._device}; this is a bug in teraio, please report it"
            )
        return tensor


class CudaMemory(TorchMemory):
    """The memory of a GPU. load: see `TorchMemory`."""

    def __init__(self, device: torch.device, *, load: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(device, load=load)
        self._copier = CudaCopier(device)
        self._own = threading.local()

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Return a copy of memory that is ready, by a stream and a pinned buffer of the calling thread. Waits for it."""
        buffer: PinnedBuffer | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.size_bytes < size_bytes:
            self._own.buffer = buffer = self._copier.buffer(size_bytes)
        self._copier.to_host(buffer.address, address, size_bytes).wait()
        return super().bytes_at(buffer.address, size_bytes)


class PinnedBuffer:
    """A `HostBuffer` of pinned memory. Raises StorageError if the memory cannot be pinned.

    PyTorch takes powers of two from the system, so other sizes waste memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._bytes = _pinned(size_bytes)
        if self._bytes.data_ptr() % ALIGNMENT_BYTES:
            self._bytes = _pinned(size_bytes + ALIGNMENT_BYTES)
        self.address = align_up(self._bytes.data_ptr())


class CudaCopy:
    """A `PendingCopy`. It keeps the tensors alive that PyTorch copies."""

    __slots__ = ("_done", "_operands")

    def __init__(self, done: torch.cuda.Event, operands: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._done = done
        self._operands = operands

    def wait(self) -> None:
        self._done.synchronize()


def _pinned(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise StorageError(
            f"cannot pin a staging buffer of {size_bytes:,} bytes: {error}; lower host_budget, or raise the limit on locked "
            "memory (ulimit -l, or the container's)"
        ) from error


def _begin(stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> CudaCopy:
    # A waiting thread must sleep: there are many of them, and the training thread needs its core.
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        done.record(stream)
    return CudaCopy(done, (target, source))
