"""Keeps the bytes on the device under the budget: evicts what is needed last, fetches what is needed now.

[Note: The pager is always right]
The pager can run any sequence of stages without a plan. A plan only adds hints (`offload`, `prefetch`). A hint may be late,
early or wrong: that costs time, but never correctness and never the budget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from planner.errors import StorageFullError, UnsupportedError
from planner.schema import WaitingTier
from runtime.device import MIN_MOVED_BYTES, CpuDevice, Device
from runtime.paging.block import OFFLOADED, ON_DEVICE, PLAIN, UNNAMED, Block, holder_of
from runtime.paging.mover import Mover, NullMover
from runtime.paging.stage_memory import POLL_SECONDS, Closing, Lending, Parking, Stages
from runtime.paging.state import NO_LIMIT, BlockTable, CopySignal, MemoryAccount, PagerState
from runtime.paging.transitions import BlockTransitions


class Pager(Stages):
    """All blocks of one device, under one budget. What the executor, the observer and the optimizer's steps call.

    Only the training thread may call it, unless a method says otherwise. Each method takes the lock, see [Note: Locking]. What
    goes on around a stage, such as `region`, `acquire` and `retire`, comes from `Stages` in `stage_memory.py`.

    mover: copies blocks; None if there is nowhere to move them to. device: where the stages run.
    budget_bytes: hard limit, see `MemoryAccount`; None for no limit.
    busy_seconds: returns for how long each link has been copying. condition, now_seconds: lock and clock; tests pass their own.

    account, table, condition: to look at; `table` only while `condition` is held. can_move: whether there is anywhere to move
    blocks to. lending: lends slots to updates. parking: empties the device. closing: ends its work. iteration: number of the
    iteration that runs; kept by the observer.
    """

    def __init__(
        self,
        *,
        mover: Mover | None,
        budget_bytes: int | None,
        device: Device | None = None,
        busy_seconds: Callable[[], Mapping[str, float]] = dict,
        condition: threading.Condition | None = None,
        now_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        device = device or CpuDevice()
        self.iteration = 0
        self.can_move = mover is not None
        mover = mover or NullMover()
        account = MemoryAccount(budget_bytes)
        account.external_bytes = device.external_bytes(NO_LIMIT)  # what counts besides, for the first check of the budget
        signal = CopySignal(account, mover.tiers, condition=condition, busy_seconds=busy_seconds, now_seconds=now_seconds)
        self.condition = signal.condition
        state = PagerState(device, mover, account, BlockTable(mover), signal)
        transitions = BlockTransitions(state, copy_ended=lambda: self._prefetches.begin_ready())
        super().__init__(state, transitions)
        self.lending = Lending(state, transitions)
        self.parking = Parking(state, self._prefetches, self._room)
        self.closing = Closing(state, transitions, self._prefetches)

    @property
    def has_drives(self) -> bool:
        """Whether there is a storage tier."""
        return any(tier.name == "storage" for tier in self._tiers)

    @property
    def drives_are_out_of_reach(self) -> bool:
        """Whether user code and autograd cannot use what waits on drives. On the CPU they can."""
        return self.has_drives and self.device.asynchronous

    # -- which blocks there are

    @property
    def blocks(self) -> list[Block]:
        """All blocks that are alive."""
        with self._lock:
            self._transitions.sweep()
            return list(self.table)

    def size_bytes(self, *, movable: bool) -> int:
        """Return the bytes of all blocks that can leave the device, wherever they are; else of what cannot: the other blocks,
        and what is in no block. For any thread."""
        with self._lock:
            return self.table.size_bytes(movable=movable) + (0 if movable else self.account.unmoved_bytes)

    def block_of(self, tensor: torch.Tensor, *, name: str, kind: str, user_visible: bool) -> Block:
        """Return the block of `tensor`'s storage; a storage that is seen for the first time becomes one.

        name, kind: of a new block, or of one that is UNNAMED.
        The storage of a tensor that wraps another one is that of the inner tensor, see `holder_of`.
        """
        storage = holder_of(tensor).untyped_storage()
        block = self.table.find(storage)
        if block is None or not self.table.is_same(block, storage):
            with self._lock:
                if block is not None:
                    self._transitions.forget(block)
                span = self._mover.span(storage)
                block = Block(held=storage, name=name, kind=kind, user_visible=user_visible, span=span)
                block.born = self.iteration
                self._transitions.begin(block, storage)
            if user_visible:
                self.device.keep_until_computed(storage)
            return block
        if block.name is UNNAMED:
            with self._lock:
                block.name, block.kind = name, kind
        if user_visible and not block.user_visible:
            self.show_to_user([block])
        return block

    def block_in_file(self, name: str, *, path: Path, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
        """Return a new storage on the device that is a parameter, away: its content is so many bytes of a file from an offset on.

        Reads none of them, takes no memory, and writes none to the lower tiers: the file is the block's copy, see
        [Note: Blocks in files]. The block lives as long as the storage; tied weights share it. On a GPU nobody can access
        it before a stage does: make tensors of it by `storage_swap.tensor_over`. Files are opened once, whatever path leads to
        them. For any thread. Raises UnsupportedError where that cannot be, StorageIOError if the file is missing,
        too short or changed.
        """
        if size_bytes < MIN_MOVED_BYTES:
            raise UnsupportedError(
                f"{name} has {size_bytes:,} bytes in {path}; blocks of less than {MIN_MOVED_BYTES:,} do not move: read it instead"
            )
        with self._lock:
            slot = self._tiers.slot_in_file(name, path, offset_bytes, size_bytes)
            try:
                block, storage = self._mover.begin_in_file(slot)
                block.born = self.iteration
                self._transitions.begin_away(block, storage, slot)
            except BaseException:
                self._tiers.release_in_file(slot)
                raise
            return storage

    def known_block(self, tensor: torch.Tensor) -> Block | None:
        """Return the block of `tensor`'s storage, if it has one; a sparse tensor never has."""
        return self.table.find(holder_of(tensor).untyped_storage()) if tensor.layout is torch.strided else None

    def known_blocks(self, values: Sequence[object]) -> list[Block | None]:
        """Return for each value what `known_block` does; None for those that are no tensors."""
        find, known = self.table.find, []
        for value in values:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                known.append(find((value if type(value) in PLAIN else holder_of(value)).untyped_storage()))
            else:
                known.append(None)
        return known

    def make_movable(self, tensor: torch.Tensor) -> bool:
        """Move the data of a tensor that is not a block yet to memory that it can leave, if that is allowed. Waits for it.

        Returns whether it can leave.
        """
        if not self.can_move or tensor.layout is not torch.strided:
            return False
        known = self.known_block(tensor)
        storage = holder_of(tensor).untyped_storage()
        if known is None and self._tiers.ownership.left_behind(storage) is not None:
            known = self._take_over(tensor, storage)
        return (known.span if known is not None else self._mover.span(storage, adopt=True)) is not None

    def _take_over(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Block:
        """Bring in what an earlier run has left in its tiers, as a block that counts from the start. Others leave for it."""
        in_user_code = self._prefetches.in_user_code
        if in_user_code:
            self.enter_region()
        try:
            with self._lock:
                reserved = self.account.reserved_bytes  # of the operator that runs
                try:
                    self._room.make_room((), reserved + storage.nbytes(), "a tensor that an earlier run has left in its tiers")
                    self._mover.span(storage, adopt=True)
                    block = self.block_of(tensor, name=UNNAMED, kind="parameter", user_visible=False)  # it was not there before
                finally:
                    self._transitions.reserve(reserved)
            self.show_to_user([block])
            self.device.keep_until_computed(storage)
            return block
        finally:
            if in_user_code:
                self.leave_region()

    def map_away(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Return main memory over the content of a tensor that is not on its device, see `Tiers.map`; None if it is there.

        Between regions. Waits for the device, whose copies and kernels may still write the content.
        """
        with self._lock:
            block = self.known_block(tensor)
            if block is None or block.state is not OFFLOADED or not self.table.is_current(block):
                return None
            self.device.synchronize()
            while not self._mover.finished([block]):
                self._signal.poll(POLL_SECONDS)
            return self._tiers.map(block)

    def leave(self, tensor: torch.Tensor) -> None:
        """Let the memory of a tensor that is not a block yet stay on the device for good: it counts, but others own it."""
        if self.known_block(tensor) is None:
            self._tiers.ownership.leave(holder_of(tensor).untyped_storage())

    def forget_dead(self) -> None:
        """Drop all blocks whose storage nobody holds any more, and free their slots."""
        with self._lock:
            self._transitions.sweep()

    # -- what the observer and the optimizer know of blocks

    def show_to_user(self, blocks: Sequence[Block]) -> None:
        """User code can reach these blocks from now on."""
        with self._lock:
            for block in blocks:
                block.user_visible = True

    def record_uses(self, uses: Mapping[Block, tuple[int, ...]]) -> None:
        """Set the positions within an iteration at which blocks were used the last time."""
        with self._lock:
            for block, positions in uses.items():
                block.uses = positions

    def set_source(self, blocks: Iterable[Block], source: object) -> None:
        """From now on `source` recomputes these blocks once they are dropped; None: nothing does."""
        with self._lock:
            for block in blocks:  # one that a thread of a copy has forgotten meanwhile holds nothing any more
                block.source = source if self.table.holds(block) else None

    def advance_clock(self, next_uses: Iterable[tuple[Block, int]] = ()) -> None:
        """One stage has passed, or a region begins. next_uses: after how many more stages each block is expected to be used."""
        with self._lock:
            self.account.clock = clock = self.account.clock + 1
            for block, stages in next_uses:
                block.next_use = clock + stages

    # -- hints of a plan

    def offload(self, block: Block, tier: WaitingTier | None = None) -> None:
        """Let a block leave for `tier` as soon as the link allows; at once if its slot is valid. Never waits.

        The block stays if the lower tiers have no room for it. See [Note: Why a block leaves] for what happens then.
        """
        self.offload_all([(block, tier)])

    def offload_all(self, leaving: Sequence[tuple[Block, WaitingTier | None]]) -> None:
        """Do what `offload` does for blocks and their tiers, in this order."""
        with self._lock, self._mover.together:
            for block, tier in leaving:
                if block.state is ON_DEVICE and not block.pins and block.span is not None:
                    try:
                        self._transitions.begin_offload(block, tier)
                    except StorageFullError:
                        pass

    def drop(self, block: Block) -> None:
        """Free the memory of a block that is on the device and that its `source` can recompute; others stay. Never waits."""
        with self._lock:
            here = block.state is ON_DEVICE or block in self.account.queued_offloads
            if here and block.can_be_dropped and self.table.is_current(block):
                self._transitions.drop(block)

    def renew(self, fresh: Mapping[Block, torch.UntypedStorage]) -> None:
        """Give dropped blocks the memory of storages of their sizes, which hold their contents and end here. Never waits."""
        with self._lock:
            for block, storage in fresh.items():
                self._transitions.renew(block, storage)

    def prefetch(self, block: Block) -> None:
        """Bring a block back as soon as there is room, after those asked for before. Never waits."""
        with self._lock:
            self._prefetches.ask_for([block])

    def take_late(self) -> list[tuple[Block, float]]:
        """Return the prefetched blocks that a stage had to wait for since the last call, each with the seconds that it waited.

        Only those that waited for their link alone: an earlier prefetch would not have helped the others.
        """
        with self._lock:
            return self._prefetches.take_late()

    # -- room

    def evict_until_free(self, size_bytes: int, *, keep: Sequence[Block]) -> None:
        """Begin to evict blocks, but none of `keep`, until so many bytes will be free. Never waits.

        Raises StorageFullError if the lower tiers have no room.
        """
        with self._lock:
            short = size_bytes - self.account.free_bytes - self.account.offloading_bytes
            if short > 0:
                self._room.evict(short, keep)

    def drop_void_copies(self, tier: WaitingTier) -> None:
        """Free the slots in `tier` of blocks on the device that were written since. Never waits."""
        with self._lock:
            self._transitions.drop_void_copies(tier)
