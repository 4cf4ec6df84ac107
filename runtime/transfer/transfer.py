"""One block on its way over a link: what is copied, whether it has ended, and how to wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from planner.errors import StorageError
from runtime.storage import Chunk, Slot

OnDone = Callable[["Transfer"], None]
Ready = Callable[[], None]
"""Blocks until the memory may be read or written; raises if it never will be. Called before each piece; again is cheap."""

LOOK_SECONDS = 1.0
"""How often who waits looks whether the drives still answer."""


class BlockTransfers(Protocol):
    """What a transfer asks of its link."""

    name: str

    def check(self) -> None: ...
    def cancel(self, transfer: Transfer) -> bool: ...
    def promote(self, transfer: Transfer) -> bool: ...


class Transfer:
    """One block on its way over a link. Made by `Link.submit`; all calls are safe from any thread.

    slot, address: what is copied; the memory stays the caller's and must live until the transfer has ended.
    error: why it failed, None if it did not, or has not ended. seconds: from the start of the first piece that moved
    to the end of the last one so far, 0 until one has ended.

    The other attributes are the link's, under its lock: `waiting` are the pieces that have not begun, by drive.
    """

    __slots__ = (
        "address",
        "begun",
        "begun_at",
        "cancelled",
        "done",
        "ended",
        "error",
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
        link: BlockTransfers,
        slot: Slot,
        address: int,
        pieces: tuple[Chunk, ...],
        on_done: OnDone,
        ready: Ready | None,
    ) -> None:
        self.slot = slot
        self.address = address
        self.done = False
        self.cancelled = False
        self.error: StorageError | None = None
        self.seconds = 0.0
        self.link = link
        self.waiting: dict[int, deque[Chunk]] = {}
        for piece in pieces:
            self.waiting.setdefault(piece.extent.drive, deque()).append(piece)
        self.unfinished = len(pieces)
        self.on_done = on_done
        self.ready = ready
        self.begun = False
        self.begun_at: float | None = None
        self.ended = threading.Event()

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "failed" if self.error else "done" if self.done else "pending"
        return f"<Transfer {self.link.name} {self.slot.name} {self.bytes} bytes {state}>"

    @property
    def bytes(self) -> int:
        """Size of the slot."""
        return self.slot.size_bytes

    def wait(self, timeout: float | None = None) -> None:
        """Block until the bytes have moved and `on_done` has returned, for `timeout` seconds at most.

        Raises the StorageError that stopped it, also one that says it was cancelled; TimeoutError; without a timeout,
        StorageIOError where a drive of the link does not answer. Must not be called from an `on_done`.
        """
        while timeout is None and not self.ended.wait(LOOK_SECONDS):
            self.link.check()
        if not self.ended.wait(timeout):
            raise TimeoutError(f"{self} has not ended after {timeout} seconds")
        if self.cancelled:
            raise StorageError(f"{self} was cancelled before it began; submit it again")
        if self.error is not None:
            raise self.error

    def cancel(self) -> bool:
        """Take it out of all queues. True if it had not begun: then nothing moves, and `on_done` is never called."""
        return self.link.cancel(self)

    def promote(self) -> bool:
        """On each drive where none of its pieces has begun, let them begin before all others that have not.

        False if there is no such drive: it has begun on all of them, or was cancelled.
        """
        return self.link.promote(self)
