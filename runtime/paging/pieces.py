"""Room in pieces for stages whose allocator serves each request in one piece.

[Note: Memory in pieces]
The budget counts bytes, wherever they lie. Where the allocator of a GPU has no free range that is large enough, it takes all free
memory away from where it lies, and puts some of it where the request goes ("a retry"): tens of milliseconds, and what is left has
gaps. To copy the blocks that are in the way on the device takes less than one. So once there has been a retry, each stage is
recorded in one of its runs: which pieces it allocates. From then on blocks make way before it runs, if it needs a large piece, or
has had a retry, and before a large block comes back. A stage for which none had to for long is left alone until there are retries
again. Where making way does not help, because of the gaps, everything leaves that can, and comes back close together: this takes
as long as some iterations, and so comes ever more rarely if it does not last. It is done once when a plan begins, which would
inherit the gaps of iterations on demand. What is found wrong costs a retry.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.device import MIN_MOVED_BYTES, DeviceMemoryError, Pieces
from runtime.paging.block import ON_DEVICE, Block
from runtime.paging.state import PagerPart, PagerState

# For a piece of this part of the budget blocks make way, and then for the smaller ones of its stage: they could take its place.
# For one as large as that of a stage that had a retry they do, too, down to the second part.
_LARGE_SHARE, _LEAST_SHARE = 64, 512
_LOOKED_AT = 12  # so many regions after a retry, each stage is asked whether it had one: that takes as long as ten of its blocks
_SETTLED = 32  # a stage for which so often in a row none had to make way is looked at only where there are retries
# After at least so many retries although blocks made way, and one for each so many bytes of the budget, everything leaves: that
# takes about as long as these. After twice as many if that has not helped: there was one in every other region since, or more.
_IN_VAIN, _IN_VAIN_EACH = 3, 1 << 30


class _Recorded(NamedTuple):
    """What a stage has allocated and freed, see `Pieces.recorded`, when it was said to need `new_bytes` at most."""

    history: Sequence[int]
    new_bytes: int


class StagePieces(PagerPart):
    """What stages need in one piece, by name. All calls with the pager's lock held, by the training thread."""

    def __init__(self, state: PagerState) -> None:
        super().__init__(state)
        self._seen: set[str] = set()
        self._known: dict[str, _Recorded] = {}
        self._short: set[str] = set()
        self._short_bytes: int | None = None  # the smallest piece for which stages have had retries
        self._served: dict[str, int] = {}  # how often in a row no block had to make way for a stage
        self._running = ""
        self._new_bytes = 0
        self._recording = False
        self._retries = self._retries_before = 0
        self._looks = 0
        self._least_patience = max(_IN_VAIN, (state.account.budget_bytes or 0) // _IN_VAIN_EACH)
        self._in_vain, self._patience = 0, self._least_patience
        self._regions = 0  # since everything has left
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
            self._regions += 1
            if not self._looks:
                self._in_vain, self._patience = 0, self._least_patience

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
                served = self._gather(pieces, known.history, frozenset(held))
                self._served[what] = self._served.get(what, 0) + 1 if served else 0
                if self._anew or self._in_vain >= self._patience:
                    if not self._anew:
                        self._patience = 2 * self._patience if 2 * self._in_vain > self._regions else self._least_patience
                    self._in_vain, self._regions, self._anew = 0, 0, False
                    raise DeviceMemoryError(f"free memory lies too far apart for {what}")
        elif what in self._seen:
            self._recording = pieces.begin_recording()
        self._seen.add(what)
        self._running, self._new_bytes = what, new_bytes

    def block_begins(self, size_bytes: int) -> None:
        """A block of that size comes back next, for which the budget has room. For any thread; blocks make way in the thread that
        runs the region: others do not queue what the device computes."""
        if self._device.pieces is not None and self._retries_before and self._is_large(size_bytes):
            if threading.get_ident() == self._thread:
                with contextlib.suppress(DeviceMemoryError):  # the block itself will have to find its memory
                    self._gather(self._device.pieces, (size_bytes,), frozenset())

    def _looks_at(self, what: str, largest: int) -> bool:
        """Whether blocks make way for a stage whose largest piece that is, if they have to."""
        settled = not self._looks and self._served.get(what, 0) >= _SETTLED
        as_short = self._short_bytes is not None and largest >= self._short_bytes
        return not settled and (what in self._short or as_short or self._is_large(largest))

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
                self._short.add(what)
                self._in_vain += what in self._known
                largest = max(self._known[what].history, default=0) if what in self._known else 0
                if self._is_large(largest, _LEAST_SHARE):
                    self._short_bytes = min(largest, self._short_bytes or largest)

    def _end_recording(self) -> Sequence[int] | None:
        if not self._recording or self._device.pieces is None:
            return None
        self._recording = False
        return self._device.pieces.recorded(MIN_MOVED_BYTES)

    def _gather(self, pieces: Pieces, history: Sequence[int], held: frozenset[Block]) -> bool:
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

        return pieces.gather(history, movable, move)
