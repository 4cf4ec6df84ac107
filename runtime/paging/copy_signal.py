"""How the pager's threads share one lock, wait for copies, and hear of copies that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from runtime.device import DeviceMemoryError
from runtime.paging.block import Block, State
from runtime.paging.mover import Mover
from runtime.system import Name, annotate, first_of

CHECK_SECONDS = 1.0
"""Seconds between drive health checks while waiting for a copy."""


class CopySignal:
    """The pager's lock, and the signal that a copy has ended. All calls with the lock held.

    [Note: Locking]
    One lock guards all blocks and all counters. The training thread takes it between stages, I/O threads take it when a copy
    has ended. The public methods of `Pager` and the callbacks of copies take it; all else in this folder is called with it
    held. Whoever frees memory begins the prefetches that wait for room, in the order in which they were asked for.

    condition: notified when a copy has ended or a lent block was given back. lock: that of the condition.
    busy_seconds: returns for how long each link has been copying. now_seconds: the host's clock.
    waited_seconds: seconds that the training thread has waited for copies, for room and for updates on the host.
    exposed_seconds: for each link, the part of its busy seconds in which the training thread waited. The rest was hidden.
    out_of_memory: what the allocator said when the last copy in found no memory. A plan's prefetch is not worth an error: only a
    stage that needs the block asks for it.
    """

    def __init__(
        self,
        *,
        condition: threading.Condition | None = None,
        mover: Mover | None = None,
        busy_seconds: Callable[[], Mapping[str, float]] = dict,
        now_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        lock = threading.RLock()
        self.condition = condition or threading.Condition(lock)
        self.lock: AbstractContextManager[object] = self.condition if condition is not None else lock  # faster than a condition
        self.now_seconds = now_seconds
        self.waited_seconds = 0.0
        self.exposed_seconds: dict[str, float] = {}
        self.out_of_memory: DeviceMemoryError | None = None
        self._mover = mover
        self._busy_seconds = busy_seconds
        self._failure: Exception | None = None
        self._waiting = 0

    def wait(self, what: Name = "for a copy") -> None:
        """Wait until a copy has ended. For the training thread: the time counts.

        what: names the wait for profilers, see [Note: Annotations].
        Raises StorageIOError if a copy has made no progress for too long.
        """
        began, before = self.now_seconds(), self._busy_seconds()
        try:
            with annotate("wait", what):
                while not self._notified(CHECK_SECONDS):
                    self._check()
        finally:
            self.waited_seconds += self.now_seconds() - began
            for link, seconds in self._busy_seconds().items():
                self.exposed_seconds[link] = self.exposed_seconds.get(link, 0.0) + seconds - before[link]

    def poll(self, seconds: float) -> None:
        """Wait for at most so long. For any thread: the time does not count. Raises like `wait`."""
        self._notified(seconds)
        self._check()

    def notify(self) -> None:
        """Wake all threads that wait."""
        if self._waiting:
            self.condition.notify_all()

    def fail(self, failure: Exception) -> None:
        """Keep the error of a copy, or of what follows it, until the training thread asks for it."""
        if isinstance(failure, DeviceMemoryError):
            self.out_of_memory = failure
        else:
            self._failure = failure

    def raise_failure(self) -> None:
        """Raise the error of a copy that has failed since the last call, if one has."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def raise_out_of_memory(self) -> None:
        """Raise `out_of_memory`, if it is set."""
        if self.out_of_memory is not None:
            failure, self.out_of_memory = self.out_of_memory, None
            raise failure

    def _notified(self, seconds: float) -> bool:
        self._waiting += 1
        try:
            return self.condition.wait(seconds)
        finally:
            self._waiting -= 1

    def _check(self) -> None:
        if self._mover is not None:
            self._mover.check()


def awaited(blocks: Sequence[Block]) -> str:
    """Name the blocks that are not on the device, and the tier of the first one, for profilers."""
    away = [block for block in blocks if block.state is not State.ON_DEVICE]
    return f"{first_of([block.name for block in away])} from {away[0].tier}" if away else "for a copy"
