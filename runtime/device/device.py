"""Where stages run, as far as the timeline and the executor need to know: in which order, and for how long."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


class Mark(Protocol):
    """A moment in the device's work."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from another mark of the same device to this one. Blocks until the device has passed both."""

    def wait(self) -> None:
        """Block until the device has passed it. For any thread."""


class Device(Protocol):
    """asynchronous: the host only queues the work, so times are known later than the work is asked for."""

    @property
    def asynchronous(self) -> bool: ...

    def region(self) -> AbstractContextManager[None]:
        """A compiled region: after what user code has asked for, and before what it asks for next."""

    def mark(self) -> Mark:
        """After all that was asked for so far. Never blocks."""

    def bytes_beside(self, known_bytes: int) -> int:
        """Bytes that are taken on the device beside those the pager knows of, 0 if nobody can tell."""


@dataclass(frozen=True, slots=True)
class WallMark:
    """A reading of the host's clock, which has no particular zero."""

    at_seconds: float

    def seconds_since(self, earlier: WallMark) -> float:
        return self.at_seconds - earlier.at_seconds

    def wait(self) -> None:
        """Nothing to wait for: what was asked for before has been done."""


class CpuDevice:
    """The processor does what is asked for before the call returns."""

    asynchronous = False

    def region(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> WallMark:
        return WallMark(time.perf_counter())

    def bytes_beside(self, known_bytes: int) -> int:
        """0: main memory has other users, and the budget is for what the pager knows of."""
        return 0
