"""The storage paths between a GPU and drives: cuFile through KvikIO, or staging through pinned memory, and who copies there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from planner.errors import StorageError, UnsupportedError
from runtime.cuda import streams
from runtime.storage import KvikioStore, StagedStore, Store
from runtime.transfer import PathCandidate, TorchMemory, aligned


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

    def copy(self, *, target: int, source: int, size_bytes: int) -> Callable[[], None]:
        stream: torch.cuda.Stream | None = getattr(self._own, "stream", None)
        if stream is None:
            self._own.stream = stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # A waiting thread must sleep: there are many of them, and the training thread needs its core.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        streams.copy_by_driver(stream, target=target, source=source, size_bytes=size_bytes)
        done.record(stream)
        return done.synchronize


class CudaMemory(TorchMemory):
    """The memory of a GPU. load: see `TorchMemory`."""

    def __init__(self, device: torch.device, *, load: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(device, load=load)
        self._copier = CudaCopier(device)
        self._own = threading.local()

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Return a copy of memory that is ready, by a stream and a pinned buffer of the calling thread. Waits for it."""
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < size_bytes:
            self._own.buffer = buffer = self._copier.buffer(size_bytes)
        self._copier.copy(target=buffer.data_ptr(), source=address, size_bytes=size_bytes)()
        return super().bytes_at(buffer.data_ptr(), size_bytes)
