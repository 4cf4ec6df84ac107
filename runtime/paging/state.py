"""What the parts of a pager share: the device and its mover, the figures, the table of blocks, and the lock."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from runtime.device import Device, DeviceMemoryError
from runtime.paging.block import DROPPED, ON_DEVICE, Block
from runtime.paging.mover import Mover, Tiers
from runtime.system import Name, annotate, first_of

NO_LIMIT = 1 << 62  # free bytes where there is no budget
CHECK_SECONDS = 1.0  # seconds between drive health checks while waiting for a copy


class MemoryAccount:
    """The figures of one pager: bytes on the device that count against the budget, and what was counted meanwhile.

    For everybody to look at. What blocks and stages take is counted by `BlockTransitions` alone, with the pager's lock held.

    budget_bytes: limit of blocks, what stages reserve and `unmoved_bytes` together; None for no limit.
    fixed_bytes: bytes that other parts of teraio keep on the device, such as small optimizer states. They report them here.
    external_bytes: other bytes that the device had when the current region began, such as tensors of user code.
    clock: number of stages and regions that have begun, or ended, since the start; `Block.next_use` refers to it.

    used_bytes: blocks on the device, including those that are being copied in or out.
    reserved_bytes: what the stage that begins, or runs, will allocate: outputs, workspace, and inputs that must come back.
    offloading_bytes: blocks that are OFFLOADING. They still count as used.
    prefetching_blocks: number of blocks that are PREFETCHING.
    peak_bytes: the most bytes that have counted against the budget at once.
    here: the blocks that count as used, or whose slots are lent. Others may be among them where memory ran out.
    queued_offloads: see [Note: Queued offloads]; in the order in which they were queued.
    reserved_for_host: blocks that will be lent to the host's processor; no prefetch takes them before.
    moves: number of blocks so far whose memory was allocated for a copy in, or has gone.
    evictions: number of offloads that have begun.

    waited_seconds: seconds that the training thread has waited for copies, for room and for updates on the host. It adds them.
    exposed_seconds: for each link, the part of its busy seconds in which the training thread waited. The rest was hidden.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.fixed_bytes = 0
        self.external_bytes = 0
        self.clock = 0
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.offloading_bytes = 0
        self.prefetching_blocks = 0
        self.peak_bytes = 0
        self.here: dict[Block, None] = {}
        self.queued_offloads: dict[Block, None] = {}
        self.reserved_for_host: set[Block] = set()
        self.moves = 0
        self.evictions = 0
        self.waited_seconds = 0.0
        self.exposed_seconds: dict[str, float] = {}

    @property
    def unmoved_bytes(self) -> int:
        """Bytes on the device that are not in blocks and are not reserved."""
        return self.fixed_bytes + self.external_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the budget leaves; negative while room is being made."""
        if self.budget_bytes is None:
            return NO_LIMIT
        return self.budget_bytes - self.used_bytes - self.reserved_bytes - self.fixed_bytes - self.external_bytes

    @property
    def unused_bytes(self) -> int:
        """Bytes that the budget leaves to the running stage and to memory that is kept for reuse."""
        return self.free_bytes + self.reserved_bytes


class _Watch(weakref.ref[torch.UntypedStorage]):
    """Reports that a storage has died."""

    # PyTorch keeps the object that stands for a storage in Python as long as the storage.
    __slots__ = ("key",)
    key: int


class BlockTable:
    """All blocks of one pager, by the storage. Its lock guards changes and loops; a look-up of one storage needs no lock."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._blocks: dict[int, Block] = {}
        self._reported: deque[_Watch] = deque()  # storages die at any line, in any thread: their reports wait here
        self._dead: dict[Block, None] = {}

    def __iter__(self) -> Iterator[Block]:
        """All blocks, dead ones included, in the order in which they became known."""
        return iter(self._blocks.values())

    def find(self, storage: torch.UntypedStorage) -> Block | None:
        """Return the block of the storage, if there is one."""
        return self._blocks.get(storage._cdata)

    def add(self, block: Block, storage: torch.UntypedStorage) -> None:
        """Add the block of a storage that has none."""
        watch = _Watch(storage, self._reported.append)
        watch.key = block.key
        block.storage, self._blocks[block.key] = watch, block

    def remove(self, block: Block) -> None:
        """Remove a block that is in the table."""
        del self._blocks[block.key]

    def dead(self) -> list[Block]:
        """Return the blocks in the table whose storage has died."""
        while self._reported:
            block = self._blocks.get(self._reported[0].key)
            if block is not None and block.storage is self._reported[0]:  # most were forgotten before
                self._dead[block] = None
            self._reported.popleft()
        if self._dead:
            self._dead = {block: None for block in self._dead if self.holds(block)}
        return [block for block in self._dead if block.dead]

    def size_bytes(self, *, movable: bool) -> int:
        """Return the bytes of living blocks that can leave the device, wherever they are; if not `movable`, of all others."""
        size = sum(block.size_bytes for block in self if (block.span is not None) is movable)
        return size - sum(block.size_bytes for block in self.dead() if (block.span is not None) is movable)

    def holds(self, block: Block) -> bool:
        """Whether the block is in the table: it was not forgotten."""
        return self._blocks.get(block.key) is block

    def is_current(self, block: Block) -> bool:
        """Whether the block is in the table and its storage is alive."""
        return self._blocks.get(block.key) is block and block.storage() is not None

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        """Whether the storage has the size and the memory that the block was last seen with, or was moved to."""
        if block.size_bytes != storage.nbytes() or block.state is DROPPED:
            return block.size_bytes == storage.nbytes()
        return not self._mover.replaced([block])


class CopySignal:
    """The pager's lock, and the signal that a copy has ended. All calls with the lock held.

    [Note: Locking]
    One lock guards all blocks and all counters. The training thread takes it between stages, I/O threads take it when a copy
    has ended. The public methods of `Pager` and the callbacks of copies take it; all else in this folder is called with it
    held. Whoever frees memory begins the prefetches that wait for room, in the order in which they were asked for.

    condition: notified when a copy has ended or a lent block was given back. lock: that of the condition.
    busy_seconds: returns for how long each link has been copying. now_seconds: the host's clock.
    out_of_memory: what the allocator said when the last copy in found no memory.
    """

    def __init__(
        self,
        account: MemoryAccount,
        tiers: Tiers,
        *,
        condition: threading.Condition | None = None,
        busy_seconds: Callable[[], Mapping[str, float]] = dict,
        now_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        lock = threading.RLock()
        self.condition = condition or threading.Condition(lock)
        self.lock: AbstractContextManager[object] = self.condition if condition is not None else lock  # faster than a condition
        self.now_seconds = now_seconds
        self.out_of_memory: DeviceMemoryError | None = None
        self._account = account
        self._tiers = tiers
        self._busy_seconds = busy_seconds
        self._failure: Exception | None = None
        self._waiting = 0

    def wait(self, what: Name = "for a copy") -> None:
        """Wait until a copy has ended. For the training thread: the time counts.

        what: names the wait for profilers, see [Note: Annotations].
        Raises StorageIOError if a copy has made no progress for too long.
        """
        account = self._account
        began, before = self.now_seconds(), self._busy_seconds()
        try:
            with annotate("wait", what):
                while not self._notified(CHECK_SECONDS):
                    self._tiers.check()
        finally:
            account.waited_seconds += self.now_seconds() - began
            for link, seconds in self._busy_seconds().items():
                account.exposed_seconds[link] = account.exposed_seconds.get(link, 0.0) + seconds - before[link]

    def poll(self, seconds: float) -> None:
        """Wait for at most so long. For any thread: the time does not count. Raises like `wait`."""
        self._notified(seconds)
        self._tiers.check()

    def notify(self) -> None:
        """Wake all threads that wait."""
        if self._waiting:
            self.condition.notify_all()

    def fail(self, failure: Exception) -> None:
        """Keep the error of a copy, or of what follows it, until the training thread asks for it."""
        # A plan's prefetch is not worth an error: only a stage that needs the block asks for it.
        if isinstance(failure, DeviceMemoryError):
            self.out_of_memory = failure
            # Frames of tracebacks hold tensors of the training thread, and autograd copies a gradient that anything else holds.
            error: BaseException | None = failure
            while error is not None:
                error.__traceback__, error = None, error.__cause__ or error.__context__
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


def awaited(blocks: Sequence[Block]) -> str:
    """Name the blocks that are not on the device, and the tier of the first one, for profilers."""
    away = [block for block in blocks if block.state is not ON_DEVICE]
    return f"{first_of([block.name for block in away])} from {away[0].tier}" if away else "for a copy"


@dataclass(frozen=True, slots=True)
class PagerState:
    """What all parts of one pager work on. device: where the stages run. mover: `NullMover` if there is nowhere to move to."""

    device: Device
    mover: Mover
    account: MemoryAccount
    table: BlockTable
    signal: CopySignal


class PagerPart:
    """What works on one pager's state."""

    def __init__(self, state: PagerState) -> None:
        self._device = state.device
        self._mover = state.mover
        self._tiers = state.mover.tiers
        self._account = state.account
        self._table = state.table
        self._signal = state.signal
        self._lock = state.signal.lock
