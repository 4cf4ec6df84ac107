"""Pins host memory, so that a GPU copies from and to it at full rate and without the processor."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from planner.errors import StorageError

PIN_CHUNK_BYTES = 1 << 30
"""Memory is pinned in chunks of this size. A copy may not cross from one into the next: the driver takes memory of two
registrations in one call for invalid."""

_PORTABLE, _MAPPED = 1, 2
"""cudaHostRegisterPortable: pinned for all devices; cudaHostRegisterMapped: kernels can read it at its own address."""


class Pinner(Protocol):
    """Fixes pages in memory, and takes that back. Both calls block; addresses and sizes are whole pages."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin all of it, or nothing: raises StorageError with value, limit and remedy then."""

    def unpin(self, address: int, size_bytes: int) -> None:
        """Take back `pin` of the same range, before the memory goes."""


class CudaPinner:
    """A `Pinner` for copies by `device`: `cudaHostRegister`, portable and mapped, in chunks of PIN_CHUNK_BYTES.

    register (address, size in bytes) and unregister (address) give what went wrong, None if nothing did; by default they
    are the CUDA runtime's.
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
        _in_a_thread_of_its_own(lambda: self._pin(address, size_bytes))

    def unpin(self, address: int, size_bytes: int) -> None:
        _in_a_thread_of_its_own(lambda: [self._unregister(chunk) for chunk, _ in _chunks(address, size_bytes)])

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
        with torch.cuda.device(self._device):
            return _failure(_cudart().cudaHostRegister(address, size_bytes, _PORTABLE | _MAPPED))

    def _cuda_unregister(self, address: int) -> str | None:
        with torch.cuda.device(self._device):
            return _failure(_cudart().cudaHostUnregister(address))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _failure(code: Any) -> str | None:
    return None if int(code) == 0 else f"CUDA error {int(code)} ({_cudart().cudaGetErrorString(code)})"


def _chunks(address: int, size_bytes: int) -> list[tuple[int, int]]:
    return [(address + begin, min(PIN_CHUNK_BYTES, size_bytes - begin)) for begin in range(0, size_bytes, PIN_CHUNK_BYTES)]


def _in_a_thread_of_its_own(work: Callable[[], object]) -> None:
    """CUDA keeps the last error for each thread, and PyTorch would take that of a failed call here for one of its next
    kernel's; it goes with the thread."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
