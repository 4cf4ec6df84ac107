"""The copy of one block over a link: what is copied, whether it has ended, and how to wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from planner.errors import StorageError
from runtime.storage import Chunk, Slot

OnDone = Callable[["Transfer"], None]
Ready = Callable[[], None]
"""Waits until the memory may be read or written, and raises if it never will be. It is called before each chunk, so a second
call must be cheap."""


class TransferLink(Protocol):
    """What a transfer needs from its link. health_check_seconds: time between two calls of `check` while waiting."""

    name: str
    health_check_seconds: float

    def check(self) -> None: ...
    def cancel(self, transfer: Transfer) -> bool: ...
    def promote(self, transfer: Transfer) -> bool: ...


class Transfer:
    """The copy of one block over a link. `Link.submit` makes it. All calls are safe from any thread.

    slot, address: what is copied. The caller owns the memory and keeps it alive until the transfer has ended.
    error: why the transfer failed. None if it has not failed, or has not ended.
    error_after: what `on_done` has raised.
    seconds: from the start of the first chunk to the end of the last one so far. 0 until a chunk has ended.

    All other attributes belong to the link and need its lock. `waiting` holds the chunks that have not begun, by drive.
    """

    __slots__ = (
        "address",
        "begun",
        "begun_at",
        "cancelled",
        "done",
        "ended",
        "error",
        "error_after",
        "link",
        "on_done",
        "ready",
        "seconds",
        "slot",
        "unfinished",
        "waiting",
    )

    def __init__(
        self,
        link: TransferLink,
        slot: Slot,
        address: int,
        chunks: tuple[Chunk, ...],
        on_done: OnDone,
        ready: Ready | None,
    ) -> None:
        self.slot = slot
        self.address = address
        self.done = False
        self.cancelled = False
        self.error: StorageError | None = None
        self.error_after: Exception | None = None
        self.seconds = 0.0
        self.link = link
        self.waiting: dict[int, deque[Chunk]] = {}
        for chunk in chunks:
            self.waiting.setdefault(chunk.extent.drive, deque()).append(chunk)
        self.unfinished = len(chunks)
        self.on_done: OnDone | None = on_done  # None when it has been called
        self.ready = ready
        self.begun = False
        self.begun_at: float | None = None
        self.ended = threading.Event()

    def __repr__(self) -> str:
        state = (
            "cancelled" if self.cancelled else "failed" if self.error or self.error_after else "done" if self.done else "pending"
        )
        return f"<Transfer {self.link.name} {self.slot.name} {self.bytes} bytes {state}>"

    @property
    def bytes(self) -> int:
        """Size of the slot."""
        return self.slot.size_bytes

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the bytes have moved and `on_done` has returned, for `timeout` seconds at most.

        Raises the StorageError that stopped the transfer, or that says it was cancelled. Raises TimeoutError. Without a
        timeout, raises StorageIOError if a drive of the link does not answer. Must not be called from an `on_done`.
        """
        while timeout is None and not self.ended.wait(self.link.health_check_seconds):
            self.link.check()
        if not self.ended.wait(timeout):
            raise TimeoutError(f"{self} has not ended after {timeout} seconds")
        if self.cancelled:
            raise StorageError(f"{self} was cancelled before it began; submit it again")
        if self.error is not None:
            raise self.error
        if self.error_after is not None:
            raise self.failure_after()

    def failure_after(self) -> StorageError:
        """Return the error that says that `on_done` has raised."""
        failure = StorageError(f"what follows {self} failed: {self.error_after!r}; please report it")
        failure.__cause__ = self.error_after
        return failure

    def cancel(self) -> bool:
        """Remove the transfer from all queues, if it has not begun. Return whether it was removed.

        If it was, nothing moves, and `on_done` is never called.
        """
        return self.link.cancel(self)

    def promote(self) -> bool:
        """Put the transfer first in the queues of all drives where none of its chunks has begun.

        Return False if there is no such drive, because it has begun on all of them or was cancelled.
        """
        return self.link.promote(self)
