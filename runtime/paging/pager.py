"""Keeps the bytes on the device under the budget: evicts what is needed last, fetches what is needed now.

[Note: The pager is always right]
The pager can run any sequence of stages without a plan. A plan only adds hints (`offload`, `prefetch`). A hint may be late,
early or wrong: that costs time, but never correctness and never the budget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from planner.errors import StorageFullError
from planner.schema import WaitingTier
from runtime.device import CpuDevice, Device
from runtime.paging.account import MemoryAccount
from runtime.paging.block import ON_DEVICE, Block, Source
from runtime.paging.block_table import BlockTable
from runtime.paging.copy_signal import CopySignal
from runtime.paging.dropping import CopyRates, DropChoice
from runtime.paging.eviction import EvictionPolicy
from runtime.paging.holder import PLAIN, holder_of
from runtime.paging.lending import Lending
from runtime.paging.mover import Mover
from runtime.paging.prefetch_queue import PrefetchQueue
from runtime.paging.regions import Regions
from runtime.paging.room import RoomMaker
from runtime.paging.stages import Stages
from runtime.paging.transitions import BlockTransitions
from runtime.storage import RangeCopy


class Pager:
    """All blocks of one device, under one budget. What the executor, the timeline and the optimizer's steps call.

    Only the training thread may call it, unless a method says otherwise. Each method takes the lock, see [Note: Locking].

    mover: copies blocks; None if there is nowhere to move them to. device: where the stages run.
    budget_bytes: hard limit of blocks, stage outputs, workspaces and `unmoved_bytes` together; None for no limit.
    busy_seconds: returns for how long each link has been copying. condition, now_seconds: lock and clock; tests pass their own.

    account, table, condition: to look at; `table` only while `condition` is held.
    iteration: number of the iteration that runs; kept by the timeline.
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
        self.device = device or CpuDevice()
        self.iteration = 0
        self.account = MemoryAccount(budget_bytes)
        self.table = BlockTable(mover)
        self._mover = mover
        self._signal = CopySignal(condition=condition, mover=mover, busy_seconds=busy_seconds, now_seconds=now_seconds)
        self.condition = self._signal.condition
        self._lock = self._signal.lock
        self._eviction = EvictionPolicy()
        self._transitions = BlockTransitions(
            self.account, self.table, self._signal, mover, copy_ended=lambda: self._prefetches.begin_ready()
        )
        self._prefetches = PrefetchQueue(self.account, self.table, self._transitions)
        self._drops = DropChoice(self.account)
        self._room = RoomMaker(
            self.device, self.account, self.table, self._signal, mover, self._transitions, self._eviction, self._drops
        )
        self._lending = Lending(self.table, self._signal, self._transitions, self._prefetches)
        self._stages = Stages(self.device, self.account, self._signal, mover, self._transitions, self._prefetches, self._room)
        self._regions = Regions(
            self.device, self.account, self.table, self._signal, mover, self._transitions, self._prefetches, self._room
        )

    # -- what is counted

    @property
    def budget_bytes(self) -> int | None:
        """The budget, None for no limit."""
        return self.account.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int | None) -> None:
        self.account.budget_bytes = value

    @property
    def fixed_bytes(self) -> int:
        """Bytes that other parts of teraio keep on the device, such as small optimizer states. They report them here."""
        return self.account.fixed_bytes

    @fixed_bytes.setter
    def fixed_bytes(self, value: int) -> None:
        self.account.fixed_bytes = value

    @property
    def copy_rates(self) -> CopyRates | None:
        """Rates of the links, by which blocks under pressure are dropped where that takes less time; None: never."""
        return self._drops.rates

    @copy_rates.setter
    def copy_rates(self, value: CopyRates | None) -> None:
        self._drops.rates = value

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks on the device, including those being copied in or out."""
        return self.account.used_bytes

    @property
    def unmoved_bytes(self) -> int:
        """Bytes on the device that are not in blocks: `fixed_bytes`, and what else the device had when this region began."""
        return self.account.unmoved_bytes

    @property
    def movable_bytes(self) -> int:
        """Bytes of all blocks that can leave the device, wherever they are. For any thread."""
        with self._lock:
            return self.table.size_bytes(movable=True)

    @property
    def immovable_bytes(self) -> int:
        """Bytes that cannot leave the device: of other blocks, and those in no block. For any thread."""
        with self._lock:
            return self.table.size_bytes(movable=False) + self.unmoved_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that have counted against the budget at once."""
        return self.account.peak_bytes

    @property
    def evictions(self) -> int:
        """Number of offloads that have begun, and of blocks that were dropped because room was needed."""
        return self._transitions.evictions

    @property
    def reserved_for_host(self) -> frozenset[Block]:
        """The blocks that are reserved for the host's processor, see `reserve_for_host`."""
        return frozenset(self._transitions.reserved_for_host)

    @property
    def waited_seconds(self) -> float:
        """Seconds that the training thread has waited for copies, for room and for updates on the host."""
        return self._signal.waited_seconds

    @property
    def exposed_seconds(self) -> Mapping[str, float]:
        """For each link, the part of its busy seconds in which the training thread waited; the rest was hidden."""
        return self._signal.exposed_seconds

    def add_waited(self, seconds: float) -> None:
        """Count time in which the training thread waited for an update on the host."""
        with self._lock:
            self._signal.waited_seconds += seconds

    # -- which blocks there are

    @property
    def blocks(self) -> list[Block]:
        """All blocks that are alive."""
        with self._lock:
            self._transitions.sweep()
            return list(self.table)

    @property
    def can_move(self) -> bool:
        """Whether there is anywhere to move blocks to."""
        return self._mover is not None

    def block_of(self, tensor: torch.Tensor, *, name: str, kind: str, user_visible: bool) -> Block:
        """Return the block of `tensor`'s storage; a storage that is seen for the first time becomes one.

        The storage of a tensor that wraps another one is that of the inner tensor, see `holder_of`.
        """
        storage = holder_of(tensor).untyped_storage()
        block = self.table.find(storage)
        if block is None or not self.table.is_same(block, storage):
            with self._lock:
                if block is not None:
                    self._transitions.forget(block)
                span = self._mover.span(storage) if self._mover is not None else None
                block = Block(storage=storage, name=name, kind=kind, user_visible=user_visible, span=span)
                block.born = self.iteration
                self.account.add(block)
                try:
                    self.table.add(block, storage)
                except BaseException:
                    self.account.remove(block)
                    raise
                if user_visible:
                    self.account.recognise(block.size_bytes)
        elif user_visible and not block.user_visible:
            self.show_to_user([block])
        return block

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

    def make_movable(self, tensor: torch.Tensor) -> None:
        """Move the data of a tensor that is not a block yet to memory that it can leave, if that is allowed. Waits for it."""
        if self._mover is not None and tensor.layout is torch.strided and self.known_block(tensor) is None:
            self._mover.adopt(holder_of(tensor).untyped_storage())

    def can_leave(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's data is in memory that it can leave; moves it there first, see `make_movable`."""
        self.make_movable(tensor)
        return self._mover is not None and self._mover.span(holder_of(tensor).untyped_storage()) is not None

    def leave(self, tensor: torch.Tensor) -> None:
        """Let the memory of a tensor that is not a block yet stay on the device for good: it counts, but others own it."""
        if self._mover is not None and self.known_block(tensor) is None:
            self._mover.leave(holder_of(tensor).untyped_storage())

    def forget_dead(self) -> None:
        """Drop all blocks whose storage nobody holds any more, and free their slots."""
        with self._lock:
            self._transitions.sweep()

    # -- what the timeline and the optimizer know of blocks

    def show_to_user(self, blocks: Sequence[Block]) -> None:
        """User code can reach these blocks from now on."""
        with self._lock:
            for block in blocks:
                block.user_visible = True

    def record_uses(self, uses: Mapping[Block, tuple[int, ...]], ids: Mapping[Block, int] | None = None) -> None:
        """Set the positions within an iteration at which each block was used the last time. ids: see `assign_trace_ids`."""
        with self._lock:
            for block, positions in uses.items():
                block.uses = positions
            if ids:
                self.assign_trace_ids(ids)

    def set_source(self, blocks: Iterable[Block], source: Source | None) -> None:
        """From now on `source` recomputes these blocks once they are dropped; None: nothing does."""
        with self._lock:
            for block in blocks:  # one that a thread of a copy has forgotten meanwhile holds nothing any more
                block.source = source if self.table.holds(block) else None

    def assign_trace_ids(self, ids: Mapping[Block, int]) -> None:
        """Set the id of each block in the trace that the current plan was made for."""
        with self._lock:
            for block, trace_id in ids.items():
                block.trace_id = trace_id

    @property
    def clock(self) -> int:
        """Number of stages and regions that have begun, or ended, since the start; `Block.next_use` refers to it."""
        return self._eviction.clock

    def advance_clock(self, next_uses: Iterable[tuple[Block, int]] = ()) -> None:
        """One stage has passed, or a region begins. next_uses: after how many more stages each block is expected to be used."""
        with self._lock:
            self._eviction.clock = clock = self._eviction.clock + 1
            for block, stages in next_uses:
                block.next_use = clock + stages

    # -- around a stage

    def acquire(
        self,
        blocks: Sequence[Block],
        new_bytes: int,
        what: str,
        *,
        then_fetch: Sequence[Block] = (),
        in_one_piece: bool = False,
    ) -> None:
        """Bring `blocks` to the device, reserve `new_bytes` for outputs and workspace, and hold both until `retire`.

        what: name of the stage. then_fetch: prefetches to ask for once the copies have begun, see `prefetch`.
        in_one_piece: the device's allocator must have `new_bytes` in one piece, since the stage cannot run again if it has not.
        Waits until all copies have ended, or will have before the device goes on. Raises BudgetError if it cannot fit,
        StorageError if a copy failed; then nothing is held.
        """
        with self._lock:
            self._stages.acquire(blocks, new_bytes, what, then_fetch, in_one_piece=in_one_piece)

    def acquire_again(self, blocks: Sequence[Block], new_bytes: int, what: str) -> None:
        """The stage that holds `blocks` found no memory in one piece: let all leave that can, and bring `blocks` back, close
        together. They stay held until `retire`, also after an error.

        Waits until all copies have ended. Raises what `acquire` raises.
        """
        with self._lock:
            self._stages.acquire_again(blocks, new_bytes, what)

    def retire(self, blocks: Sequence[Block], written: Sequence[Block], *, last_used: Sequence[Block] = ()) -> None:
        """The stage has ended: what it held may move again, and slots of what it wrote are not valid. Never waits.

        last_used: blocks that nobody may hold any more; those that are dead count as free at once.
        """
        with self._lock:
            self._stages.retire(blocks, written, last_used)

    # -- hints of a plan

    def offload(self, block: Block, tier: WaitingTier | None = None) -> None:
        """Let a block leave for `tier` as soon as the link allows; at once if its slot is valid. Never waits.

        The block stays if the lower tiers have no room for it. See [Note: Why a block leaves] for what happens then.
        """
        self.offload_all([(block, tier)])

    def offload_all(self, leaving: Sequence[tuple[Block, WaitingTier | None]]) -> None:
        """Do what `offload` does for blocks and their tiers, in this order."""
        if self._mover is None:
            return
        with self._lock, self._mover.together():
            for block, tier in leaving:
                if block.state is ON_DEVICE and not block.pins and block.span is not None:
                    try:
                        self._transitions.begin_offload(block, tier)
                    except StorageFullError:
                        pass

    def drop(self, block: Block) -> None:
        """Free the memory of a block that is on the device and that its `source` can make anew; others stay. Never waits."""
        with self._lock:
            here = block.state is ON_DEVICE or block in self._transitions.queued_offloads
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

    def evict_until_free(self, size_bytes: int, *, keep: Sequence[Block]) -> None:
        """Begin to evict blocks, but none of `keep`, until so many bytes will be free. Never waits.

        Raises StorageFullError if the lower tiers have no room.
        """
        with self._lock:
            short = size_bytes - self.account.free_bytes - self.account.offloading_bytes
            if short > 0:
                self._room.evict(short, keep)

    def take_late(self) -> list[tuple[Block, float]]:
        """Return the prefetched blocks that a stage had to wait for since the last call, each with the seconds that it waited.

        Only those that waited for their link alone: an earlier prefetch would not have helped the others.
        """
        with self._lock:
            return self._prefetches.take_late()

    # -- around compiled regions, see [Note: User code]

    def enter_region(self) -> None:
        """A compiled region begins. Never waits. Raises StorageError if a copy has failed meanwhile."""
        with self._lock:
            self._regions.enter()

    def leave_region(self) -> None:
        """A compiled region ends. Waits until no block that user code can reach is being copied."""
        with self._lock:
            self._regions.leave()

    def bring_back_all(self) -> None:
        """Bring every block to the device that was not dropped, whatever the budget. Waits until all copies have ended."""
        with self._lock:
            self._regions.bring_back_all()

    # -- updates of blocks in their slots, see [Note: Lent slots]

    def lend(self, blocks: Sequence[Block]) -> None:
        """Lend the slots of `blocks` until `give_back`. Blocks on the device leave first. Waits until all have left.

        Raises StorageError if a copy failed or one of them cannot leave, StorageFullError if the lower tiers have no room.
        None is lent then.
        """
        with self._lock:
            self._lending.lend(blocks)

    def waits_in_host_tier(self, blocks: Sequence[Block]) -> bool:
        """Whether all blocks are in the host tier, or on their way there, so that the processor can update them. Never waits."""
        with self._lock:
            return self._lending.waits_in_host_tier(blocks)

    def reserve_for_host(self, blocks: Sequence[Block]) -> bool:
        """Reserve blocks for the host's processor, if all are in the host tier or on their way there. Never waits.

        Returns whether they are reserved. No prefetch takes them until `lend_memory` or `give_back` is called for them; a
        stage that needs one does.
        """
        with self._lock:
            return self._lending.reserve_for_host(blocks)

    def lend_memory(self, blocks: Sequence[Block]) -> list[int] | None:
        """Lend slots in the host tier until `give_back`. Returns their addresses, for the processor to read and write there.

        Returns None, and lends nothing, if one of them does not get to the host tier in one piece. Waits until those on their
        way have arrived. For any thread. What the device was asked to write to the slots by itself must have ended before.
        """
        with self._lock:
            return self._lending.lend_memory(blocks)

    def give_back(self, blocks: Sequence[Block]) -> None:
        """End `lend`, `lend_memory` or `reserve_for_host`: the blocks hold what is in their slots now.

        Never waits. For any thread.
        """
        with self._lock:
            self._lending.give_back(blocks)

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to read a range of a lent slot, see `Mover.read_range`."""
        with self._lock:
            return self._transitions.need_mover().read_range(block, begin_bytes, memory)

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to write a range of a lent slot, see `Mover.write_range`."""
        with self._lock:
            return self._transitions.need_mover().write_range(block, begin_bytes, memory)

    def drop_void_copies(self, tier: WaitingTier) -> None:
        """Free the slots in `tier` of blocks on the device that were written since. Never waits."""
        with self._lock:
            self._transitions.drop_void_copies(tier)
