"""Keeps the bytes on the device under the budget: evicts what is needed last, fetches what is needed now.

[Note: The pager is always right]
It can run any sequence of stages without a plan. A plan only adds hints (`offload`, `prefetch`), each of which may be
late, early or wrong: that costs time, never correctness and never the budget.

[Note: Locking]
One lock guards all blocks and counters. The training thread takes it between stages, I/O threads when a copy has
ended. Whoever frees memory starts the prefetches that wait for room, in the order in which they were asked for.

[Note: User code]
Between compiled regions user code may write any block that it can reach. `fence` waits until none of those is being
copied, and takes for granted that user code changes all of them; until `enter` no copy of them begins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from planner.errors import BudgetError, StorageError
from runtime.block import Block, State
from runtime.mover import Mover

_NEVER = 1 << 62
_LOOK_SECONDS = 1.0
"""How often who waits for a copy looks whether its drive still answers."""


class Pager:
    """Residency of all blocks of one device under one budget.

    mover: carries blocks; None if there is nowhere to move them to.
    budget_bytes: hard limit of blocks, stage outputs, workspaces and `fixed_bytes` together; None for no limit.
    clock, iteration: kept by the timeline. A block whose `next_use` is not ahead of the clock has no known next use.
    """

    def __init__(self, *, mover: Mover | None, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.fixed_bytes = 0
        self.clock = 0
        self.iteration = 0
        self.peak_bytes = 0
        self.evictions = 0
        self._mover = mover
        self._changed = threading.Condition()
        self._blocks: dict[int, Block] = {}
        self._waiting: deque[Block] = deque()
        self._failure: StorageError | None = None
        self._in_user_code = True
        self._used = 0
        self._reserved = 0
        self._leaving = 0
        self._arriving = 0

    # -- what exists

    @property
    def blocks(self) -> list[Block]:
        """All blocks that are alive."""
        self.forget_dead()
        return list(self._blocks.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks on the device, those being copied in or out included."""
        return self._used

    def block_of(self, tensor: torch.Tensor, *, name: str, kind: str, user_visible: bool) -> Block:
        """The block of `tensor`'s storage; a storage that is seen for the first time becomes one. Never blocks."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None or block.size_bytes != storage.nbytes() or block.address != storage.data_ptr():
            with self._changed:
                if block is not None:
                    self._forget(block)
                span = self._mover.span(storage) if self._mover is not None else None
                block = Block(storage=storage, name=name, kind=kind, user_visible=user_visible, span=span)
                block.born = self.iteration
                self._blocks[block.key] = block
                self._used += block.size_bytes
        elif user_visible:
            block.user_visible = True
        return block

    def make_movable(self, tensor: torch.Tensor) -> None:
        """Put the data of a tensor that is not a block yet where it can leave from, if it may be moved. Blocks meanwhile."""
        if self._mover is not None and tensor.layout is torch.strided and self.known_block(tensor) is None:
            self._mover.adopt(tensor.untyped_storage())

    def known_block(self, tensor: torch.Tensor) -> Block | None:
        """The block of `tensor`'s storage, if it has one; a sparse tensor never has."""
        if tensor.layout is not torch.strided:
            return None
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def forget_dead(self) -> None:
        """Drop all blocks whose storage nobody holds any more, and free their slots."""
        with self._changed:
            self._sweep()

    # -- around a stage

    def acquire(
        self, blocks: Sequence[Block], new_bytes: int, what: str, *, then_fetch: Sequence[Block] = ()
    ) -> None:
        """Bring `blocks` to the device, reserve `new_bytes` for outputs and workspace, and hold both until `retire`.

        then_fetch: prefetches to ask for once that is under way, see `prefetch`.
        Blocks until everything has landed. Raises BudgetError if it cannot fit, StorageError if a copy failed.
        """
        with self._changed:
            for block in blocks:
                block.pins += 1
            try:
                self._make_room(blocks, new_bytes, what)
                missing = [block for block in blocks if block.state is State.AWAY]
                self._reserved = new_bytes + sum(block.size_bytes for block in missing)
                for block in missing:
                    self._reserved -= block.size_bytes
                    if block.state is State.AWAY:  # still: where one copy fails to begin, waiting prefetches may begin
                        self._start_in(block)
                for block in blocks:
                    if block.state is State.ARRIVING and self._mover is not None:
                        self._mover.hurry(block)
                self._note_peak()
                self._waiting.extend(b for b in then_fetch if b.state in (State.AWAY, State.LEAVING))
                self._pump()
                while any(block.state is State.ARRIVING or block.state is State.AWAY for block in blocks):
                    self._raise_failure()
                    self._wait()
            except BaseException:
                self._release(blocks)
                raise

    def retire(self, blocks: Sequence[Block], written: Sequence[Block], *, last_used: Sequence[Block] = ()) -> None:
        """The stage is done: what it held may move again, copies of what it wrote are invalid. Never blocks.

        last_used: blocks that nobody may hold any more; those count as free at once.
        """
        with self._changed:
            for block in last_used:
                if block.dead:
                    self._forget(block)
            for block in written:
                _touch(block)
            self._release(blocks)
            self._note_peak()

    def _release(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.pins -= 1
        self._reserved = 0

    # -- hints of a plan

    def offload(self, block: Block) -> None:
        """Let a block leave as soon as the link allows; at once if a valid copy waits for it. Never blocks."""
        with self._changed:
            if block.state is State.ON_DEVICE and not block.pins and block.span is not None and self._is_current(block):
                self._start_out(block)

    def prefetch(self, block: Block) -> None:
        """Bring a block back as soon as there is room, after those asked for before. Never blocks."""
        with self._changed:
            if block.state in (State.AWAY, State.LEAVING):
                self._waiting.append(block)
                self._pump()

    # -- around compiled regions

    def enter(self) -> None:
        """A compiled region begins. Never blocks. Raises StorageError if a copy failed meanwhile."""
        with self._changed:
            self._raise_failure()
            self._sweep()
            self._forget_replaced()
            self._in_user_code = False
            for block in self._blocks.values():
                held = block.storage() if block.user_visible and block.state is State.AWAY else None
                if held is not None and self._mover is not None:
                    self._mover.settle(block)

    def fence(self) -> None:
        """A compiled region ends, see [Note: User code]. Blocks until no block that user code can reach is in flight."""
        with self._changed:
            self._in_user_code = True
            self._sweep()
            visible = [b for b in self._blocks.values() if b.user_visible]
            while any(b.state is State.LEAVING or b.state is State.ARRIVING for b in visible):
                self._wait()
            for block in visible:
                if block.state is State.ON_DEVICE:
                    _touch(block)
            self._trim()
            self._raise_failure()

    def bring_back_all(self) -> None:
        """Bring every block to the device, whatever the budget. Blocks until they have landed."""
        with self._changed:
            self._waiting.clear()
            while True:
                self._sweep()
                self._forget_replaced()
                for block in self._blocks.values():
                    if block.state is State.AWAY:
                        self._start_in(block)
                self._raise_failure()
                if all(b.state is State.ON_DEVICE for b in self._blocks.values()):
                    return
                self._wait()

    # -- room

    def _make_room(self, blocks: Sequence[Block], new_bytes: int, what: str) -> None:
        if self.budget_bytes is None:
            return
        while True:
            self._raise_failure()
            missing = sum(b.size_bytes for b in blocks if b.state is State.AWAY)
            short = self._used + self.fixed_bytes + missing + new_bytes - self.budget_bytes
            if short <= 0:
                break
            self._sweep()
            short = self._used + self.fixed_bytes + missing + new_bytes - self.budget_bytes
            if short > self._leaving:
                self._evict(short - self._leaving)
                short = self._used + self.fixed_bytes + missing + new_bytes - self.budget_bytes
            if short > 0:
                if not self._leaving and not self._arriving:
                    raise self._too_small(what, short)
                self._wait()
        self._trim()

    def _wait(self) -> None:
        """Until a copy has ended. Raises StorageIOError where one has made no progress for too long."""
        while not self._changed.wait(_LOOK_SECONDS):
            if self._mover is not None:
                self._mover.check()

    def _trim(self) -> None:
        """Free memory that the mover keeps for reuse counts as well."""
        if self._mover is not None and self.budget_bytes is not None:
            self._mover.trim(self.budget_bytes - self._used - self.fixed_bytes)

    def _evict(self, wanted_bytes: int) -> None:
        """Start to evict the blocks whose next use is furthest away (Belady's rule), until `wanted_bytes` will be free."""
        idle = [b for b in self._blocks.values() if b.state is State.ON_DEVICE and not b.pins and b.span is not None]
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

    def _start_out(self, block: Block) -> None:
        mover = self._need_mover()
        self.evictions += 1
        if block.copy_is_valid:
            self._left(block)
            return
        version = block.version
        block.state = State.LEAVING
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
                        self._left(block)
                except StorageError as failure:
                    self._failure = failure
                self._pump()
                self._changed.notify_all()

        try:
            mover.copy_out(block, done)
        except StorageError:
            self._leaving -= block.size_bytes
            block.state = State.ON_DEVICE
            raise

    def _left(self, block: Block) -> None:
        held = block.storage()  # its memory must not be freed and used again while other pages are put in its place
        if held is None:
            return
        self._need_mover().release(block)
        block.state = State.AWAY
        self._used -= block.size_bytes

    def _start_in(self, block: Block) -> None:
        block.state = State.ARRIVING
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
                    block.state = State.AWAY
                    self._used -= block.size_bytes
                self._pump()
                self._changed.notify_all()

        try:
            self._need_mover().copy_in(block, done)
        except StorageError as failure:
            done(failure)  # for the training thread; this may be an I/O thread that has ended another copy

    def _pump(self) -> None:
        """Begin the prefetches that there is room for, strictly in order."""
        while self._waiting:
            block = self._waiting[0]
            if not self._is_current(block) or block.state in (State.ON_DEVICE, State.ARRIVING):
                self._waiting.popleft()
                continue
            if block.state is State.LEAVING or (self._in_user_code and block.user_visible):
                return
            taken = self._used + self._reserved + self.fixed_bytes + block.size_bytes
            if self.budget_bytes is not None and taken > self.budget_bytes:
                return
            self._waiting.popleft()
            self._start_in(block)

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
            moved = held.data_ptr() != block.address or held.nbytes() != block.size_bytes
            if moved or (block.span is not None and self._mover is not None and self._mover.span(held) != block.span):
                self._forget(block)

    def _sweep(self) -> None:
        for block in [b for b in self._blocks.values() if b.dead]:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.state is State.LEAVING or block.state is State.ARRIVING or self._blocks.get(block.key) is not block:
            return
        del self._blocks[block.key]
        if block.state is State.ON_DEVICE:
            self._used -= block.size_bytes
        if self._mover is not None:
            self._mover.forget(block)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._used + self._reserved + self.fixed_bytes)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def _touch(block: Block) -> None:
    block.version += 1
    block.copy_is_valid = False
