"""One direction between two tiers: a queue of transfers for each drive, served in order by I/O threads of its own.

[Note: Order on a link]
Each drive of the tier has a queue and I/O threads of its own, so that a slow drive holds up its own pieces only. A
transfer is cut in pieces, which go to the queues of their drives when it is submitted. On each drive transfers begin
in the order in which they were submitted, but for those that are promoted: whichever of its threads is idle takes the
next piece, and the next transfer begins there when the one before has no pieces left to start. So all threads of a
drive are busy as long as anything is queued for it, a transfer never waits for a later one, and it ends when its
pieces on all drives have.

[Note: Memory that is not ready]
A transfer can be submitted before its memory may be touched: a kernel of the GPU is still writing or reading it. The
I/O thread that takes a piece calls `ready` first, which blocks until then. Meanwhile that thread holds the place in
the queue, so `ready` must not wait for a later transfer of the same link. No drive is to blame for that time: it
counts neither as the link's work nor as a drive that does not answer.

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
from collections.abc import Callable, Sequence

from planner.errors import StorageError, StorageIOError
from runtime.storage import Chunk, Slot, align_up, cut
from runtime.system import annotate
from runtime.transfer.meter import Meter
from runtime.transfer.transfer import LOOK_SECONDS, OnDone, Ready, Transfer

__all__ = ["MAX_THREADS", "Link", "OnDone", "Ready", "Transfer"]

MovePiece = Callable[[Slot, Chunk, int], None]

MAX_THREADS = 16
"""I/O threads of a link at most, all drives together, unless there are more drives."""


class _Drive:
    """The queue of one drive, guarded by the link's lock. current: has begun here, but has pieces left to start."""

    def __init__(self, number: int, lock: threading.Lock) -> None:
        self.number = number
        self.queue: deque[Transfer] = deque()
        self.current: Transfer | None = None
        self.submitted = threading.Condition(lock)


class Link:
    """One direction between two tiers, see [Note: Order on a link].

    move: carries one piece; blocks; raises StorageError. drives: those that slots may lie on. threads: I/O threads of
    each drive; fewer where all together would be more than MAX_THREADS. piece_bytes: a block is cut in pieces of at
    least this size, if it can be at all. stuck_after_seconds: see `check`.
    """

    def __init__(
        self, name: str, move: MovePiece, *, drives: Sequence[int], threads: int, piece_bytes: int, stuck_after_seconds: float
    ) -> None:
        self.name = name
        self._process = os.getpid()
        self._move = move
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._drives = {number: _Drive(number, self._lock) for number in drives}
        self._closed = False
        self._failure: StorageError | None = None
        self._stuck_after_seconds = stuck_after_seconds
        self._meter = Meter()
        threads = max(1, min(threads, MAX_THREADS // len(self._drives)))
        self._threads = [
            threading.Thread(target=self._serve, args=[drive], name=f"teraio {name} {index}.{number}", daemon=True)
            for index, drive in enumerate(self._drives.values())
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def thread_count(self) -> int:
        """Its I/O threads, all drives together."""
        return len(self._threads)

    @property
    def moved_bytes(self) -> int:
        """Bytes that have been moved since the start."""
        return self._meter.moved_bytes

    @property
    def busy_seconds(self) -> float:
        """Time during which at least one piece was moving, up to now."""
        with self._lock:
            return self._meter.busy_seconds

    @property
    def bytes_per_second(self) -> float:
        """What the link has carried while it was busy, 0 before it has carried anything."""
        busy = self.busy_seconds
        return self.moved_bytes / busy if busy else 0.0

    def submit(self, slot: Slot, address: int, on_done: OnDone, ready: Ready | None = None) -> Transfer:
        """Queue the copy of a whole slot from or to `address` (aligned). Never blocks.

        ready: see [Note: Memory that is not ready]; an exception from it fails the transfer. `on_done` is called
        exactly once in an I/O thread, also after an error, with `done` and `error` set; it should be short. Raises
        StorageError if the link is closed, or an `on_done` before has raised (then once, from it).
        """
        if os.getpid() != self._process:
            raise StorageError(
                f"block {slot.name!r} cannot move in a forked child, which has no I/O threads; train in the "
                "process that compiled the model, or start children with the spawn method"
            )
        transfer = Transfer(self, slot, address, cut(slot, self._piece_bytes_of(slot)), on_done, ready)
        with self._lock:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._closed:
                raise StorageError(f"the link {self.name} is closed: block {slot.name!r} cannot move any more")
            for number, pieces in transfer.waiting.items():
                drive = self._drives[number]
                drive.queue.append(transfer)
                drive.submitted.notify(len(pieces))
        return transfer

    def check(self) -> None:
        """Raises StorageIOError, naming file and block, if a piece has been moving for `stuck_after_seconds`; see
        [Note: Stuck drives]. Never blocks."""
        with self._lock:
            now = time.perf_counter()
            for (transfer, piece), begun in self._meter.moving.items():
                if now - begun >= self._stuck_after_seconds:
                    verb = "write" if self.name.startswith("device->") else "read"
                    raise StorageIOError(
                        path=str(piece.extent.path),
                        block=transfer.slot.name,
                        errno=errno.ETIMEDOUT,
                        action=f"{verb} (no answer in {self._stuck_after_seconds:g} s)",
                    )

    def close(self, *, drop_queued: bool = False, timeout_seconds: float | None = None) -> None:
        """Take no more transfers, let all that were submitted end, and join the threads. Blocks, also as long as a
        `ready` does. May be called again.

        drop_queued: for the process's exit: no piece begins any more. Transfers that have pieces left never end, or end
        with an error. Raises StorageError if an `on_done` has raised that nobody has heard of yet, or a drive does not
        answer: then no piece begins any more either.
        """
        if os.getpid() != self._process:  # the threads, and whoever holds the lock, are the parent's
            return
        with self._lock:
            self._closed = True
            if drop_queued:
                self._drop_queued()
            for drive in self._drives.values():
                drive.submitted.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                self._join(thread, timeout_seconds)
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _join(self, thread: threading.Thread, timeout_seconds: float | None) -> None:
        if timeout_seconds is not None:
            return thread.join(timeout_seconds)
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            try:
                self.check()
            except StorageIOError:
                with self._lock:
                    self._drop_queued()
                raise

    def _drop_queued(self) -> None:
        for drive in self._drives.values():
            drive.queue.clear()
            if (transfer := drive.current) is not None:
                transfer.error = transfer.error or StorageError(f"{transfer} was cut short: the link {self.name} was closed")
                self._leave_out_the_rest(transfer)

    def _piece_bytes_of(self, slot: Slot) -> int:
        """One piece for each thread, but none too small: each waits for the interpreter's lock."""
        return max(self._piece_bytes, align_up(-(-slot.size_bytes // len(self._threads))))

    # -- the I/O threads

    def _serve(self, drive: _Drive) -> None:
        while (taken := self._take(drive)) is not None:
            transfer, piece = taken
            error = self._carry(transfer, piece)
            if self._finish(transfer, piece, error):
                self._deliver(transfer)
            del taken, transfer, piece, error  # an idle thread holds on to no block

    def _take(self, drive: _Drive) -> tuple[Transfer, Chunk] | None:
        """The next piece on a drive, None once the link is closed and nothing is left to begin there. Blocks."""
        with self._lock:
            while drive.current is None and not drive.queue:
                if self._closed:
                    return None
                drive.submitted.wait()
            transfer = drive.current or drive.queue.popleft()
            transfer.begun = True
            pieces = transfer.waiting[drive.number]
            piece = pieces.popleft()
            drive.current = transfer if pieces else None
            if transfer.ready is None:
                self._meter.start(transfer, piece)
            return transfer, piece

    def _carry(self, transfer: Transfer, piece: Chunk) -> StorageError | None:
        """Move a piece as soon as its memory is ready. Gives what went wrong. Blocks."""
        waits_for_memory = transfer.ready is not None
        try:
            if transfer.ready is not None:
                transfer.ready()
                waits_for_memory = False
                with self._lock:
                    self._meter.start(transfer, piece)
            with annotate("copy", lambda: f"{transfer.slot.name} {self.name}"):
                self._move(transfer.slot, piece, transfer.address)
        except StorageError as failure:
            return failure
        except Exception as failure:  # whatever it is, whoever waits for the transfer must hear of it
            why = "this is a bug in teraio, please report it"
            if waits_for_memory:
                why = "its memory did not become ready: look for the first error of the device, which this one follows"
            error = StorageError(f"{transfer} failed: {failure!r}; {why}")
            error.__cause__ = failure
            return error
        return None

    def _finish(self, transfer: Transfer, piece: Chunk, error: StorageError | None) -> bool:
        """Book a piece that has moved or failed. True if it was the transfer's last."""
        with self._lock:
            self._meter.stop(transfer, piece, moved=error is None)
            transfer.unfinished -= 1
            if error is not None and transfer.error is None:
                transfer.error = error
                self._leave_out_the_rest(transfer)
            if transfer.unfinished:
                return False
            transfer.ready = None  # it may hold memory
            transfer.done = True
            return True

    def _leave_out_the_rest(self, transfer: Transfer) -> None:
        for number, pieces in transfer.waiting.items():
            drive = self._drives[number]
            transfer.unfinished -= len(pieces)
            if drive.current is transfer:
                drive.current = None
            elif transfer in drive.queue:  # not so if the queue was dropped
                drive.queue.remove(transfer)
        transfer.waiting.clear()

    def _deliver(self, transfer: Transfer) -> None:
        try:
            transfer.on_done(transfer)
        except Exception as error:
            failure = StorageError(f"what follows {transfer} failed: {error!r}; please report it")
            failure.__cause__ = error
            transfer.error = transfer.error or failure
            with self._lock:
                self._failure = self._failure or failure
            here = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, here)))
        finally:
            transfer.ended.set()

    # -- for Transfer

    def cancel(self, transfer: Transfer) -> bool:
        """See `Transfer.cancel`."""
        with self._lock:
            queues = [drive.queue for drive in self._drives.values() if transfer in drive.queue]
            if transfer.begun or not queues:
                return False
            for queue in queues:
                queue.remove(transfer)
            transfer.cancelled = True
        transfer.ended.set()
        return True

    def promote(self, transfer: Transfer) -> bool:
        """See `Transfer.promote`."""
        with self._lock:
            queues = [drive.queue for drive in self._drives.values() if transfer in drive.queue]
            for queue in queues:
                queue.remove(transfer)
                queue.appendleft(transfer)
            return bool(queues)
