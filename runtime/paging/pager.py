"""Keeps the bytes on the device under the budget: evicts what is needed last, fetches what is needed now.

[Note: The pager is always right]
It can run any sequence of stages without a plan. A plan only adds hints (`offload`, `prefetch`), each of which may be
late, early or wrong: that costs time, never correctness and never the budget.

[Note: User code]
Between compiled regions user code may write any block that it can reach. `leave_region` waits until none of those is being
copied, and takes for granted that user code changes all of them; until `enter_region` no copy of them begins.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from planner.errors import StorageFullError
from planner.schema import WaitingTier
from runtime.paging.block import Block, State
from runtime.paging.lending import Lending
from runtime.paging.residency import awaited, touch


class Pager(Lending):
    """What the executor, the timeline and the optimizer's steps ask for; see `Residency` for the arguments."""

    # -- what exists

    @property
    def blocks(self) -> list[Block]:
        """All blocks that are alive."""
        self.forget_dead()
        return list(self._blocks.values())

    @property
    def can_move(self) -> bool:
        """Whether blocks have anywhere to go."""
        return self._mover is not None

    def block_of(self, tensor: torch.Tensor, *, name: str, kind: str, user_visible: bool) -> Block:
        """The block of `tensor`'s storage; a storage that is seen for the first time becomes one. Never blocks."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None or not self._is_same(block, storage):
            with self._changed:
                if block is not None:
                    self._forget(block)
                span = self._mover.span(storage) if self._mover is not None else None
                block = Block(storage=storage, name=name, kind=kind, user_visible=user_visible, span=span)
                block.born = self.iteration
                self._blocks[block.key] = block
                self._used += block.size_bytes
                if user_visible:  # it was there when the region began, as something that nobody knew
                    self._beside = max(self._beside - block.size_bytes, 0)
        elif user_visible:
            block.user_visible = True
        return block

    def make_movable(self, tensor: torch.Tensor) -> None:
        """Put the data of a tensor that is not a block yet where it can leave from, if it may be moved. Blocks meanwhile."""
        if self._mover is not None and tensor.layout is torch.strided and self.known_block(tensor) is None:
            self._mover.adopt(tensor.untyped_storage())

    def can_leave(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's data is, or could be put, where it can leave from. Blocks while that is done."""
        self.make_movable(tensor)
        return self._mover is not None and self._mover.span(tensor.untyped_storage()) is not None

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

    def acquire(self, blocks: Sequence[Block], new_bytes: int, what: str, *, then_fetch: Sequence[Block] = ()) -> None:
        """Bring `blocks` to the device, reserve `new_bytes` for outputs and workspace, and hold both until `retire`.

        then_fetch: prefetches to ask for once that is under way, see `prefetch`.
        Blocks until everything has landed, or will have before the device goes on. Raises BudgetError if it cannot fit,
        StorageError if a copy failed.
        """
        with self._changed:
            for block in blocks:
                block.pins += 1
                self._keep(block)
            try:
                while any(block.state is State.UPDATING for block in blocks):
                    self._wait(lambda: awaited([block for block in blocks if block.state is State.UPDATING]))
                self._make_room(blocks, new_bytes, what)
                coming = [block for block in blocks if block.state is State.PREFETCHING and not block.held_back]
                missing = [block for block in blocks if block.state is State.OFFLOADED]
                self._reserved = new_bytes + sum(block.size_bytes for block in missing)
                for block in missing:
                    self._reserved -= block.size_bytes
                    if block.state is State.OFFLOADED:  # still: where one copy fails to begin, waiting prefetches may begin
                        self._start_in(block)
                for block in blocks:
                    if block.state is State.PREFETCHING and self._mover is not None:
                        self._mover.prioritize(block)
                self._note_peak()
                self._ask_for(then_fetch)
                began = time.perf_counter()
                while any(block.state is State.PREFETCHING or block.state is State.OFFLOADED for block in blocks):
                    self._raise_failure()
                    self._wait(lambda: awaited(blocks))
                    self._note_late(coming, time.perf_counter() - began)
                if self._mover is not None:
                    self._mover.wait_resident(blocks)
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
                touch(block)
            self._release(blocks)
            self._note_peak()

    def _release(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.pins -= 1
        self._reserved = 0

    # -- hints of a plan

    def offload(self, block: Block, tier: WaitingTier | None = None) -> None:
        """Let a block leave for `tier` as soon as the link allows; at once if a valid copy waits for it. Never blocks.

        Where the lower tiers have no room for it, it stays: what needs its memory sees to that.
        """
        with self._changed:
            if block.state is State.ON_DEVICE and not block.pins and block.span is not None and self._is_current(block):
                with contextlib.suppress(StorageFullError):
                    self._start_out(block, tier)

    def prefetch(self, block: Block) -> None:
        """Bring a block back as soon as there is room, after those asked for before. Never blocks."""
        with self._changed:
            self._ask_for([block])

    def evict_until_free(self, size_bytes: int, *, keep: Sequence[Block]) -> None:
        """Let blocks leave until so many bytes will be free, as a stage that needs them would, but none of `keep`. Never blocks.

        Raises StorageFullError if there is nowhere to go.
        """
        with self._changed:
            short = size_bytes - self._free_bytes() - self._leaving
            if short > 0:
                self._evict(short, keep)

    def take_late(self) -> list[tuple[Block, float]]:
        """Prefetched blocks that a stage had to wait for since the last call, and how long after its wait began each landed.

        Only those that waited for their link alone: for the others an earlier prefetch would not have helped.
        """
        late, self._late = self._late, []
        return late

    # -- around compiled regions

    def enter_region(self) -> None:
        """A compiled region begins. Never blocks. Raises StorageError if a copy failed meanwhile."""
        with self._changed:
            self._raise_failure()
            self._sweep()
            self._forget_replaced()
            self._beside = self.device.bytes_beside(self._used + self.fixed_bytes)
            self._in_user_code = False
            self._settle()

    def leave_region(self) -> None:
        """A compiled region ends, see [Note: User code]. Blocks until no block that user code can reach is in flight."""
        with self._changed:
            self._in_user_code = True
            self._sweep()
            visible = [b for b in self._blocks.values() if b.user_visible]
            while True:
                for block in [b for b in self._under_way if b.user_visible]:  # also what an I/O thread has put there meanwhile
                    self._reclaim(block)
                if all(b.state is State.ON_DEVICE or b.state is State.OFFLOADED for b in visible):
                    break
                self._wait("for blocks that user code can reach")
            resident = [block for block in visible if block.state is State.ON_DEVICE]
            for block in resident:
                touch(block)
            if self._mover is not None:
                self._mover.wait_resident(resident)
            self._trim()
            self._raise_failure()

    def bring_back_all(self) -> None:
        """Bring every block to the device, whatever the budget. Blocks until they have landed."""
        with self._changed:
            self._waiting.clear()
            while True:
                for block in list(self._under_way):
                    self._keep(block)
                self._sweep()
                self._forget_replaced()
                self._settle()
                for block in list(self._blocks.values()):
                    if block.state is State.OFFLOADED:
                        self._start_in(block)
                self._raise_failure()
                if all(b.state is State.ON_DEVICE for b in self._blocks.values()):
                    if self._mover is not None:
                        self._mover.wait_resident(list(self._blocks.values()))
                    return
                self._wait(lambda: awaited(list(self._blocks.values())))

    def _settle(self) -> None:
        for block in self._blocks.values():
            held = block.storage() if block.user_visible and block.state is State.OFFLOADED else None
            if held is not None and self._mover is not None:
                self._mover.invalidate_mapping(block)
