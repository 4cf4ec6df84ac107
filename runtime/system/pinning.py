"""Pins host memory. A GPU copies from and to pinned memory at full rate and without the processor."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from planner.errors import StorageError

if TYPE_CHECKING:
    import torch

PIN_CHUNK_BYTES = 1 << 30
"""Memory is pinned in chunks of this size. No copy may cross from one chunk into the next: the driver refuses a call with
memory of two registrations."""

_PORTABLE, _MAPPED = 1, 2
"""cudaHostRegisterPortable: pinned for all devices. cudaHostRegisterMapped: kernels can read it at its own address."""


class Pinner(Protocol):
    """Pins and unpins pages. Both calls wait for the driver. Addresses and sizes are whole pages."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin the range. Raises StorageError with value, limit and remedy; then nothing stays pinned."""

    def unpin(self, address: int, size_bytes: int) -> None:
        """Undo `pin` of the same range. To be called before the memory is freed."""


class CudaPinner:
    """A `Pinner` for copies by `device`: `cudaHostRegister`, portable and mapped, in chunks of PIN_CHUNK_BYTES.

    register (address, size in bytes), unregister (address): return an error message, or None for success. By default they
    call the CUDA runtime.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        register: Callable[[int, int], str | None] | None = None,
        unregister: Callable[[int], str | None] | None = None,
    ) -> None:
        self._device = device
        self._register = register or self._cuda_register
        self._unregister = unregister or self._cuda_unregister

    def pin(self, address: int, size_bytes: int) -> None:
        _in_separate_thread(lambda: self._pin(address, size_bytes))

    def unpin(self, address: int, size_bytes: int) -> None:
        _in_separate_thread(lambda: [self._unregister(chunk) for chunk, _ in _chunks(address, size_bytes)])

    def _pin(self, address: int, size_bytes: int) -> None:
        with ExitStack() as undo:
            for chunk, length in _chunks(address, size_bytes):
                failure = self._register(chunk, length)
                if failure is not None:
                    raise StorageError(
                        f"cannot pin {size_bytes:,} bytes of host memory: {failure} after {chunk - address:,} bytes (limit on "
                        f"locked memory: {_locked_limit()}); raise the limit (ulimit -l, or the container's), or lower "
                        "host_budget"
                    )
                undo.callback(self._unregister, chunk)
            undo.pop_all()

    def _cuda_register(self, address: int, size_bytes: int) -> str | None:
        with _cuda().device(self._device):
            return _failure(_cudart().cudaHostRegister(address, size_bytes, _PORTABLE | _MAPPED))

    def _cuda_unregister(self, address: int) -> str | None:
        with _cuda().device(self._device):
            return _failure(_cudart().cudaHostUnregister(address))


def _cuda() -> Any:
    """Return PyTorch's CUDA module. It is imported here because the stores need nothing else of PyTorch, and import fast."""
    import torch

    return torch.cuda


def _cudart() -> Any:
    return _cuda().cudart()


def _failure(code: Any) -> str | None:
    return None if int(code) == 0 else f"CUDA error {int(code)} ({_cudart().cudaGetErrorString(code)})"


def _chunks(address: int, size_bytes: int) -> list[tuple[int, int]]:
    return [(address + begin, min(PIN_CHUNK_BYTES, size_bytes - begin)) for begin in range(0, size_bytes, PIN_CHUNK_BYTES)]


def _in_separate_thread(work: Callable[[], object]) -> None:
    """Run `work` in a new thread and wait for it.

    CUDA keeps the last error of each thread. After a failed call here, PyTorch would take that error for one of its next
    kernel. In a new thread, the error goes with the thread.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
