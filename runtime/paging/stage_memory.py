"""What is done around stages, regions and updates in slots: memory is brought and held, handed to user code, or lent.

Also where the device is given away, for a while or for good: what leaves, what comes back, what is left where it waits.

[Note: User code]
Between compiled regions user code may write any block that it can reach. `Pager.leave_region` waits until none of those is
being copied, and assumes that user code changes all of them. Until `Pager.enter_region` no copy of them begins. If one leaves
later whose copy was valid before, the mover may find that it was not changed, see [Note: Writes that change nothing].

[Note: Lent slots]
A block that is UPDATING stays away until it is given back: it is neither prefetched nor evicted, and a hint for it waits.
The borrower keeps its storage alive and gives it back before the region ends. All copies from and to the slot must have
ended by then. A stage that needs the block waits until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from planner.errors import StorageError
from runtime.device import MIN_MOVED_BYTES, DeviceMemoryError
from runtime.paging.block import DROPPED, OFFLOADED, OFFLOADING, ON_DEVICE, PREFETCHING, UPDATING, Block
from runtime.paging.eviction import PrefetchQueue, RoomMaker, StagePieces, by_next_use, out_of_memory
from runtime.paging.mover import in_file
from runtime.paging.state import PagerPart, PagerState, awaited
from runtime.paging.transitions import BlockTransitions, MovingPart
from runtime.storage import RangeCopy
from runtime.system import checkpoint, first_of

POLL_SECONDS = 0.001
"""Seconds between two looks at a copy that the device makes by itself: nothing notifies of its end."""


class Stages(MovingPart):
    """Gives each stage its memory, and user code what it can reach between regions. Each public method takes the lock."""

    def __init__(self, state: PagerState, transitions: BlockTransitions) -> None:
        super().__init__(state, transitions)
        self.device, self.account, self.table = state.device, state.account, state.table
        self._pieces = StagePieces(state, transitions)
        self._prefetches = PrefetchQueue(state, transitions, self._pieces)
        self._room = RoomMaker(state, transitions)

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
        hold = partial(self._hold, blocks, new_bytes, what, then_fetch, new_bytes if in_one_piece else 0)
        with self._lock:
            try:
                hold()
            except DeviceMemoryError:
                self._hold_alone(hold, what)

    def acquire_again(self, blocks: Sequence[Block], new_bytes: int, what: str) -> None:
        """The stage that holds `blocks` found no memory in one piece: let all leave that can, and bring `blocks` back, close
        together. They stay held until `retire`, also after an error.

        Waits until all copies have ended. Raises what `acquire` raises.
        """
        with self._lock:
            self._release(blocks)
            try:
                self._hold_alone(partial(self._hold, blocks, new_bytes, what), what)
            except BaseException:
                self._transitions.pin(blocks)  # whoever holds them will let go of them
                raise

    def retire(self, blocks: Sequence[Block], written: Sequence[Block], *, last_used: Sequence[Block] = ()) -> None:
        """The stage has ended: what it held may move again, and slots of what it wrote are not valid. Never waits.

        last_used: blocks that nobody may hold any more; those that are dead count as free at once.
        """
        with self._lock:
            try:
                self._pieces.stage_ended()
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
            self._transitions.note_peak()

    def bring_in_reach(self, blocks: Sequence[Block], what: str) -> None:
        """Before a region ends: bring these to the device if one waits where user code and autograd could not use it. what: they
        are. Waits until they are there. Raises what `acquire` raises.
        """
        if not all(block.address for block in blocks):
            self.acquire(blocks, 0, what)
            self.retire(blocks, ())

    def _hold_alone(self, hold: Callable[[], None], what: str) -> None:
        """Call `_hold` when everything has left that can."""
        self._room.empty()
        self._pieces.all_left()
        try:
            hold()
        except DeviceMemoryError as error:
            raise out_of_memory(self.account.budget_bytes or 0, what) from error

    def _hold(
        self, blocks: Sequence[Block], new_bytes: int, what: str, then_fetch: Sequence[Block] = (), piece_bytes: int = 0
    ) -> None:
        """Do what `acquire` says. piece_bytes: of `new_bytes`, those that the device's allocator must have in one piece."""
        self._transitions.pin(blocks)
        self._signal.out_of_memory = None  # of a prefetch that nobody has waited for
        try:
            checkpoint()
            away = [block for block in blocks if block.state is not ON_DEVICE]
            if away:
                self._bring(away, new_bytes, what, then_fetch)
            else:
                self._room.make_room(away, new_bytes, what)
                self._transitions.reserve(new_bytes)
                self._transitions.note_peak()
                self._fetch(then_fetch)
            self._mover.wait_resident(blocks)
            self._pieces.stage_begins(what, new_bytes, blocks)
            if piece_bytes:
                self.device.try_memory(piece_bytes)
        except BaseException:
            self._pieces.give_up()
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
        if blocks:
            with self._mover.together:
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
        left = new_bytes + sum(block.size_bytes for block in missing)
        for block in missing:
            left -= block.size_bytes
            self._transitions.reserve(left)  # what begins now counts as used, and no longer as reserved
            if block.state is OFFLOADED:  # still: where one copy fails to begin, waiting prefetches may begin
                self._pieces.block_begins(block.size_bytes)
                self._transitions.begin_prefetch(block)
        self._transitions.reserve(new_bytes)
        for block in blocks:
            if block.state is PREFETCHING:
                self._tiers.prioritize(block)
        self._transitions.note_peak()

    def _release(self, blocks: Sequence[Block]) -> None:
        self._transitions.reserve(0)
        self._transitions.unpin(blocks)

    def plan_begins(self) -> None:
        """A plan is followed from now on, see [Note: Memory in pieces]."""
        with self._lock:
            self._pieces.plan_begins()

    # -- around compiled regions, see [Note: User code]

    @contextmanager
    def region(self, blocks: Sequence[Block] | None = None) -> Iterator[None]:
        """Within, a region runs on the device. blocks: see `enter_region`. Waits and raises as the two calls below do."""
        with self.device.region():
            self.enter_region(blocks)
            try:
                yield
            finally:
                self.leave_region()

    def enter_region(self, blocks: Sequence[Block] | None = None) -> None:
        """A compiled region begins. Waits only where user code has written to blocks in its files: until they have slots of their
        own. Raises StorageError if a copy has failed meanwhile, StorageIOError if such a file has changed.

        blocks: all that it will use, so that only these are looked at; None for every block.
        """
        with self._lock:
            account = self.account
            self._signal.raise_failure()
            self._tiers.check_files()
            self._pieces.region_begins()
            self._transitions.sweep()
            self._transitions.forget_replaced(blocks)
            account.external_bytes = self.device.external_bytes(account.used_bytes + account.fixed_bytes)
            self._mover.invalidate(in_reach_and_away(self.table if blocks is None else blocks))
            self._prefetches.in_user_code = False

    def leave_region(self) -> None:
        """A compiled region ends. Waits until no block that user code can reach is being copied."""
        with self._lock:
            self._prefetches.in_user_code = True
            try:
                self._transitions.sweep()
                visible = self._visible()
                self._wait_until_still(visible)
                self._transitions.assume_written(visible)
            except BaseException:  # user code goes on, and may write to them
                self._transitions.assume_written(self._visible())
                raise
            self._mover.wait_resident([block for block in visible if block.state is ON_DEVICE])
            self._room.trim()
            self._signal.raise_failure()

    def _visible(self) -> list[Block]:
        """Those that have memory on the device, or lent slots."""
        return [block for block in self.account.here if block.user_visible]

    def _wait_until_still(self, visible: Sequence[Block]) -> None:
        while True:
            for block in [b for b in self.account.queued_offloads if b.user_visible]:  # each wait may add some
                self._transitions.take_memory(block)
            if not [block for block in visible if block.state is not ON_DEVICE and block.state is not OFFLOADED]:
                return
            self._signal.wait("for blocks that user code can reach")


def in_reach_and_away(table: Iterable[Block]) -> Iterator[Block]:
    """Those to whose stand-ins user code may have written. The mover may not want to know: then nobody loops."""
    for block in table:
        held = block.storage() if block.user_visible and block.state is OFFLOADED else None
        if held is not None:
            yield block


class Lending(MovingPart):
    """Lends slots to updates, which change blocks where they wait: see [Note: Lent slots]. Each public method takes the lock."""

    def lend(self, blocks: Sequence[Block]) -> None:
        """Lend the slots of `blocks` until `give_back`. Blocks on the device leave first. Waits until all have left.

        Raises StorageError if a copy failed or one of them cannot leave, StorageFullError if the lower tiers have no room.
        None is lent then.
        """
        with self._lock:
            while True:
                self._signal.raise_failure()
                checkpoint()
                for block in blocks:
                    self._send_away(block)
                if all(block.state is OFFLOADED for block in blocks):
                    break
                self._signal.wait(lambda: f"{first_of([block.name for block in blocks])} to leave the device")
            self._transitions.begin_update(blocks)

    def waits_in_host_tier(self, blocks: Sequence[Block]) -> bool:
        """Whether all blocks are in the host tier, or on their way there, so that the processor can update them. Never waits."""
        with self._lock:
            return all(b.state in (OFFLOADED, OFFLOADING, UPDATING) and self._tiers.host_address(b) is not None for b in blocks)

    def reserve_for_host(self, blocks: Sequence[Block]) -> bool:
        """Reserve blocks for the host's processor, if all are in the host tier or on their way there. Never waits.

        Returns whether they are reserved. No prefetch takes them until `lend_memory` or `give_back` is called for them; a
        stage that needs one does.
        """
        with self._lock:
            if any(b.state not in (OFFLOADED, OFFLOADING) or self._tiers.host_address(b) is None for b in blocks):
                return False
            self._transitions.reserve_for_host(blocks)
            return True

    def lend_memory(self, blocks: Sequence[Block]) -> list[int] | None:
        """Lend slots in the host tier until `give_back`. Returns their addresses, for the processor to read and write there.

        Returns None, and lends nothing, if one of them does not get to the host tier in one piece. Waits until those on their
        way have arrived. For any thread. What the device was asked to write to the slots by itself must have ended before.
        """
        with self._lock:
            try:
                while self._still_leaving(blocks):
                    self._signal.poll(POLL_SECONDS)  # gives the lock to others meanwhile
                if any(b.state is not OFFLOADED or b.pins or not self._table.is_current(b) for b in blocks):
                    return None
                addresses = [address for b in blocks if (address := self._tiers.host_address(b)) is not None]
                if len(addresses) < len(blocks):
                    return None
                self._transitions.begin_update(blocks)
                return addresses
            finally:
                self._transitions.end_reservation(blocks)

    def give_back(self, blocks: Sequence[Block]) -> None:
        """End `lend`, `lend_memory` or `reserve_for_host`: the blocks hold what is in their slots now.

        Never waits. For any thread.
        """
        with self._lock:
            try:
                self._transitions.end_update(blocks)
            except BaseException:
                self._transitions.end_update(blocks)  # those that are left
                raise
            finally:
                self._transitions.end_reservation(blocks)
                self._signal.notify()

    def copy_range(self, block: Block, begin_bytes: int, memory: torch.Tensor, *, to_slot: bool) -> RangeCopy:
        """Begin to read or write a range of a lent slot, see `Mover.copy_range`."""
        with self._lock:
            return self._mover.copy_range(block, begin_bytes, memory, to_slot=to_slot)

    def _send_away(self, block: Block) -> None:
        if block.span is None or block.pins or block.dead or in_file(block):
            raise StorageError(f"{block} cannot leave, so that it cannot be lent; this is a bug in teraio, please report it")
        queued = self._account.queued_offloads
        while block.state is ON_DEVICE or block in queued:
            if block in queued:
                self._transitions.take_memory(block)
            else:
                self._transitions.begin_offload(block)

    def _still_leaving(self, blocks: Sequence[Block]) -> bool:
        """Whether a copy may still write to a slot, or read it: one may be OFFLOADED before its last copy has ended: rule 7."""
        ended = [block for block in blocks if self._mover.finished([block])]
        for block in ended:
            if block in self._account.queued_offloads:
                self._transitions.take_memory(block)
        return any(b.state is OFFLOADING or b.state is OFFLOADED and b not in ended for b in blocks)


# -- the device is given away

_STILL = (ON_DEVICE, OFFLOADED, DROPPED)
TOO_SMALL = f"in blocks of less than {MIN_MOVED_BYTES:,} bytes, and in small optimizer states"
NOT_MOVABLE = "in memory that is not teraio's to move"
HELD = "held by teraio.on_device"
NO_ROOM = "no lower tier has room"


class Parking(PagerPart):
    """Empties the device between two regions, and fills it again. Each public method takes the lock."""

    def __init__(self, state: PagerState, prefetches: PrefetchQueue, room: RoomMaker) -> None:
        super().__init__(state)
        self._prefetches = prefetches
        self._room = room
        self._due: dict[Block, None] = {}

    def park(self) -> int:
        """Let everything leave that can, and give free memory back to the system. Return the bytes that have left.

        Waits until all copies have ended; the time does not count, and nor do the evictions: training did not need the room.
        Raises StorageError if a copy failed; what has left by then comes back all the same.
        """
        with self._lock:
            here, asked = list(self._account.here), self._prefetches.take()
            try:
                self._room.empty(counts=False)
            finally:
                left = [block for block in here if block.state is OFFLOADED]
                self._due |= dict.fromkeys((*left, *asked))
            self._device.trim(0)
            return sum(block.size_bytes for block in left)

    def staying_bytes(self) -> dict[str, int]:
        """Return how much is on the device, by the reason why it is there."""
        with self._lock:
            found = {TOO_SMALL: self._account.fixed_bytes}
            for block in self._account.here:
                if block.size_bytes < MIN_MOVED_BYTES:
                    why = TOO_SMALL
                elif block.span is None and len(self._mover.tiers):
                    why = NOT_MOVABLE
                else:
                    why = HELD if block.pins else NO_ROOM
                found[why] = found.get(why, 0) + block.size_bytes
            return {why: size_bytes for why, size_bytes in found.items() if size_bytes}

    def wake(self) -> None:
        """A region begins: what has left comes back as far as there is room, what is used soonest first. Never waits."""
        if self._due:
            with self._lock, self._mover.together:
                due, self._due = self._due, {}
                self._prefetches.ask_for(by_next_use(due, self._account.clock))


class Closing(MovingPart):
    """Brings blocks back, and leaves the rest behind. Each public method takes the lock, and is for the training thread."""

    def __init__(self, state: PagerState, transitions: BlockTransitions, prefetches: PrefetchQueue) -> None:
        super().__init__(state, transitions)
        self._prefetches = prefetches

    def bring_back(self, *, within_budget: bool = False) -> None:
        """Bring blocks to the device, those that are used soonest first; if `within_budget`, as long as the budget holds them.

        Dropped ones stay dropped. Waits until all copies have ended. Raises ChecksumError if some came back different, and
        StorageError if a copy failed: the first of them, when all others are back.
        """
        with self._signal.lock:
            damage: list[StorageError] = []
            self._prefetches.take()
            for block in list(self._account.queued_offloads):
                self._transitions.keep(block)
            self._wait_until_still(damage)
            self._transitions.forget_replaced()
            with _kept(damage):
                self._mover.invalidate(in_reach_and_away(self._table))
            self._fetch(within_budget, damage)
            if self._signal.out_of_memory is not None:
                self._device.give_back_memory()  # what is free in pieces serves in other sizes then
                self._fetch(within_budget, damage)
            self._signal.out_of_memory = None  # the rest stays where it is
            for block in [block for block in self._table if block.state is ON_DEVICE]:
                with _kept(damage):
                    self._mover.wait_resident([block])
            if damage:
                raise damage[0]

    def leave_behind(self) -> int:
        """Leave the blocks that are away to their storages: a slot is freed when its storage dies, or when another run has moved
        the content. Return their bytes. Waits for what still moves, if `bring_back` has failed; its errors have been told."""
        with self._signal.lock:
            with suppress(StorageError):  # a drive that does not answer keeps what it moves
                self._wait_until_still([])
            away = [block for block in self._table if block.state is OFFLOADED]
            for block in away:
                self._tiers.leave_behind(block)
                self._transitions.forget(block)
            return sum(block.size_bytes for block in away)

    def away_bytes(self) -> int:
        """Return the bytes of blocks that are not on the device, and were not dropped."""
        with self._signal.lock:
            return sum(block.size_bytes for block in self._table if block.state is OFFLOADED)

    def _fetch(self, within_budget: bool, damage: list[StorageError]) -> None:
        """Ask once for each block that may come in, and wait until all have. damage: gets what stopped some."""
        self._signal.out_of_memory = None
        for block in by_next_use((b for b in self._table if b.state is OFFLOADED), self._account.clock):
            fits = not within_budget or block.size_bytes <= self._account.free_bytes
            if fits and self._signal.out_of_memory is None:
                self._transitions.begin_prefetch(block)
        self._wait_until_still(damage)

    def _wait_until_still(self, damage: list[StorageError]) -> None:
        while True:
            self._transitions.sweep()
            with _kept(damage):
                self._signal.raise_failure()
            moving: list[Block] = [block for block in self._table if block.state not in _STILL]
            if not moving:
                return
            self._signal.wait(lambda moving=moving: awaited(moving))  # type: ignore[misc]


@contextmanager
def _kept(damage: list[StorageError]) -> Iterator[None]:
    """Keep what says that a block did not come back, or came back different, to raise it when all others are back."""
    try:
        yield
    except StorageError as error:
        damage.append(error)
