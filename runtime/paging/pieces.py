"""Room in pieces for stages whose allocator serves each request in one piece.

[Note: Memory in pieces]
The budget counts bytes, wherever they lie. Where the allocator of a GPU has no free range that is large enough, it takes all
free memory away from where it lies, and puts some of it where the request goes ("a retry"): tens of milliseconds, and what is
left has gaps, over which nothing can be joined. To copy the blocks that are in the way on the device takes less than one. So
once there has been a retry, memory is put where the gaps are, and each stage is recorded in one of its runs: which pieces it
allocates. From then on blocks make way before it runs, if it needs a large piece, or has had a retry, and before a large block
comes back. What is large is learnt from retries. A stage, or a size of block, for which none had to for long is left alone
until there are retries again. What came before the plan lies in part where user code allocates, so everything leaves that can
when a plan begins, and comes back close together. What is found wrong costs a retry.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.device import MIN_MOVED_BYTES, DeviceMemoryError, Pieces
from runtime.paging.block import ON_DEVICE, Block
from runtime.paging.state import NO_LIMIT, PagerPart, PagerState
from runtime.paging.transitions import BlockTransitions

# For a piece of this part of the budget blocks make way, and then for the smaller ones of its stage: they could take its place.
# For one as large as that of a stage that had a retry they do, too, down to the second part.
_LARGE_SHARE, _LEAST_SHARE = 64, 512
_LOOKED_AT = 12  # so many regions after a retry, each stage is asked whether it had one: that takes as long as ten of its blocks
_SETTLED = 32  # a stage for which so often in a row none had to make way is looked at only where there are retries


class _Recorded(NamedTuple):
    """What a stage has allocated and freed, see `Pieces.recorded`, when it was said to need `new_bytes` at most."""

    history: Sequence[int]
    new_bytes: int


class StagePieces(PagerPart):
    """What stages need in one piece, by name. All calls with the pager's lock held, by the training thread."""

    def __init__(self, state: PagerState, transitions: BlockTransitions) -> None:
        super().__init__(state)
        self._transitions = transitions
        self._seen: set[str] = set()
        self._known: dict[str, _Recorded] = {}
        self._retried: set[str] = set()  # stages
        self._retried_bytes: int | None = None  # the smallest piece for which stages had retries
        self._served: dict[str | int, int] = {}  # how often in a row none had to make way for a stage, or a block of that size
        self._running = ""
        self._new_bytes = 0
        self._come_bytes = 0  # the largest block that came back since a stage has ended
        self._recording = False
        self._retries = self._retries_before = 0
        self._looks = 0
        self._anew = False
        self._thread: int | None = None

    def plan_begins(self) -> None:
        """A plan is followed from now on: after retries, everything leaves once, before a stage for which blocks make way."""
        self._anew = self._device.pieces is not None and self._device.retries > 0

    def region_begins(self) -> None:
        """A compiled region begins."""
        self._thread = threading.get_ident()
        if self._device.pieces is not None and self._account.budget_bytes is not None:
            retries, before = self._device.retries, self._retries_before
            self._looks, self._retries_before = _LOOKED_AT if retries > before else max(self._looks - 1, 0), retries
            self._retries = retries

    def stage_begins(self, what: str, new_bytes: int, held: Sequence[Block]) -> None:
        """A stage runs next, for which the budget has room. held: the blocks that it uses, which nobody else may hold.

        Raises DeviceMemoryError if everything should leave that can, for the others to lie close together.
        """
        pieces = self._device.pieces
        if pieces is None or not self._retries_before:
            return
        self.give_up()
        known = self._known.get(what)
        if known is not None and known.new_bytes >= new_bytes:
            if self._looks_at(what, max(known.history, default=0)):
                self._make_way(pieces, what, known.history, frozenset(held))
                if self._anew:
                    self._anew = False
                    raise DeviceMemoryError(f"free memory lies too far apart for {what}")
        elif what in self._seen:
            self._recording = pieces.begin_recording()
        self._seen.add(what)
        self._running, self._new_bytes = what, new_bytes

    def block_begins(self, size_bytes: int) -> None:
        """A block of that size comes back next, for which the budget has room. For any thread; blocks make way in the thread that
        runs the region: others do not queue what the device computes."""
        self._come_bytes = max(self._come_bytes, size_bytes)
        if self._device.pieces is not None and self._retries_before and self._looks_at(size_bytes, size_bytes):
            if not self._recording and threading.get_ident() == self._thread:
                with contextlib.suppress(DeviceMemoryError):  # the block itself will have to find its memory
                    self._make_way(self._device.pieces, size_bytes, (size_bytes,), frozenset())

    def _looks_at(self, what: str | int, largest: int) -> bool:
        """Whether blocks make way, if they have to, for a stage whose largest piece that is, or for a block of that size."""
        settled = not self._looks and self._served.get(what, 0) >= _SETTLED
        return not settled and (what in self._retried or self._is_enough(largest))

    def _is_enough(self, size_bytes: int) -> bool:
        return self._is_large(size_bytes) or self._retried_bytes is not None and size_bytes >= self._retried_bytes

    def _is_large(self, size_bytes: int, share: int = _LARGE_SHARE) -> bool:
        return size_bytes >= (self._account.budget_bytes or 0) // share

    def give_up(self) -> None:
        """The stage that began last, if it has not ended, does not run, or runs once more: what was recorded is not all."""
        self._end_recording()
        self._running = ""

    def stage_ended(self) -> None:
        """The stage that began last has ended."""
        what, self._running = self._running, ""
        if not what:
            return
        history = self._end_recording()
        if history is not None:
            self._known[what] = _Recorded(history, self._new_bytes)
        if self._looks:
            before, self._retries = self._retries, self._device.retries
            if self._retries > before:  # its own, or of a block that came back for it
                self._retried.add(what)
                own = max(self._known[what].history, default=0) if what in self._known else 0
                missed = [size for size in (own, self._come_bytes) if not self._is_enough(size)]
                if missed and self._is_large(max(missed), _LEAST_SHARE):
                    self._retried_bytes = max(missed)
        self._come_bytes = 0

    def _end_recording(self) -> Sequence[int] | None:
        if not self._recording or self._device.pieces is None:
            return None
        self._recording = False
        return self._device.pieces.recorded(MIN_MOVED_BYTES)

    def _make_way(self, pieces: Pieces, what: str | int, history: Sequence[int], held: frozenset[Block]) -> None:
        blocks: dict[int, Block] = {}
        kept: list[torch.UntypedStorage] = []  # of dead blocks, copies that have ended let go at any time

        def movable() -> dict[int, int]:
            self._mover.finished(())  # frees what copies that have ended kept alive
            for block in self._account.here:
                if block.state is ON_DEVICE and block.span is not None and block.pins == (block in held):
                    if (storage := block.storage()) is not None:
                        kept.append(storage)
                        blocks[block.address] = block
            return {address: block.size_bytes for address, block in blocks.items()}

        def move(address: int, fresh: torch.UntypedStorage) -> None:
            block = blocks.pop(address)
            self._mover.wait_resident([block])
            pieces.copy(address, fresh)
            self._mover.install(block, fresh)
            blocks[block.address] = block

        def let_go(size_bytes: int) -> bool:
            """Take the memory of the queued copies out that end first."""
            reserved = self._account.reserved_bytes
            self._transitions.reserve(NO_LIMIT)  # no prefetch may take it
            try:
                return self._transitions.take_queued(size_bytes) > 0
            finally:
                self._transitions.reserve(reserved)

        served = pieces.gather(history, movable, move, let_go)
        self._served[what] = self._served.get(what, 0) + 1 if served else 0
