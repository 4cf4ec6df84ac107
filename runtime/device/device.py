"""Where stages run: what the timeline and the executor need to know of order and time, and of memory that can leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from planner.errors import StorageError

MIN_MOVED_BYTES = 1 << 20
"""Smaller blocks stay on the device: system calls would cost more than the memory is worth."""


class DeviceMemoryError(StorageError):
    """The device's allocator has no memory in one piece, although the budget has room. The pager makes more room then."""


class Mark(Protocol):
    """A point in the device's work."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from another mark of the same device to this one. Waits until the device has passed both."""

    def wait(self) -> None:
        """Wait until the device has passed it. For any thread."""


class Device(Protocol):
    """asynchronous: the host only queues the work, so that times are known only later."""

    @property
    def asynchronous(self) -> bool: ...

    def region(self) -> AbstractContextManager[None]:
        """Put a compiled region between what user code has asked for so far and what it asks for next."""

    def mark(self) -> Mark:
        """Return the point after all that was asked for so far. Never waits."""

    def synchronize(self) -> None:
        """Wait until the device has ended everything that it was asked for so far, also by user code."""

    def try_memory(self, size_bytes: int) -> None:
        """Raise DeviceMemoryError if the allocator has not so many bytes in one piece for the stage that runs next."""

    def give_back_memory(self) -> None:
        """Let the allocator give all memory back that nobody uses, so that the rest serves in any sizes. Waits for the device."""

    def trim(self, spare_bytes: int) -> None:
        """Free memory that is kept for reuse, but for `spare_bytes`: so much of the budget is not in use."""

    def external_bytes(self, known_bytes: int) -> int:
        """Return the bytes in use on the device that are not among `known_bytes`, those of the pager; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class WallMark:
    """A reading of the host's clock. Its zero has no meaning."""

    at_seconds: float

    def seconds_since(self, earlier: WallMark) -> float:
        return self.at_seconds - earlier.at_seconds

    def wait(self) -> None:
        """Return at once: what was asked for before has been done."""


class CpuDevice:
    """The CPU: each call does its work before it returns. trim: of the memory that blocks are in."""

    asynchronous = False

    def __init__(self, trim: Callable[[int], None] = lambda spare_bytes: None) -> None:
        self._trim = trim

    def region(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> WallMark:
        return WallMark(time.perf_counter())

    def synchronize(self) -> None:
        """Return at once."""

    def try_memory(self, size_bytes: int) -> None:
        """Do nothing: main memory is never short in one piece."""

    def give_back_memory(self) -> None:
        """Do nothing: main memory has no allocator of its own that could be short of memory."""

    def trim(self, spare_bytes: int) -> None:
        self._trim(spare_bytes)

    def external_bytes(self, known_bytes: int) -> int:
        """Return 0: main memory has other users, and the budget is for what the pager knows of."""
        return 0


@dataclass(frozen=True, slots=True)
class Span:
    """Whole pages of memory. address, length_bytes: multiples of the page size. serial: of the allocation; never used twice."""

    address: int
    length_bytes: int
    serial: int = 0


class DeviceBytes:
    """Bytes in device memory as the CUDA array interface (version 3) describes them: for libraries. Does not own them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
