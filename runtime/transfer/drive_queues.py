"""The queues of a link: for each drive, the transfers that wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from runtime.storage import Chunk
from runtime.transfer.transfer import Transfer


class DriveQueue:
    """The transfers that wait for one drive, in the order in which they begin.

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
        transfer.begun = True
        if self.current is None:
            self.current = self.queue.popleft()
        chunks.popleft()
        if not chunks:
            self.current = None
        return taken


class DriveQueues:
    """The queues of all drives of a link. Not thread-safe: `lock`, the link's, guards them."""

    def __init__(self, drives: Sequence[int], lock: threading.Lock) -> None:
        self._drives = {number: DriveQueue(number, lock) for number in drives}

    def __iter__(self) -> Iterator[DriveQueue]:
        return iter(self._drives.values())

    def __len__(self) -> int:
        return len(self._drives)

    def put(self, transfer: Transfer) -> None:
        """Add a transfer at the end of the queues of all drives that it has chunks on."""
        for number, chunks in transfer.waiting.items():
            drive = self._drives[number]
            drive.queue.append(transfer)
            drive.submitted.notify(len(chunks))

    def remove(self, transfer: Transfer) -> bool:
        """Remove a transfer that has not begun on any drive. Return whether it was removed."""
        queues = self._queues_with(transfer)
        if transfer.begun or not queues:
            return False
        for queue in queues:
            queue.remove(transfer)
        return True

    def promote(self, transfer: Transfer) -> bool:
        """Put a transfer first wherever it is queued. Return whether it is queued anywhere."""
        queues = self._queues_with(transfer)
        for queue in queues:
            queue.remove(transfer)
            queue.appendleft(transfer)
        return bool(queues)

    def drop_rest(self, transfer: Transfer) -> None:
        """Drop the chunks of a transfer that have not begun. Those that move are not touched. May be called again."""
        for drive in self:
            if drive.current is transfer:
                drive.current = None
            elif transfer in drive.queue:
                drive.queue.remove(transfer)
        unfinished = transfer.unfinished - sum(len(chunks) for chunks in transfer.waiting.values())
        transfer.waiting = {}
        transfer.unfinished = unfinished

    def drop_queued(self) -> list[Transfer]:
        """Drop all transfers that have not begun. Return those that have begun and have chunks left to start."""
        for drive in self:
            drive.queue.clear()
        return [drive.current for drive in self if drive.current is not None]

    def wake_all(self) -> None:
        """Wake all threads that wait for something to take."""
        for drive in self:
            drive.submitted.notify_all()

    def _queues_with(self, transfer: Transfer) -> list[deque[Transfer]]:
        return [drive.queue for drive in self if transfer in drive.queue]
