"""One direction between two tiers: its I/O threads copy blocks in order, each drive with a queue and threads of its own.

[Note: Order on a link]
Each drive of the tier has a queue and I/O threads of its own, so that a slow drive delays only its own chunks.
`submit` cuts a transfer into chunks and puts them into the queues of their drives. On each drive, transfers begin in the
order in which they were submitted, except for those that are promoted. An idle thread of the drive takes the next chunk; the
next transfer begins there when the one before has no chunks left to start. So all threads of a drive are busy as long as
anything is queued for it, and a transfer never waits for a later one. A transfer ends when its chunks on all drives have
ended.

[Note: Memory that is not ready]
A transfer may be submitted while a kernel of the GPU still writes or reads its memory. The I/O thread that takes a chunk
calls `ready` first, which waits until the memory may be touched. Meanwhile the thread keeps its place in the queue, so
`ready` must not wait for a later transfer of the same link. The drive does not cause this wait: it counts neither as work of
the link nor as a drive that does not answer.

[Note: Stuck drives]
A call to a drive that no longer answers (a dead disk, a network file system without its server) never returns, and nothing
can interrupt it. So a thread that waits for a transfer calls `check` again and again, which raises if a chunk takes too long.
`close` then leaves the I/O thread behind. It is a daemon thread, which does not keep the process alive.

[Note: I/O threads without memory]
An I/O thread that ended because memory ran out would leave transfers that never end. So each of its steps can be done again:
it changes nothing until nothing more can fail, and the thread repeats it. A chunk that is copied twice has the same bytes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from planner.errors import StorageError, StorageIOError
from runtime.storage import Chunk, Slot, align_up, cut_slot
from runtime.system import annotate

MoveIfNeeded = Callable[[Slot, Chunk, int], bool | None]
OnDone = Callable[["Transfer"], None]
# Waits until the memory may be read or written, and raises if it never will be. It is called before each chunk, so a second
# call must be cheap.
Ready = Callable[[], None]

# Highest number of I/O threads of a link over all drives. A link with more drives than this has one thread per drive.
_MAX_THREADS = 16


class Link:
    """One direction between two tiers, see [Note: Order on a link].

    move: copies one chunk and waits until it is copied. Raises StorageError. Returns False if that was not needed, because its
    bytes are there already: such chunks do not count as moved.
    drives: all drives that slots may lie on.
    threads: I/O threads per drive, but at most _MAX_THREADS in all.
    chunk_bytes: the smallest size of a chunk, except for the end of an extent.
    stuck_after_seconds: a chunk that takes longer is an error, see `check`.
    moved_bytes: bytes that have been moved since the start.
    """

    health_check_seconds = 1.0  # between two calls of `check` by a thread that waits for a transfer or for the end

    def __init__(
        self,
        name: str,
        move: MoveIfNeeded,
        *,
        drives: Sequence[int],
        threads: int,
        chunk_bytes: int,
        stuck_after_seconds: float,
    ) -> None:
        self.name = name
        self.moved_bytes = 0
        self._process = os.getpid()
        self._move = move
        self._chunk_bytes = chunk_bytes
        self._stuck_after_seconds = stuck_after_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._failed: Transfer | None = None
        self._moving: dict[tuple[Transfer, Chunk], float] = {}  # the chunks that move now, and when each of them began
        self._busy_since = self._busy_seconds = 0.0
        self._drives: dict[int, DriveQueue] = {}
        self._threads_per_drive = max(1, min(threads, _MAX_THREADS // len(drives)))
        self._threads: list[threading.Thread] = []
        for number in drives:
            self.add_drive(number)

    def add_drive(self, number: int) -> None:
        """Serve this drive as well from now on, if it does not yet."""
        with self._lock:
            if number in self._drives or self._closed:
                return
            self._drives[number] = drive = DriveQueue(number, self._lock)
            index = len(self._threads) // self._threads_per_drive
            for each in range(self._threads_per_drive):
                name = f"teraio {self.name} {index}.{each}"
                self._threads.append(threading.Thread(target=self._serve, args=[drive], name=name, daemon=True))
                self._threads[-1].start()

    @property
    def thread_count(self) -> int:
        """Number of its I/O threads over all drives."""
        return len(self._threads)

    @property
    def busy_seconds(self) -> float:
        """Time during which at least one chunk was moving, until now."""
        with self._lock:
            return self._busy_seconds + (time.perf_counter() - self._busy_since if self._moving else 0.0)

    def submit(self, slot: Slot, address: int, on_done: OnDone, ready: Ready | None = None) -> Transfer:
        """Queue the copy of a whole slot from or to `address` (aligned). Never waits.

        ready: see [Note: Memory that is not ready]. An exception from it fails the transfer.
        on_done: is called exactly once in an I/O thread, also after an error, when `done` and `error` are set. It should be
        short.
        Raises StorageError if the link is closed. Raises it once if an earlier `on_done` has raised, with that error.
        """
        if os.getpid() != self._process:
            raise StorageError(
                f"block {slot.name!r} cannot move in a forked child, which has no I/O threads; train in the "
                "process that compiled the model, or start children with the spawn method"
            )
        # One chunk for each thread, but no small ones: each chunk waits for the interpreter's lock.
        chunk_bytes = max(self._chunk_bytes, align_up(-(-slot.size_bytes // len(self._threads))))
        transfer = Transfer(self, slot, address, cut_slot(slot, chunk_bytes), on_done, ready)
        with self._lock:
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed.failure_after()
            if self._closed:
                raise StorageError(f"the link {self.name} is closed: block {slot.name!r} cannot move any more")
            try:
                for number, chunks in transfer.waiting.items():
                    self._drives[number].queue.append(transfer)
                    self._drives[number].submitted.notify(len(chunks))
            except BaseException:
                for queue in self._queues_with(transfer):
                    queue.remove(transfer)  # the caller may free the memory
                raise
        return transfer

    def check(self) -> None:
        """Raise StorageIOError, naming file and block, if a chunk has been moving for `stuck_after_seconds`. Never waits.

        See [Note: Stuck drives].
        """
        with self._lock:
            now = time.perf_counter()
            for (transfer, chunk), begun in self._moving.items():
                if now - begun >= self._stuck_after_seconds:
                    verb = "write" if self.name.startswith("device->") else "read"
                    raise StorageIOError(
                        path=str(chunk.extent.path),
                        block=transfer.slot.name,
                        errno=errno.ETIMEDOUT,
                        action=f"{verb} (no answer in {self._stuck_after_seconds:g} s)",
                    )

    def close(self, *, within_seconds: float | None = None) -> None:
        """Take no more transfers, wait until all that were submitted have ended, and join the threads. May be called again.

        This also waits for every `ready`.
        within_seconds: for the exit of the process: the longest wait for each thread. No further chunk begins. A transfer with
        chunks left never ends, or ends with an error.
        Raises StorageError if an `on_done` has raised and `submit` has not reported it yet. Raises StorageIOError if a drive
        does not answer; then no further chunk begins either.
        """
        if os.getpid() != self._process:  # the threads belong to the parent, and one of them may hold the lock
            return
        with self._lock:
            self._closed = True
            if within_seconds is not None:
                self._drop_queued()
            for drive in self._drives.values():
                drive.submitted.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                self._join(thread, within_seconds)
        with self._lock:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed.failure_after()

    def _join(self, thread: threading.Thread, timeout_seconds: float | None) -> None:
        if timeout_seconds is not None:
            return thread.join(timeout_seconds)
        while thread.is_alive():
            thread.join(self.health_check_seconds)
            try:
                self.check()
            except StorageIOError:
                with self._lock:
                    self._drop_queued()
                raise

    def _queues_with(self, transfer: Transfer) -> list[deque[Transfer]]:
        return [drive.queue for drive in self._drives.values() if transfer in drive.queue]

    def _drop_queued(self) -> None:
        """Drop what has not begun. What has, and has chunks left to start, fails."""
        for drive in self._drives.values():
            drive.queue.clear()
        for transfer in [drive.current for drive in self._drives.values() if drive.current is not None]:
            transfer.error = transfer.error or StorageError(f"{transfer} was cut short: the link {self.name} was closed")
            self._drop_rest(transfer)

    def _drop_rest(self, transfer: Transfer) -> None:
        """Drop the chunks of a transfer that have not begun. Those that move are not touched. May be called again."""
        for drive in self._drives.values():
            if drive.current is transfer:
                drive.current = None
            elif transfer in drive.queue:
                drive.queue.remove(transfer)
        unfinished = transfer.unfinished - sum(len(chunks) for chunks in transfer.waiting.values())
        transfer.waiting = {}
        transfer.unfinished = unfinished

    # -- the I/O threads

    def _serve(self, drive: DriveQueue) -> None:
        taken = outcome = is_last = None
        while True:
            try:
                taken = taken or self._take(drive)
                if taken is None:
                    return
                outcome = outcome or self._move_when_ready(*taken)
                if is_last is None:
                    is_last = self._finish(*taken, *outcome)
                if is_last:
                    self._deliver(taken[0])
            except MemoryError:
                continue  # see [Note: I/O threads without memory]
            taken = outcome = is_last = None  # an idle thread must not keep a block alive

    def _take(self, drive: DriveQueue) -> tuple[Transfer, Chunk] | None:
        """Wait for the next chunk of a drive. Return None if the link is closed and nothing is left to begin there."""
        with self._lock:
            while (taken := drive.take()) is None:
                if self._closed:
                    return None
                drive.submitted.wait()
            return taken

    def _move_when_ready(self, transfer: Transfer, chunk: Chunk) -> tuple[bool, StorageError | None]:
        """Wait until the memory is ready, then copy a chunk if needed. Return whether bytes moved, and what went wrong."""
        waits_for_memory = transfer.ready is not None
        try:
            if transfer.ready is not None:
                transfer.ready()
                waits_for_memory = False
            with self._lock:
                begun = time.perf_counter()
                if not self._moving:
                    self._busy_since = begun
                self._moving[transfer, chunk] = begun
            with annotate("copy", transfer.slot.name, self.name):
                return self._move(transfer.slot, chunk, transfer.address) is not False, None
        except StorageError as failure:
            return False, failure
        except Exception as failure:  # any error must reach the thread that waits for the transfer
            why = "this is a bug in teraio, please report it"
            if waits_for_memory:
                why = "its memory did not become ready: look for the first error of the device, which this one follows"
            if isinstance(failure, MemoryError):
                why = "the process has no memory left"
            error = StorageError(f"{transfer} failed: {failure!r}; {why}")
            error.__cause__ = failure
            return False, error

    def _finish(self, transfer: Transfer, chunk: Chunk, moved: bool, error: StorageError | None) -> bool:
        """Note that a chunk has moved, was there already, or failed. Return whether it was the last one of the transfer."""
        with self._lock:
            if self._moving.pop((transfer, chunk), None) is not None:  # else it failed before it began to move
                if not self._moving:
                    self._busy_seconds += time.perf_counter() - self._busy_since
                if moved:
                    self.moved_bytes += chunk.length_bytes
            if error is not None and transfer.error is None:
                self._drop_rest(transfer)  # before the error is noted: this step may be done again
                transfer.error = error
            transfer.unfinished -= 1
            if transfer.unfinished:
                return False
            transfer.ready = None  # it may keep memory alive
            transfer.done = True
            return True

    def _deliver(self, transfer: Transfer) -> None:
        on_done, transfer.on_done = transfer.on_done, None
        try:
            if on_done is not None:
                on_done(transfer)
        except Exception as error:
            transfer.error_after = error
            # Who waits hears of it, or else the next submit or `close`; the log shows it at once.
            with self._lock:
                self._failed = self._failed or transfer
            here = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, here)))
        transfer.ended.set()


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
        return f"<Transfer {self.link.name} {self.slot.name} {self.slot.size_bytes} bytes {state}>"

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

    def promote(self) -> None:
        """Put the transfer first in the queues of all drives where none of its chunks has begun; there may be none."""
        with self.link._lock:
            for queue in self.link._queues_with(self):
                queue.remove(self)
                queue.appendleft(self)


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
