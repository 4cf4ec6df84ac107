"""What a stage needs on the device: brought there, and held while the stage runs."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.device import Device, DeviceMemoryError
from runtime.paging.account import MemoryAccount
from runtime.paging.block import OFFLOADED, ON_DEVICE, PREFETCHING, UPDATING, Block
from runtime.paging.copy_signal import CopySignal, awaited
from runtime.paging.mover import Mover
from runtime.paging.prefetch_queue import PrefetchQueue
from runtime.paging.room import RoomMaker, out_of_memory
from runtime.paging.transitions import BlockTransitions
from runtime.system import checkpoint


class Stages:
    """Gives each stage its memory, see `Pager.acquire` and `Pager.retire`. All calls with the pager's lock held."""

    def __init__(
        self,
        device: Device,
        account: MemoryAccount,
        signal: CopySignal,
        mover: Mover | None,
        transitions: BlockTransitions,
        prefetches: PrefetchQueue,
        room: RoomMaker,
    ) -> None:
        self._device = device
        self._account = account
        self._signal = signal
        self._mover = mover
        self._transitions = transitions
        self._prefetches = prefetches
        self._room = room

    def acquire(
        self, blocks: Sequence[Block], new_bytes: int, what: str, then_fetch: Sequence[Block], *, in_one_piece: bool
    ) -> None:
        """See `Pager.acquire`."""
        piece_bytes = new_bytes if in_one_piece else 0
        try:
            self._hold(blocks, new_bytes, what, then_fetch, piece_bytes)
        except DeviceMemoryError:
            self._hold_alone(blocks, new_bytes, what, then_fetch, piece_bytes)

    def acquire_again(self, blocks: Sequence[Block], new_bytes: int, what: str) -> None:
        """See `Pager.acquire_again`."""
        self._release(blocks)
        try:
            self._hold_alone(blocks, new_bytes, what, (), 0)
        except BaseException:
            self._transitions.pin(blocks)  # whoever holds them will let go of them
            raise

    def _hold_alone(
        self, blocks: Sequence[Block], new_bytes: int, what: str, then_fetch: Sequence[Block], piece_bytes: int
    ) -> None:
        """Do what `_hold` does when everything has left that can."""
        self._room.empty()
        try:
            self._hold(blocks, new_bytes, what, then_fetch, piece_bytes)
        except DeviceMemoryError as error:
            raise out_of_memory(self._account.budget_bytes or 0, what) from error

    def _hold(self, blocks: Sequence[Block], new_bytes: int, what: str, then_fetch: Sequence[Block], piece_bytes: int) -> None:
        self._transitions.pin(blocks)
        self._signal.out_of_memory = None  # of a prefetch that nobody has waited for
        try:
            checkpoint()
            away = [block for block in blocks if block.state is not ON_DEVICE]
            if away:
                self._bring(away, new_bytes, what, then_fetch)
            else:
                self._room.make_room(away, new_bytes, what)
                self._account.reserved_bytes = new_bytes
                self._account.note_peak()
                self._fetch(then_fetch)
            if self._mover is not None:
                self._mover.wait_resident(blocks)
            if piece_bytes:
                self._device.try_memory(piece_bytes)
        except BaseException:
            self._release(blocks)
            raise

    def _bring(self, away: Sequence[Block], new_bytes: int, what: str, then_fetch: Sequence[Block]) -> None:
        """Reserve the memory of a stage, and bring the blocks to the device that were not there. Waits until they are."""
        while any(block.state is UPDATING for block in away):
            self._signal.wait(lambda: awaited([block for block in away if block.state is UPDATING]))
        self._room.make_room(away, new_bytes, what)
        coming = [block for block in away if block.state is PREFETCHING and not block.held_back]
        self._begin_missing(away, new_bytes)
        self._fetch(then_fetch)
        self._wait_for(away, coming)

    def _fetch(self, blocks: Sequence[Block]) -> None:
        if blocks and self._mover is not None:
            with self._mover.together():
                self._prefetches.ask_for(blocks)

    def _wait_for(self, away: Sequence[Block], coming: list[Block]) -> None:
        """Wait until those that were not on the device are there. coming: those whose copy in had begun; some may be late."""
        began = self._signal.now_seconds()
        while any(block.state in (PREFETCHING, OFFLOADED) for block in away):
            self._signal.raise_failure()
            if any(block.state is OFFLOADED for block in away):
                self._signal.raise_out_of_memory()
            checkpoint()
            self._signal.wait(lambda: awaited(away))
            self._prefetches.note_late(coming, self._signal.now_seconds() - began)

    def _begin_missing(self, blocks: Sequence[Block], new_bytes: int) -> None:
        """Begin to copy those blocks in that are OFFLOADED. All that are being copied in go first on their link."""
        missing = [block for block in blocks if block.state is OFFLOADED]
        self._account.reserved_bytes = new_bytes + sum(block.size_bytes for block in missing)
        for block in missing:
            self._account.reserved_bytes -= block.size_bytes
            if block.state is OFFLOADED:  # still: where one copy fails to begin, waiting prefetches may begin
                self._transitions.begin_prefetch(block)
        for block in blocks:
            if block.state is PREFETCHING and self._mover is not None:
                self._mover.prioritize(block)
        self._account.note_peak()

    def retire(self, blocks: Sequence[Block], written: Sequence[Block], last_used: Sequence[Block]) -> None:
        """See `Pager.retire`."""
        try:
            for block in written:
                self._transitions.write(block)
            for block in last_used:
                if block.storage() is None:
                    self._transitions.forget(block)
        except BaseException:
            for block in written:  # no slot of these may count as valid; twice does no harm
                self._transitions.write(block)
            raise
        finally:
            self._release(blocks)
        self._account.note_peak()

    def _release(self, blocks: Sequence[Block]) -> None:
        self._account.reserved_bytes = 0
        self._transitions.unpin(blocks)
