"""Makes room on the device within the budget."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from planner.errors import BudgetError, StorageFullError
from runtime.device import Device
from runtime.paging.account import NO_LIMIT, MemoryAccount
from runtime.paging.block import OFFLOADED, Block
from runtime.paging.block_table import BlockTable
from runtime.paging.copy_signal import CopySignal
from runtime.paging.dropping import DropChoice
from runtime.paging.eviction import EvictionPolicy
from runtime.paging.mover import Mover
from runtime.paging.transitions import BlockTransitions
from runtime.system import checkpoint

_STEP_BYTES = 64 << 20
"""By how much a larger budget should be tried: more than a few pages of the device's allocator."""


class RoomMaker:
    """Evicts blocks where the account, or the device's allocator, is short. All calls with the pager's lock held."""

    def __init__(
        self,
        device: Device,
        account: MemoryAccount,
        table: BlockTable,
        signal: CopySignal,
        mover: Mover | None,
        transitions: BlockTransitions,
        eviction: EvictionPolicy,
        drops: DropChoice,
    ) -> None:
        self._device = device
        self._account = account
        self._table = table
        self._transitions = transitions
        self._eviction = eviction
        self._signal = signal
        self._mover = mover
        self._drops = drops

    def make_room(self, blocks: Sequence[Block], new_bytes: int, what: str) -> None:
        """Reserve memory for those of `blocks` that are OFFLOADED and for `new_bytes`. Waits until enough is free.

        what: name of the stage. Raises BudgetError if the stage does not fit, StorageError if a copy failed.
        """
        account, queued = self._account, self._transitions.queued_offloads
        if account.budget_bytes is None:
            return
        while True:
            self._signal.raise_failure()
            checkpoint()
            account.reserved_bytes = wanted = _away_bytes(blocks) + new_bytes  # no prefetch may take it meanwhile
            if account.short_bytes(wanted) <= 0:
                break
            self._transitions.sweep()
            if (short := self._short_bytes(blocks, new_bytes)) > account.offloading_bytes:
                self.evict(short - account.offloading_bytes)
            while queued and self._short_bytes(blocks, new_bytes) > 0:
                self._transitions.take_memory(next(iter(queued)))
            short = self._short_bytes(blocks, new_bytes)
            if short > 0:
                if not account.offloading_bytes and not account.prefetching_blocks:
                    raise self._too_small(what, short)
                self._signal.wait(lambda: f"for room for {what}")
        self.trim()

    def empty(self) -> None:
        """Let everything leave that can, and the allocator give its memory back: what comes in next lies close together.

        For when the allocator has nothing in one piece. What stages hold stays, and so does what the lower tiers have no room
        for. Waits until all copies have ended. Raises StorageError if one failed.
        """
        account, queued = self._account, self._transitions.queued_offloads
        try:
            while True:
                self._signal.raise_failure()
                checkpoint()
                account.reserved_bytes = NO_LIMIT  # no prefetch may begin meanwhile
                self._transitions.sweep()
                with contextlib.suppress(StorageFullError):
                    for block in self._eviction.order(account.here):
                        self._transitions.begin_offload(block)
                while queued:
                    self._transitions.take_memory(next(iter(queued)))
                if not account.offloading_bytes and not account.prefetching_blocks:
                    break
                self._signal.wait("for all blocks to leave")
        finally:
            account.reserved_bytes = 0
        self._device.give_back_memory()

    def evict(self, wanted_bytes: int, keep: Collection[Block] = ()) -> None:
        """Let blocks leave, but none of `keep`, until `wanted_bytes` are or will be free, or no block is left."""
        for block in self._eviction.order(self._account.here, keep=keep):
            if wanted_bytes <= 0:
                return
            wanted_bytes -= block.size_bytes
            if self._drops.is_better(block):
                self._transitions.evictions += 1
                self._transitions.drop(block)
            else:
                self._transitions.begin_offload(block)

    def trim(self) -> None:
        """Let the mover free memory that it keeps for reuse: the budget counts that as well."""
        if self._mover is not None and self._account.budget_bytes is not None:
            self._mover.trim(self._account.unused_bytes)

    def _short_bytes(self, blocks: Sequence[Block], new_bytes: int) -> int:
        return self._account.short_bytes(_away_bytes(blocks) + new_bytes)

    def _too_small(self, what: str, short: int) -> BudgetError:
        self._transitions.need_mover()  # raises another error if there is none
        budget = self._account.budget_bytes or 0
        return BudgetError(smallest_bytes=budget + short, budget_bytes=budget, stage=what)


def out_of_memory(budget_bytes: int, what: str) -> BudgetError:
    """Return the error of a stage for which the device's allocator has no memory although everything else has left."""
    return BudgetError(
        smallest_bytes=budget_bytes + _STEP_BYTES,
        budget_bytes=budget_bytes,
        stage=what,
        not_counted="memory that this stage's operators take beyond the estimate, and gaps between blocks",
    )


def _away_bytes(blocks: Sequence[Block]) -> int:
    return sum(block.size_bytes for block in blocks if block.state is OFFLOADED)
