"""One direction between two tiers: a queue of transfers, served in order by several I/O threads.

[Note: Order on a link]
Transfers begin in the order in which they were submitted, but for those that are promoted. Each is cut in
pieces, and whichever thread is idle takes the next piece; the next transfer begins when the one before has no
pieces left to start. So all threads are busy as long as anything is queued, and a transfer never waits for a
later one.

[Note: Stuck drives]
A call to a drive that does not answer any more (a dead disk, a network file system without its server) never returns,
and nothing can interrupt it. So nobody waits for it without looking: `check` tells when a piece takes too long, and
`close` leaves the thread behind, a daemon, which then keeps no process alive.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from planner.errors import StorageError, StorageIOError
from runtime.storage.store import Piece, Slot, align_up, cut

MovePiece = Callable[[Slot, Piece, int], None]
_LOOK_SECONDS = 1.0


class Transfer:
    """One block on its way over a link. Made by `Link.submit`; all calls are safe from any thread.

    slot, address: what is copied; the memory stays the caller's and must live until the transfer has ended.
    error: why it failed, None if it did not, or has not ended. seconds: from its first piece's start to its
    last piece's end, 0 until then.
    """

    __slots__ = (
        "_begun_at", "_ended", "_link", "_on_done", "_pieces", "_unfinished",
        "address", "cancelled", "done", "error", "seconds", "slot",
    )  # fmt: skip

    def __init__(
        self, link: Link, slot: Slot, address: int, pieces: deque[Piece], on_done: Callable[[Transfer], None]
    ) -> None:
        self.slot = slot
        self.address = address
        self.done = False
        self.cancelled = False
        self.error: StorageError | None = None
        self.seconds = 0.0
        self._link = link
        self._pieces = pieces
        self._unfinished = len(pieces)
        self._on_done = on_done
        self._begun_at = 0.0
        self._ended = threading.Event()

    def __repr__(self) -> str:
        state = (
            "cancelled" if self.cancelled else "failed" if self.error else "done" if self.done else "pending"
        )
        return f"<Transfer {self._link.name} {self.slot.name} {self.bytes} bytes {state}>"

    @property
    def bytes(self) -> int:
        """Size of the slot."""
        return self.slot.size_bytes

    def wait(self, timeout: float | None = None) -> None:
        """Block until the bytes have moved and `on_done` has returned, for `timeout` seconds at most.

        Raises the StorageError that stopped it, also one that says it was cancelled; TimeoutError; without a timeout,
        StorageIOError where the drive does not answer. Must not be called from an `on_done`.
        """
        while timeout is None and not self._ended.wait(_LOOK_SECONDS):
            self._link.check()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self} has not ended after {timeout} seconds")
        if self.cancelled:
            raise StorageError(f"{self} was cancelled before it began; submit it again")
        if self.error is not None:
            raise self.error

    def cancel(self) -> bool:
        """Take it out of the queue. True if it had not begun: then nothing moves, and `on_done` is never
        called."""
        return self._link._cancel(self)

    def promote(self) -> bool:
        """Let it begin before all others that have not. False if it has begun already, or was cancelled."""
        return self._link._promote(self)


class Link:
    """One direction between two tiers, see [Note: Order on a link].

    move: carries one piece; blocks; raises StorageError. threads: I/O threads. piece_bytes: a block is cut in
    pieces of at least this size, if it can be at all. stuck_after_seconds: see `check`.
    """

    def __init__(
        self, name: str, move: MovePiece, *, threads: int, piece_bytes: int, stuck_after_seconds: float
    ) -> None:
        self.name = name
        self._process = os.getpid()
        self._move = move
        self._piece_bytes = piece_bytes
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[Transfer] = deque()
        self._current: Transfer | None = None
        self._closed = False
        self._failure: StorageError | None = None
        self._stuck_after_seconds = stuck_after_seconds
        self._in_flight: dict[tuple[Transfer, Piece], float] = {}
        self._moving = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._moved_bytes = 0
        self._threads = [
            threading.Thread(target=self._serve, name=f"teraio {name} {number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def moved_bytes(self) -> int:
        """Bytes that have been moved since the start."""
        return self._moved_bytes

    @property
    def busy_seconds(self) -> float:
        """Time during which at least one piece was moving, up to now."""
        with self._changed:
            since = time.perf_counter() - self._busy_since if self._moving else 0.0
            return self._busy_seconds + since

    @property
    def bytes_per_second(self) -> float:
        """What the link has carried while it was busy, 0 before it has carried anything."""
        busy = self.busy_seconds
        return self._moved_bytes / busy if busy else 0.0

    def submit(self, slot: Slot, address: int, on_done: Callable[[Transfer], None]) -> Transfer:
        """Queue the copy of a whole slot from or to `address` (aligned). Never blocks.

        `on_done` is called exactly once in an I/O thread, also after an error, with `done` and `error` set;
        it should be short. Raises StorageError if the link is closed, or an `on_done` before has raised (then
        once, from it).
        """
        if os.getpid() != self._process:
            raise StorageError(
                f"block {slot.name!r} cannot move in a forked child, which has no I/O threads; train in the "
                "process that compiled the model, or start children with the spawn method"
            )
        transfer = Transfer(self, slot, address, deque(cut(slot, self._piece_bytes_of(slot))), on_done)
        with self._changed:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._closed:
                raise StorageError(
                    f"the link {self.name} is closed: block {slot.name!r} cannot move any more"
                )
            self._queue.append(transfer)
            self._changed.notify(transfer._unfinished)
        return transfer

    def check(self) -> None:
        """Raises StorageIOError, naming file and block, if a piece has been moving for `stuck_after_seconds`; see
        [Note: Stuck drives]. Never blocks."""
        with self._changed:
            now = time.perf_counter()
            for (transfer, piece), begun in self._in_flight.items():
                if now - begun >= self._stuck_after_seconds:
                    verb = "write" if self.name.startswith("device->") else "read"
                    raise StorageIOError(
                        path=str(piece.extent.path),
                        block=transfer.slot.name,
                        errno=errno.ETIMEDOUT,
                        action=f"{verb} (no answer in {self._stuck_after_seconds:g} s)",
                    )

    def close(self, *, drop_queued: bool = False, timeout_seconds: float | None = None) -> None:
        """Take no more transfers, let all that were submitted end, and join the threads. Blocks. May be
        called again.

        drop_queued: forget those that have not begun (their `on_done` is never called), for the process's
        exit. Raises StorageError if an `on_done` has raised that nobody has heard of yet, or a drive does not answer:
        then nothing that is queued begins any more.
        """
        if os.getpid() != self._process:  # the threads, and whoever holds the lock, are the parent's
            return
        with self._changed:
            self._closed = True
            if drop_queued:
                self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                self._join(thread, timeout_seconds)
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _join(self, thread: threading.Thread, timeout_seconds: float | None) -> None:
        if timeout_seconds is not None:
            thread.join(timeout_seconds)
            return
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            try:
                self.check()
            except StorageIOError:
                with self._changed:
                    self._queue.clear()
                raise

    def _piece_bytes_of(self, slot: Slot) -> int:
        """One piece for each thread, but none too small: each waits for the interpreter's lock."""
        return max(self._piece_bytes, align_up(-(-slot.size_bytes // len(self._threads))))

    # -- the I/O threads

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            transfer, piece = taken
            error: StorageError | None = None
            try:
                self._move(transfer.slot, piece, transfer.address)
            except StorageError as failure:
                error = failure
            except Exception as failure:  # whatever it is, whoever waits for the transfer must hear of it
                error = StorageError(
                    f"{transfer} failed: {failure!r}; this is a bug in teraio, please report it"
                )
                error.__cause__ = failure
            if self._finish(transfer, piece, error):
                self._deliver(transfer)
            del taken, transfer, piece, error  # an idle thread holds on to no block

    def _take(self) -> tuple[Transfer, Piece] | None:
        """The next piece, None once the link is closed and nothing is left to begin. Blocks."""
        with self._changed:
            while self._current is None and not self._queue:
                if self._closed:
                    return None
                self._changed.wait()
            now = time.perf_counter()
            if self._current is None:
                self._current = self._queue.popleft()
                self._current._begun_at = now
            transfer = self._current
            piece = transfer._pieces.popleft()
            if not transfer._pieces:
                self._current = None
            if self._moving == 0:
                self._busy_since = now
            self._moving += 1
            self._in_flight[transfer, piece] = now
            return transfer, piece

    def _finish(self, transfer: Transfer, piece: Piece, error: StorageError | None) -> bool:
        """Book a piece that has moved or failed. True if it was the transfer's last."""
        with self._changed:
            now = time.perf_counter()
            self._moving -= 1
            del self._in_flight[transfer, piece]
            if self._moving == 0:
                self._busy_seconds += now - self._busy_since
            transfer._unfinished -= 1
            if error is None:
                self._moved_bytes += piece.length_bytes
            elif transfer.error is None:
                transfer.error = error
                transfer._unfinished -= len(transfer._pieces)
                transfer._pieces.clear()
                if self._current is transfer:
                    self._current = None
            if transfer._unfinished:
                return False
            transfer.seconds = now - transfer._begun_at
            transfer.done = True
            return True

    def _deliver(self, transfer: Transfer) -> None:
        try:
            transfer._on_done(transfer)
        except Exception as error:
            failure = StorageError(f"what follows {transfer} failed: {error!r}; please report it")
            failure.__cause__ = error
            transfer.error = transfer.error or failure
            with self._changed:
                self._failure = self._failure or failure
            here = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, here)))
        finally:
            transfer._ended.set()

    # -- for Transfer

    def _cancel(self, transfer: Transfer) -> bool:
        with self._changed:
            if transfer not in self._queue:
                return False
            self._queue.remove(transfer)
            transfer.cancelled = True
        transfer._ended.set()
        return True

    def _promote(self, transfer: Transfer) -> bool:
        with self._changed:
            if transfer not in self._queue:
                return False
            self._queue.remove(transfer)
            self._queue.appendleft(transfer)
            return True
