"""Room on the device within the budget: who leaves, and which prefetches begin when there is some.

[Note: Why a block leaves]
reason       who asks                   method                      what happens to the bytes
a plan       its cursor, at a stage     Pager.offload               copied to the plan's tier; the block stays if all are full
pressure     a stage that is short      Pager.acquire, make_room    those with the furthest next use are copied
room ahead   an optimizer step, for     Pager.evict_until_free      as under pressure, but nobody waits
             its next subgroup
parking      the user, between regions  Parking.park                as under pressure, for all that can leave
lending      an update by slices        Lending.lend                copied; then read and written in the slot, slice by slice
host update  HostUpdates, for blocks    Lending.reserve_for_host,   nothing is copied for it: a block in, or on its way to, the
             that wait on the host      then Lending.lend_memory    host tier is updated there by the processor

In each case the bytes go the same way. `BlockTransitions.begin_offload` calls `Mover.copy_out`, which gets a slot from
`Tiers.place`. Then a block goes to a file, or to the host tier of the CPU, in threads: `Tiers.write`, `Engine.write`,
`Link.submit`; in an I/O thread `Store.write_chunk` (for files `os.pwritev`) and `BlockTransitions._copied_out`. To the host tier
of a GPU the device copies by itself: `HostCopies.queue`. `Mover.release` gives the memory back. The way in is the same with
`begin_prefetch`, `Mover.copy_in`, `read` in place of `write`, `_copied_in` and `Mover.install`.

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
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import torch

from planner.errors import BudgetError, StorageFullError
from runtime.device import DeviceMemoryError, Pieces
from runtime.paging.block import DROPPED, OFFLOADED, ON_DEVICE, PREFETCHING, Block
from runtime.paging.mover import nowhere
from runtime.paging.state import CHECK_SECONDS, NO_LIMIT, PagerState
from runtime.paging.transitions import BlockTransitions, MovingPart
from runtime.system import checkpoint

_STEP_BYTES = 64 << 20  # by how much a larger budget should be tried: more than a few pages of the device's allocator
_NEVER = 1 << 62
_NOT_FETCHED = (ON_DEVICE, PREFETCHING, DROPPED)


class RoomMaker(MovingPart):
    """Lets blocks leave where the account, or the device's allocator, is short. All calls with the pager's lock held."""

    def make_room(self, blocks: Sequence[Block], new_bytes: int, what: str) -> None:
        """Reserve memory for those of `blocks` that are OFFLOADED and for `new_bytes`. Waits until enough is free.

        what: name of the stage. Raises BudgetError if the stage does not fit, StorageError if a copy failed.
        """
        account = self._account
        if account.budget_bytes is None:
            return
        while True:
            self._signal.raise_failure()
            checkpoint()
            wanted = _away_bytes(blocks) + new_bytes
            self._transitions.reserve(wanted)  # no prefetch may take it meanwhile
            if wanted <= account.unused_bytes:
                break
            self._transitions.sweep()
            # Copies out that are under way give their memory without anybody else leaving.
            if (short := self._short_bytes(blocks, new_bytes)) > account.offloading_bytes:
                if not self._evict_for(blocks, short - account.offloading_bytes):
                    continue
            # The device waits for these copies, not the host, see [Note: Queued offloads].
            self._transitions.take_queued(self._short_bytes(blocks, new_bytes))
            short = self._short_bytes(blocks, new_bytes)
            if short > 0:
                if not self._copies_are_under_way:
                    if not len(self._tiers):
                        raise nowhere()
                    budget = account.budget_bytes
                    raise BudgetError(smallest_bytes=budget + short, budget_bytes=budget, stage=what)
                self._signal.wait(lambda: f"for room for {what}")
        self.trim()

    def empty(self, *, counts: bool = True) -> None:
        """Let everything leave that can, and the allocator give its memory back: what comes in next lies close together.

        For when the allocator has nothing in one piece, and for when the device is given away. What stages hold stays, and so
        does what the lower tiers have no room for. Waits until all copies have ended. Raises StorageError if one failed.
        counts: training needs the room, so that the account counts evictions and the seconds of the wait.
        """
        account = self._account
        evictions = account.evictions
        try:
            while True:
                self._signal.raise_failure()
                checkpoint()
                self._transitions.reserve(NO_LIMIT)  # no prefetch may begin meanwhile
                self._transitions.sweep()
                # Clean ones first: one that is copied may take the slot of a block that is still here.
                for block in sorted(self._leaving(()), key=lambda block: not block.copy_is_valid):
                    with contextlib.suppress(StorageFullError):
                        self._transitions.begin_offload(block)
                self._transitions.take_queued(NO_LIMIT)
                if not self._copies_are_under_way:
                    break
                if counts:
                    self._signal.wait("for all blocks to leave")
                else:
                    self._signal.poll(CHECK_SECONDS)
        finally:
            self._transitions.reserve(0)
            if not counts:
                account.evictions = evictions
        self._device.give_back_memory()

    def evict(self, wanted_bytes: int, keep: Collection[Block] = ()) -> None:
        """Let blocks leave, but none of `keep`, until `wanted_bytes` are or will be free, or no block is left.

        Where the lower tiers are full, fewer blocks leave as long as copies are under way: when those have ended, slots of what
        came in are free. Raises StorageFullError where none is.
        """
        try:
            for block in self._leaving(keep):
                if wanted_bytes <= 0:
                    return
                wanted_bytes -= block.size_bytes
                self._transitions.begin_offload(block)
        except StorageFullError:
            if not self._copies_are_under_way:
                raise

    def _evict_for(self, blocks: Sequence[Block], wanted_bytes: int) -> bool:
        """Evict for a stage that needs `blocks`. Return False if the lower tiers are full, so that one of these begins to come
        in first: its slot can serve then. Raises StorageFullError if none fits."""
        try:
            self.evict(wanted_bytes)
            return True
        except StorageFullError:
            room = self._account.unused_bytes
            fits = next((block for block in blocks if block.state is OFFLOADED and block.size_bytes <= room), None)
            if fits is None:
                raise
            self._transitions.reserve(0)  # for the rest of the stage there is no room yet
            self._transitions.begin_prefetch(fits)
            return False

    @property
    def _copies_are_under_way(self) -> bool:
        return self._account.prefetching_blocks > 0 or self._account.offloading_bytes > 0

    def trim(self) -> None:
        """Let the device free memory that it keeps for reuse: the budget counts that as well."""
        if self._account.budget_bytes is not None:
            self._device.trim(self._account.unused_bytes)

    def _short_bytes(self, blocks: Sequence[Block], new_bytes: int) -> int:
        """Bytes that are missing, apart from what is reserved; negative if more are free."""
        return _away_bytes(blocks) + new_bytes - self._account.unused_bytes

    def _leaving(self, keep: Collection[Block]) -> list[Block]:
        """Return the blocks that can leave now, the first to leave first; none of `keep`.

        Belady's rule: the block whose next use is furthest away leaves first. L. A. Belady, "A study of replacement algorithms
        for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
        """
        kept = frozenset(keep)
        idle = [b for b in self._account.here if b.state is ON_DEVICE and not b.pins and b.span is not None and b not in kept]
        return by_next_use(idle, self._account.clock, furthest_first=True)


def by_next_use(blocks: Iterable[Block], clock: int, *, furthest_first: bool = False) -> list[Block]:
    """Return the blocks in the order of their next uses; those without a known one as if it were the furthest."""
    return sorted(blocks, key=lambda b: b.next_use if b.next_use > clock else _NEVER, reverse=furthest_first)


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


class PrefetchQueue(MovingPart):
    """Begins prefetches in the order in which they were asked for, as soon as each has room. With the pager's lock held.

    in_user_code: no compiled region runs, so that no copy of a block that user code can reach may begin.
    """

    def __init__(self, state: PagerState, transitions: BlockTransitions, pieces: StagePieces) -> None:
        super().__init__(state, transitions)
        self.in_user_code = True
        self._pieces = pieces
        self._waiting: deque[Block] = deque()
        self._beginning = False
        self._late: list[tuple[Block, float]] = []

    def ask_for(self, blocks: Sequence[Block]) -> None:
        """Add prefetches of those blocks that are not on the device, and begin those that have room."""
        asked = [block for block in blocks if block.state not in _NOT_FETCHED]
        self._waiting.extend(asked)
        self.begin_ready()
        for block in asked:
            block.held_back = block.state is not PREFETCHING

    def take(self) -> list[Block]:
        """Drop the prefetches that have not begun. Return their blocks."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def begin_ready(self) -> None:
        """Begin the prefetches that have room, strictly in order."""
        if self._beginning or not self._waiting:  # a copy that ended at once calls again
            return
        self._beginning = True
        try:
            while self._waiting and self._begin_first():
                pass
        finally:
            self._beginning = False

    def _begin_first(self) -> bool:
        """Begin or drop the first prefetch in the queue, or take one obstacle away. False if it has to wait."""
        block, account, transitions = self._waiting[0], self._account, self._transitions
        if block.storage() is None or block.state in _NOT_FETCHED:
            self._waiting.popleft()
            return True
        if block in account.reserved_for_host:
            return False  # the host's processor updates it where it is; the queue is in order, so those behind it wait too
        if block in account.queued_offloads and account.free_bytes >= 0:
            transitions.keep(block)  # nobody needs its memory: it need not leave
            return True
        # User code may be writing to what stands in for the block: the copy would miss that.
        if block.state is not OFFLOADED or (self.in_user_code and block.user_visible):
            return False
        short = block.size_bytes - account.free_bytes
        if short > 0 and not self._can_free(short):
            return False
        self._waiting.popleft()
        self._pieces.block_begins(block.size_bytes)
        transitions.begin_prefetch(block)
        return True

    def _can_free(self, short: int) -> bool:
        """Take the memory of queued offloads if that makes so many bytes free. Returns whether it does."""
        takeable: list[Block] = []
        more = short
        for block in self._account.queued_offloads:
            if not block.pins and block.copy_is_valid:
                takeable.append(block)
                more -= block.size_bytes
                if more <= 0:
                    break
        else:
            return False
        for block in takeable:
            short -= self._transitions.take_memory(block)
        return short <= 0

    # -- late prefetches

    def note_late(self, coming: list[Block], seconds: float) -> None:
        """Move those of `coming` that have landed to the late ones: a stage has waited so long for them."""
        for block in [b for b in coming if b.state is ON_DEVICE]:
            coming.remove(block)
            self._late.append((block, seconds))

    def take_late(self) -> list[tuple[Block, float]]:
        """Return the late prefetches since the last call, see `Pager.take_late`."""
        late, self._late = self._late, []
        return late


# -- pieces

# For a piece of this part of the budget blocks make way, and then for the smaller ones of its stage: they could take its place.
# For one as large as that of a stage that had a retry they do, too, down to the second part.
_LARGE_SHARE, _LEAST_SHARE = 64, 512
_LOOKED_AT = 12  # so many regions after a retry, each stage is asked whether it had one: that takes as long as ten of its blocks
_SETTLED = 32  # a stage for which so often in a row none had to make way is looked at only where there are retries
_UNKNOWN: tuple[Sequence[int], int] = ((), -1)  # of a stage that was not recorded


class StagePieces(MovingPart):
    """What stages need in one piece, by name. All calls with the pager's lock held, by the training thread."""

    def __init__(self, state: PagerState, transitions: BlockTransitions) -> None:
        super().__init__(state, transitions)
        self._seen: set[str] = set()
        # What a stage has allocated and freed, see `Pieces.recorded`, and how many bytes it was said to need at most.
        self._known: dict[str, tuple[Sequence[int], int]] = {}
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

    def all_left(self) -> None:
        """Everything has left that can: it need not do so again for the plan."""
        self._anew = False

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
        history, most_bytes = self._known.get(what, _UNKNOWN)
        if most_bytes >= new_bytes:
            if self._looks_at(what, max(history, default=0)):
                self._make_way(pieces, what, history, frozenset(held))
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
            self._known[what] = history, self._new_bytes
        if self._looks:
            before, self._retries = self._retries, self._device.retries
            if self._retries > before:  # its own, or of a block that came back for it
                self._retried.add(what)
                own = max(self._known.get(what, _UNKNOWN)[0], default=0)
                missed = [size for size in (own, self._come_bytes) if not self._is_enough(size)]
                if missed and self._is_large(max(missed), _LEAST_SHARE):
                    self._retried_bytes = max(missed)
        self._come_bytes = 0

    def _end_recording(self) -> Sequence[int] | None:
        if not self._recording or self._device.pieces is None:
            return None
        self._recording = False
        return self._device.pieces.recorded()

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
