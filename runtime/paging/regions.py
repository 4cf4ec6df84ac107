"""The boundary between compiled regions and user code.

[Note: User code]
Between compiled regions user code may write any block that it can reach. `Pager.leave_region` waits until none of those is
being copied, and assumes that user code changes all of them. Until `Pager.enter_region` no copy of them begins. If one leaves
later whose copy was valid before, the mover may find that it was not changed, see [Note: Writes that change nothing].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from planner.errors import ChecksumError
from runtime.device import Device
from runtime.paging.account import MemoryAccount
from runtime.paging.block import DROPPED, OFFLOADED, ON_DEVICE, Block
from runtime.paging.block_table import BlockTable
from runtime.paging.copy_signal import CopySignal, awaited
from runtime.paging.mover import Mover
from runtime.paging.prefetch_queue import PrefetchQueue
from runtime.paging.room import RoomMaker
from runtime.paging.transitions import BlockTransitions


class Regions:
    """Hands blocks over to user code and takes them back, see [Note: User code]. All calls with the pager's lock held."""

    def __init__(
        self,
        device: Device,
        account: MemoryAccount,
        table: BlockTable,
        signal: CopySignal,
        mover: Mover | None,
        transitions: BlockTransitions,
        prefetches: PrefetchQueue,
        room: RoomMaker,
    ) -> None:
        self._device = device
        self._account = account
        self._table = table
        self._signal = signal
        self._mover = mover
        self._transitions = transitions
        self._prefetches = prefetches
        self._room = room

    def enter(self) -> None:
        """See `Pager.enter_region`."""
        self._signal.raise_failure()
        self._transitions.sweep()
        self._transitions.forget_replaced()
        self._account.external_bytes = self._device.external_bytes(self._account.used_bytes + self._account.fixed_bytes)
        self._invalidate_mappings()
        self._prefetches.in_user_code = False

    def leave(self) -> None:
        """See `Pager.leave_region`."""
        self._prefetches.in_user_code = True
        try:
            self._transitions.sweep()
            visible = self._visible()
            self._wait_until_still(visible)
            resident = self._assume_written(visible)
        except BaseException:  # user code goes on, and may write to them
            self._assume_written(self._visible())
            raise
        if self._mover is not None:
            self._mover.wait_resident(resident)
        self._room.trim()
        self._signal.raise_failure()

    def _visible(self) -> list[Block]:
        """Those that have memory on the device, or lent slots."""
        return [block for block in self._account.here if block.user_visible]

    def _wait_until_still(self, visible: Sequence[Block]) -> None:
        while True:
            for block in [b for b in self._transitions.queued_offloads if b.user_visible]:  # each wait may add some
                self._transitions.take_memory(block)
            if not [block for block in visible if block.state is not ON_DEVICE and block.state is not OFFLOADED]:
                return
            self._signal.wait("for blocks that user code can reach")

    def _assume_written(self, visible: Sequence[Block]) -> list[Block]:
        """User code may write to these blocks from now on. Return those that are ON_DEVICE."""
        self._transitions.assume_written(visible)
        return [block for block in visible if block.state is ON_DEVICE]

    def bring_back_all(self) -> None:
        """See `Pager.bring_back_all`."""
        self._prefetches.clear()
        compact = False
        asked: set[Block] = set()
        damage: list[ChecksumError] = []  # raised when all other blocks are back
        while True:
            for block in list(self._transitions.queued_offloads):
                self._transitions.keep(block)
            self._transitions.sweep()
            self._transitions.forget_replaced()
            with _kept(damage):
                self._invalidate_mappings()
            for block in [block for block in self._table if block.state is OFFLOADED and block not in asked]:
                asked.add(block)
                self._transitions.begin_prefetch(block)
            with _kept(damage):
                self._signal.raise_failure()
            if self._signal.out_of_memory is not None and not compact:
                compact, self._signal.out_of_memory = True, None
                self._device.give_back_memory()  # what is free in pieces serves in other sizes then
                asked.clear()
                continue
            self._signal.raise_out_of_memory()
            here = (ON_DEVICE, DROPPED, OFFLOADED) if damage else (ON_DEVICE, DROPPED)
            if all(block.state in here for block in self._table):
                break
            self._signal.wait(lambda: awaited(list(self._table)))
        if self._mover is not None:
            for block in [block for block in self._table if block.state is ON_DEVICE]:
                with _kept(damage):
                    self._mover.wait_resident([block])
        if damage:
            raise damage[0]

    def _invalidate_mappings(self) -> None:
        """User code may have written to what stands in for the blocks that are away. Raises ChecksumError, after the last one."""
        if self._mover is None or not self._mover.keeps_mappings:
            return
        damage: list[ChecksumError] = []
        for block in self._table:
            held = block.storage() if block.user_visible and block.state is OFFLOADED else None
            if held is not None:
                with _kept(damage):
                    self._mover.invalidate_mapping(block)
        if damage:
            raise damage[0]


@contextmanager
def _kept(damage: list[ChecksumError]) -> Iterator[None]:
    """Keep what says that a block came back different, to raise it later."""
    try:
        yield
    except ChecksumError as error:
        damage.append(error)
