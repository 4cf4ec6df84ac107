"""The copy of one block over a link: what is copied, whether it has ended, how to wait for it; and the queue it waits in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from planner.errors import StorageError
from runtime.storage import Chunk, Slot

if TYPE_CHECKING:
    from runtime.transfer.link import Link

OnDone = Callable[["Transfer"], None]
# Waits until the memory may be read or written, and raises if it never will be. It is called before each chunk, so a second
# call must be cheap.
Ready = Callable[[], None]


@dataclass(slots=True, eq=False, repr=False)
class Transfer:
    """The copy of one block over a link. `Link.submit` makes it. All calls are safe from any thread.

    slot, address: what is copied. The caller owns the memory and keeps it alive until the transfer has ended.
    error: why the transfer failed. None if it has not failed, or has not ended.
    error_after: what `on_done` has raised.

    All other attributes belong to the link and need its lock. `waiting` holds the chunks that have not begun, by drive.
    """

    link: Link
    slot: Slot
    address: int
    chunks: InitVar[tuple[Chunk, ...]]
    on_done: OnDone | None  # None when it has been called
    ready: Ready | None
    done: bool = False
    error: StorageError | None = None
    error_after: Exception | None = None
    waiting: dict[int, deque[Chunk]] = field(default_factory=dict)
    unfinished: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self, chunks: tuple[Chunk, ...]) -> None:
        for chunk in chunks:
            self.waiting.setdefault(chunk.extent.drive, deque()).append(chunk)
        self.unfinished = len(chunks)

    def __repr__(self) -> str:
        state = "failed" if self.error or self.error_after else "done" if self.done else "pending"
        return f"<Transfer {self.link.name} {self.slot.name} {self.bytes} bytes {state}>"

    @property
    def bytes(self) -> int:
        """Size of the slot."""
        return self.slot.size_bytes

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the bytes have moved and `on_done` has returned, for `timeout` seconds at most.

        Raises the StorageError that stopped the transfer. Raises TimeoutError. Without a timeout, raises StorageIOError if a
        drive of the link does not answer. Must not be called from an `on_done`.
        """
        while timeout is None and not self.ended.wait(self.link.health_check_seconds):
            self.link.check()
        if not self.ended.wait(timeout):
            raise TimeoutError(f"{self} has not ended after {timeout} seconds")
        if self.error is not None:
            raise self.error
        if self.error_after is not None:
            raise self.failure_after()

    def failure_after(self) -> StorageError:
        """Return the error that says that `on_done` has raised."""
        failure = StorageError(f"what follows {self} failed: {self.error_after!r}; please report it")
        failure.__cause__ = self.error_after
        return failure

    def promote(self) -> bool:
        """Put the transfer first in the queues of all drives where none of its chunks has begun.

        Return False if there is no such drive, because it has begun on all of them.
        """
        return self.link.promote(self)


class DriveQueue:
    """The transfers of a link that wait for one drive, in the order in which they begin. Not thread-safe: `lock` guards it.

    current: the transfer that has begun on this drive and has chunks left to start.
    submitted: notified when there is something to take.
    """

    def __init__(self, number: int, lock: threading.Lock) -> None:
        self.number = number
        self.queue: deque[Transfer] = deque()
        self.current: Transfer | None = None
        self.submitted = threading.Condition(lock)

    def take(self) -> tuple[Transfer, Chunk] | None:
        """Take the next chunk, None if nothing is waiting. Never waits. If it raises MemoryError, nothing was taken."""
        if self.current is None and not self.queue:
            return None
        transfer = self.current or self.queue[0]
        chunks = transfer.waiting[self.number]
        taken = transfer, chunks[0]
        if self.current is None:
            self.current = self.queue.popleft()
        chunks.popleft()
        if not chunks:
            self.current = None
        return taken
