"""Blocks that are changed where they wait: their slots are lent to who updates them there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.paging.block import Block, State
from runtime.paging.residency import Residency
from runtime.storage import RangeCopy
from runtime.system import first_of

_POLL_SECONDS = 0.001
"""Nobody tells when a copy that the device makes by itself has ended."""


class Lending(Residency):
    """Lends the slots of blocks that are away, see `Residency` for the arguments.

    [Note: Lent slots]
    A block that is UPDATING stays away until it is given back: it is neither fetched nor evicted, and a hint for it waits.
    Who has borrowed it keeps its storage alive, has ended all copies from and to its slot when it is given back, and does so
    before the region ends. A stage that needs it waits until then.
    """

    def lend(self, blocks: Sequence[Block]) -> None:
        """Lend the slots of `blocks` until `give_back`. Those on the device leave first. Blocks until all are away.

        Raises StorageError if a copy failed or one of them cannot leave, StorageFullError if there is no room in the lower
        tiers; none is lent then.
        """
        with self._changed:
            while True:
                self._raise_failure()
                for block in blocks:
                    self._send_away(block)
                if all(block.state is State.OFFLOADED for block in blocks):
                    break
                self._wait(lambda: f"{first_of([block.name for block in blocks])} to leave the device")
            self._begin_lending(blocks)

    def waits_in_host_tier(self, blocks: Sequence[Block]) -> bool:
        """Whether all blocks are in the host tier, or on their way there, where they can be lent. Never blocks."""
        with self._changed:
            there = all(block.state in (State.OFFLOADED, State.OFFLOADING, State.UPDATING) for block in blocks)
            return there and all(self._host_address(block) is not None for block in blocks)

    def set_aside(self, blocks: Sequence[Block]) -> bool:
        """Whether all blocks are in the host tier, or on their way there, where `lend_memory` gives them. Never blocks.

        If so, no prefetch takes them before that or `give_back` is called for them; who acquires one does.
        """
        with self._changed:
            if any(b.state not in (State.OFFLOADED, State.OFFLOADING) or self._host_address(b) is None for b in blocks):
                return False
            self._set_aside.update(blocks)
            return True

    def lend_memory(self, blocks: Sequence[Block]) -> list[int] | None:
        """Lend slots in the host tier: their addresses, for the processor to read and write there. For any thread.

        None, and nothing is lent, if one of them does not come to wait there in one piece. Blocks until those that are on
        their way have landed; what the device has been asked to write to them by itself must have ended before.
        """
        with self._changed:
            try:
                while self._still_leaving(blocks):
                    self._changed.wait(_POLL_SECONDS)
                    self._need_mover().check()
                if any(block.state is not State.OFFLOADED or block.pins or not self._is_current(block) for block in blocks):
                    return None
                addresses = [address for b in blocks if (address := self._host_address(b)) is not None]
                if len(addresses) < len(blocks):
                    return None
                self._begin_lending(blocks)
                return addresses
            finally:
                self._set_aside.difference_update(blocks)
                self._pump()

    def drop_void_copies(self, tier: WaitingTier) -> None:
        """Make room in a tier; the device may still read what was there. Never blocks."""
        with self._changed:
            self._give_up_copies([b for b in self._with_copies() if b.tier == tier and not b.copy_is_valid])

    def _begin_lending(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._need_mover().invalidate_mapping(block)
            block.state = State.UPDATING

    def _still_leaving(self, blocks: Sequence[Block]) -> bool:
        for block in [b for b in blocks if b in self._under_way and self._need_mover().finished(b)]:
            self._reclaim(block)
        return any(block.state is State.OFFLOADING for block in blocks)

    def _host_address(self, block: Block) -> int | None:
        return self._need_mover().host_address(block) if block.tier == "host" else None

    def give_back(self, blocks: Sequence[Block]) -> None:
        """What is in the slots now is what the blocks hold; those that were set aside only may move. Never blocks.

        For any thread.
        """
        with self._changed:
            self._set_aside.difference_update(blocks)
            for block in [block for block in blocks if block.state is State.UPDATING]:
                block.version += 1
                block.state = State.OFFLOADED
            self._pump()
            self._changed.notify_all()

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to read a part of a lent slot, see `Mover.read_range`."""
        with self._changed:
            return self._need_mover().read_range(block, begin_bytes, memory)

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to write a part of a lent slot, see `Mover.write_range`."""
        with self._changed:
            return self._need_mover().write_range(block, begin_bytes, memory)

    def _send_away(self, block: Block) -> None:
        if block.span is None or block.pins or block.dead:
            raise StorageError(f"{block} cannot leave, so that it cannot be lent; this is a bug in teraio, please report it")
        while block.state is State.ON_DEVICE or block in self._under_way:
            if block in self._under_way:
                self._reclaim(block)
            else:
                self._start_out(block)
