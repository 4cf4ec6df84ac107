"""Which blocks are on the device, and the copies that change it: what the pager is built on. All with its lock held.

[Note: Locking]
One lock guards all blocks and counters. The training thread takes it between stages, I/O threads when a copy has
ended. Whoever frees memory starts the prefetches that wait for room, in the order in which they were asked for.

[Note: Copies under way]
A copy out that the device makes by itself (see [Note: Two kinds of time]) leaves its block OFFLOADING but `_under_way`: the
pager may take its memory at any time, which lets the device wait for the copy, not the host. It does so where the room
is needed at once, and for a prefetch that nothing else can make room for; else it waits until the copy has ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from planner.errors import BudgetError, StorageError, StorageFullError
from planner.schema import WaitingTier
from runtime.device import CpuDevice, Device
from runtime.paging.block import Block, State
from runtime.paging.mover import Done, Mover
from runtime.system import Name, annotate, first_of

_NEVER = 1 << 62
_LOOK_SECONDS = 1.0
"""How often who waits for a copy looks whether its drive still answers."""


class Residency:
    """Residency of all blocks of one device under one budget.

    mover: carries blocks; None if there is nowhere to move them to. device: where the stages run.
    budget_bytes: hard limit of blocks, stage outputs, workspaces and `unmoved_bytes` together; None for no limit.
    fixed_bytes: what others keep on the device and have told of, such as optimizer states.
    waited_seconds: for which the training thread has waited for copies, for room and for updates on the host, since the start.
    busy_seconds: tells for how long each link has been copying. exposed_seconds: by link, how much of that the training
    thread spent waiting; what else the link copied was hidden.
    clock, iteration: kept by the timeline. A block whose `next_use` is not ahead of the clock has no known next use.
    """

    def __init__(
        self,
        *,
        mover: Mover | None,
        budget_bytes: int | None,
        device: Device | None = None,
        busy_seconds: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.device = device or CpuDevice()
        self.budget_bytes = budget_bytes
        self.fixed_bytes = 0
        self.clock = 0
        self.iteration = 0
        self.peak_bytes = 0
        self.evictions = 0
        self.waited_seconds = 0.0
        self.exposed_seconds: dict[str, float] = {}
        self._busy_seconds = busy_seconds
        self._mover = mover
        self._changed = threading.Condition()
        self._blocks: dict[int, Block] = {}
        self._waiting: deque[Block] = deque()
        self._under_way: deque[Block] = deque()
        self._set_aside: set[Block] = set()
        self._pumping = False
        self._late: list[tuple[Block, float]] = []
        self._failure: StorageError | None = None
        self._in_user_code = True
        self._beside = 0
        self._used = 0
        self._reserved = 0
        self._leaving = 0
        self._arriving = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks on the device, those being copied in or out included."""
        return self._used

    @property
    def unmoved_bytes(self) -> int:
        """Bytes on the device that are no blocks: those told of, and what else the device had when this region began."""
        return self.fixed_bytes + self._beside

    # -- room

    def _make_room(self, blocks: Sequence[Block], new_bytes: int, what: str) -> None:
        if self.budget_bytes is None:
            return
        while True:
            self._raise_failure()
            self._reserved = _away_bytes(blocks) + new_bytes  # what begins to arrive meanwhile must not take it
            if self._short(blocks, new_bytes) <= 0:
                break
            self._sweep()
            if (short := self._short(blocks, new_bytes)) > self._leaving:
                self._evict(short - self._leaving)
            while self._under_way and self._short(blocks, new_bytes) > 0:
                self._reclaim(self._under_way[0])
            short = self._short(blocks, new_bytes)
            if short > 0:
                if not self._leaving and not self._arriving:
                    raise self._too_small(what, short)
                self._wait(lambda: f"for room for {what}")
        self._trim()

    def _short(self, blocks: Sequence[Block], new_bytes: int) -> int:
        """Bytes that are missing for `blocks`, wherever they are now, and `new_bytes`; negative if there are more."""
        return self._used + self.unmoved_bytes + _away_bytes(blocks) + new_bytes - (self.budget_bytes or 0)

    def _wait(self, what: Name = "for a copy") -> None:
        """Until a copy has ended. Raises StorageIOError where one has made no progress for too long. what: for profilers."""
        began, before = time.perf_counter(), self._busy_seconds()
        try:
            with annotate("wait", what):
                while not self._changed.wait(_LOOK_SECONDS):
                    if self._mover is not None:
                        self._mover.check()
        finally:
            self.waited_seconds += time.perf_counter() - began
            for link, seconds in self._busy_seconds().items():
                self.exposed_seconds[link] = self.exposed_seconds.get(link, 0.0) + seconds - before[link]

    def _trim(self) -> None:
        """Free memory that the mover keeps for reuse counts as well."""
        if self._mover is not None and self.budget_bytes is not None:
            self._mover.trim(self.budget_bytes - self._used - self.unmoved_bytes)

    def _evict(self, wanted_bytes: int, keep: Sequence[Block] = ()) -> None:
        """Start to evict the blocks whose next use is furthest away (Belady's rule), until `wanted_bytes` will be free."""
        idle = [
            b for b in self._blocks.values() if b.state is State.ON_DEVICE and not b.pins and b.span is not None and b not in keep
        ]
        idle.sort(key=lambda b: b.next_use if b.next_use > self.clock else _NEVER, reverse=True)
        for block in idle:
            if wanted_bytes <= 0:
                return
            wanted_bytes -= block.size_bytes
            self._start_out(block)

    def _too_small(self, what: str, short: int) -> BudgetError:
        budget = self.budget_bytes or 0
        if self._mover is None:
            self._need_mover()
        return BudgetError(smallest_bytes=budget + short, budget_bytes=budget, stage=what)

    # -- copies (lock held)

    def _keep(self, block: Block) -> None:
        """A block under way stays: it is needed."""
        if block in self._under_way:
            self._under_way.remove(block)
            self._leaving -= block.size_bytes
            block.state = State.ON_DEVICE

    def _reclaim(self, block: Block) -> int:
        """Take the memory of a block under way; gives its bytes, none if it is needed or was written meanwhile."""
        self._keep(block)
        if block.pins or not block.copy_is_valid:
            return 0
        before = self._used
        self._left(block)
        return before - self._used

    def _start_out(self, block: Block, tier: WaitingTier | None = None) -> None:
        held = block.storage()
        if held is None:  # its last holder was a copy that has just ended
            self._forget(block)
            return
        self.evictions += 1
        if block.copy_is_valid:
            self._left(block)
            return
        version = block.version
        block.state = State.OFFLOADING
        self._leaving += block.size_bytes

        def done(error: StorageError | None) -> None:
            with self._changed:
                self._leaving -= block.size_bytes
                block.state = State.ON_DEVICE
                try:
                    if error is not None:
                        raise error
                    block.copy_is_valid = block.version == version
                    if block.copy_is_valid and not block.pins:
                        self._left_when_finished(block)
                except StorageError as failure:
                    self._failure = failure
                self._pump()
                self._changed.notify_all()

        try:
            self._copy_out(block, tier, done)
        except StorageError:
            self._leaving -= block.size_bytes
            block.state = State.ON_DEVICE
            raise

    def _copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> None:
        mover = self._need_mover()
        if tier is not None and not mover.has_room(block, tier):
            self._drop_copies(block, tier)
        while True:
            try:
                return mover.copy_out(block, tier, done)
            except StorageFullError:
                if not self._drop_copies(block):
                    raise

    def _drop_copies(self, wanting: Block, tier: WaitingTier | None = None) -> bool:
        """Blocks on the device keep their slots while there is room (in `tier`, if given); else void copies go, if there are
        none valid ones."""
        here = [block for block in self._with_copies() if block is not wanting and tier in (None, block.tier)]
        spare = [block for block in here if not block.copy_is_valid] or here
        self._give_up_copies(spare)
        return bool(spare)

    def _with_copies(self) -> list[Block]:
        return [b for b in self._blocks.values() if b.state is State.ON_DEVICE and b.slot is not None]

    def _give_up_copies(self, spare: Sequence[Block]) -> None:
        mover = self._need_mover()
        mover.wait_resident(spare)  # then nothing on the device reads from their slots any more
        for block in spare:
            block.copy_is_valid = False
            mover.drop_copy(block)

    def _left_when_finished(self, block: Block) -> None:
        if self._need_mover().finished(block):
            self._left(block)
        else:
            block.state = State.OFFLOADING
            self._leaving += block.size_bytes
            self._under_way.append(block)

    def _left(self, block: Block) -> None:
        held = block.storage()  # its memory must not be freed and used again while other pages are put in its place
        if held is None:
            return
        self._need_mover().release(block)
        block.state = State.OFFLOADED
        self._used -= block.size_bytes

    def _start_in(self, block: Block) -> None:
        held = block.storage()
        if held is None:
            self._forget(block)
            return
        block.state = State.PREFETCHING
        self._used += block.size_bytes
        self._arriving += 1
        self._note_peak()

        def done(error: StorageError | None) -> None:
            with self._changed:
                self._arriving -= 1
                try:
                    if error is not None:
                        raise error
                    self._need_mover().install(block)
                    block.state = State.ON_DEVICE
                except StorageError as failure:
                    self._failure = failure
                    block.state = State.OFFLOADED
                    self._used -= block.size_bytes
                self._pump()
                self._changed.notify_all()

        try:
            self._need_mover().copy_in(block, done)
        except StorageError as failure:
            done(failure)  # for the training thread; this may be an I/O thread that has ended another copy

    def _ask_for(self, blocks: Sequence[Block]) -> None:
        asked = [b for b in blocks if b.state not in (State.ON_DEVICE, State.PREFETCHING)]
        self._waiting.extend(asked)
        self._pump()
        for block in asked:
            block.held_back = block.state is not State.PREFETCHING

    def _note_late(self, coming: list[Block], seconds: float) -> None:
        for block in [b for b in coming if b.state is State.ON_DEVICE]:
            coming.remove(block)
            self._late.append((block, seconds))

    def _pump(self) -> None:
        """Begin the prefetches that there is room for, strictly in order."""
        if self._pumping:  # a copy that ended at once calls again
            return
        self._pumping = True
        try:
            self._begin_waiting()
        finally:
            self._pumping = False

    def _begin_waiting(self) -> None:
        while self._waiting:
            block = self._waiting[0]
            if not self._is_current(block) or block.state in (State.ON_DEVICE, State.PREFETCHING):
                self._waiting.popleft()
                continue
            if block in self._set_aside:
                return
            if block in self._under_way and self._free_bytes() >= 0:  # nobody needs its memory: it need not leave
                self._keep(block)
                continue
            if block.state in (State.OFFLOADING, State.UPDATING) or (self._in_user_code and block.user_visible):
                return
            if not self._has_room(block.size_bytes):
                return
            self._waiting.popleft()
            self._start_in(block)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes are free, or can be made so from what is under way."""
        short = size_bytes - self._free_bytes()
        takeable = [block for block in self._under_way if not block.pins and block.copy_is_valid]
        if short > sum(block.size_bytes for block in takeable):
            return False
        for block in takeable:
            if short > 0:
                short -= self._reclaim(block)
        return short <= 0

    def _free_bytes(self) -> int:
        """What the budget leaves, less what is reserved; negative while room is being made."""
        if self.budget_bytes is None:
            return _NEVER
        return self.budget_bytes - self._used - self._reserved - self.unmoved_bytes

    def _need_mover(self) -> Mover:
        if self._mover is None:
            raise StorageError(
                "the model does not fit and there is nowhere to move blocks to; set the option storage to a directory"
            )
        return self._mover

    # -- bookkeeping (lock held)

    def _is_current(self, block: Block) -> bool:
        return self._blocks.get(block.key) is block and not block.dead

    def _forget_replaced(self) -> None:
        """User code may have given a storage other memory (`share_memory_`, `resize_`): what is known of it is void."""
        for block in [b for b in self._blocks.values() if b.user_visible]:
            held = block.storage()
            if held is None:
                continue
            if not self._is_same(block, held):
                self._forget(block)

    def _sweep(self) -> None:
        if self._mover is not None:
            self._mover.poll()
        for block in [b for b in self._under_way if self._need_mover().finished(b)]:
            self._reclaim(block)
        for block in [b for b in self._blocks.values() if b.dead]:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        self._keep(block)
        if block.state not in (State.ON_DEVICE, State.OFFLOADED) or self._blocks.get(block.key) is not block:
            return
        del self._blocks[block.key]
        if block.state is State.ON_DEVICE:
            self._used -= block.size_bytes
        if self._mover is not None:
            self._mover.forget(block)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._used + self._reserved + self.unmoved_bytes)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        if block.size_bytes != storage.nbytes():
            return False
        return block.address == storage.data_ptr() if self._mover is None else self._mover.is_same(block, storage)


def awaited(blocks: Sequence[Block]) -> str:
    """The blocks that are not on the device, and the tier of the first, for profilers."""
    away = [block for block in blocks if block.state is not State.ON_DEVICE]
    return f"{first_of([block.name for block in away])} from {away[0].tier}" if away else "for a copy"


def _away_bytes(blocks: Sequence[Block]) -> int:
    return sum(block.size_bytes for block in blocks if block.state is State.OFFLOADED)


def touch(block: Block) -> None:
    block.version += 1
    block.copy_is_valid = False
