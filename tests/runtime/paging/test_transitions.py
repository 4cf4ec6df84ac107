"""Every row of [Note: States of a block], one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.paging import Block, Pager, State
from runtime.storage import Slot

from ..memory_mover import UNIT, QueueingMover, io_error

SIZE = 2 * UNIT


class Rig:
    """One block, and transitions that nobody else drives."""

    def __init__(self) -> None:
        self.mover = QueueingMover()
        pager = Pager(mover=self.mover, budget_bytes=None)
        self.account, self.table, self.signal, self.transitions = pager.account, pager.table, pager._signal, pager._transitions
        self.ends = 0
        self.transitions._copy_ended = self._copy_ended
        self.tensor: torch.Tensor | None = torch.full((SIZE,), 7, dtype=torch.uint8)
        storage = self.tensor.untyped_storage()
        self.block = Block(storage=storage, name="w", kind="parameter", user_visible=False, span=self.mover.span(storage))
        self.transitions.begin(self.block, storage)

    def _copy_ended(self) -> None:
        self.ends += 1

    # -- the cases

    def dirty(self) -> None:
        """As it begins."""

    def offloading(self) -> None:
        self.transitions.begin_offload(self.block)

    def queued(self) -> None:
        self.mover.device_copies = True
        self.offloading()

    def offloaded(self) -> None:
        self.offloading()
        self.mover.finish()

    def prefetching(self) -> None:
        self.offloaded()
        self.transitions.begin_prefetch(self.block)

    def clean(self) -> None:
        self.prefetching()
        self.mover.finish()

    def updating(self) -> None:
        self.offloaded()
        self.transitions.begin_update([self.block])

    def dropped(self) -> None:
        self.transitions.drop(self.block)

    # -- the events

    def drop(self) -> None:
        ends = self.ends
        self.transitions.drop(self.block)
        assert self.ends == ends + 1, "whoever waits for memory hears of it"

    def renew(self) -> None:
        version = self.block.version
        self.transitions.renew(self.block, torch.zeros(SIZE, dtype=torch.uint8).untyped_storage())
        assert self.block.version == version + 1

    def begin_offload_refused(self) -> None:
        self.mover.refuse = StorageFullError("full")
        with pytest.raises(StorageFullError):
            self.transitions.begin_offload(self.block)

    def slot_needed(self) -> None:
        """Another block finds no room for its slot."""
        self.block.slot = Slot(name="w", size_bytes=SIZE, content_bytes=SIZE, extents=())
        other = torch.zeros(SIZE, dtype=torch.uint8)
        block = Block(storage=other.untyped_storage(), name="other", kind="buffer", user_visible=False, span=None)
        self.mover.refuse = StorageFullError("full")
        self.transitions.begin_offload(block)
        assert "drop w" in self.mover.log
        self.mover.flying.clear()
        self.transitions._end_offload(block)

    def copy_ends(self) -> None:
        self.mover.finish()

    def pinned_copy_ends(self) -> None:
        self.transitions.pin([self.block])
        self.mover.finish()
        self.transitions.unpin([self.block])

    def written_copy_ends(self) -> None:
        self.transitions.write(self.block)
        self.mover.finish()

    def copy_fails(self) -> None:
        self.mover.fail_copies = [io_error()]
        self.mover.finish()
        with pytest.raises(StorageIOError):
            self.signal.raise_failure()

    def begin_offload_by_device(self) -> None:
        self.mover.device_copies = True
        self.transitions.begin_offload(self.block)

    def begin_prefetch_by_device(self) -> None:
        self.mover.device_copies = True
        self.transitions.begin_prefetch(self.block)

    def take_memory(self) -> None:
        assert self.transitions.take_memory(self.block) == SIZE

    def take_memory_pinned(self) -> None:
        self.block.pins += 1
        assert self.transitions.take_memory(self.block) == 0
        self.block.pins -= 1

    def take_memory_written(self) -> None:
        self.transitions.write(self.block)
        assert self.transitions.take_memory(self.block) == 0

    def device_has_copied(self) -> None:
        self.mover.device_copies = False
        self.transitions.sweep()

    def begin_prefetch_refused(self) -> None:
        self.mover.refuse = StorageError("no memory")
        self.transitions.begin_prefetch(self.block)
        with pytest.raises(StorageError, match="no memory"):
            self.signal.raise_failure()

    def begin_update(self) -> None:
        self.transitions.begin_update([self.block])

    def end_update(self) -> None:
        version, updates = self.block.version, self.block.updates
        self.transitions.end_update([self.block])
        assert (self.block.version, self.block.updates) == (version + 1, updates + 1)

    # -- what each case is

    def case(self) -> str:
        queued = self.block in self.account.queued_offloads
        names = {
            State.ON_DEVICE: "clean" if self.block.copy_is_valid else "dirty",
            State.OFFLOADING: "queued" if queued else "offloading",
            State.OFFLOADED: "offloaded",
            State.PREFETCHING: "prefetching",
            State.UPDATING: "updating",
            State.DROPPED: "dropped",
        }
        assert queued == (names[self.block.state] == "queued")
        return names[self.block.state]

    def check_account(self) -> None:
        state = self.block.state
        assert self.account.used_bytes == (0 if state in (State.OFFLOADED, State.UPDATING, State.DROPPED) else SIZE)
        assert self.account.offloading_bytes == (SIZE if state is State.OFFLOADING else 0)
        assert self.account.prefetching_blocks == (state is State.PREFETCHING)
        if state in (State.OFFLOADED, State.UPDATING):
            assert self.block.copy_is_valid
        if state is State.DROPPED:
            assert not self.block.copy_is_valid and not self.mover.slots


Step = Callable[[Rig], None]

ROWS: list[tuple[Step, Step | str, str]] = [
    (Rig.dirty, "begin_offload", "offloading"),
    (Rig.dirty, Rig.begin_offload_refused, "dirty"),
    (Rig.dirty, Rig.begin_offload_by_device, "queued"),
    (Rig.clean, "begin_offload", "offloaded"),
    (Rig.clean, "write", "dirty"),
    (Rig.clean, Rig.slot_needed, "dirty"),
    (Rig.offloading, Rig.copy_ends, "offloaded"),
    (Rig.offloading, Rig.pinned_copy_ends, "clean"),
    (Rig.offloading, Rig.copy_fails, "dirty"),
    (Rig.offloading, Rig.written_copy_ends, "dirty"),
    (Rig.queued, "keep", "clean"),
    (Rig.queued, Rig.take_memory, "offloaded"),
    (Rig.queued, Rig.device_has_copied, "offloaded"),
    (Rig.queued, Rig.take_memory_pinned, "clean"),
    (Rig.queued, Rig.take_memory_written, "dirty"),
    (Rig.offloaded, "begin_prefetch", "prefetching"),
    (Rig.offloaded, Rig.begin_prefetch_refused, "offloaded"),
    (Rig.offloaded, Rig.begin_prefetch_by_device, "clean"),
    (Rig.offloaded, Rig.begin_update, "updating"),
    (Rig.prefetching, Rig.copy_ends, "clean"),
    (Rig.prefetching, Rig.copy_fails, "offloaded"),
    (Rig.updating, Rig.end_update, "offloaded"),
    (Rig.dirty, Rig.drop, "dropped"),
    (Rig.clean, Rig.drop, "dropped"),
    (Rig.queued, Rig.drop, "dropped"),
    (Rig.dropped, Rig.renew, "dirty"),
]


@pytest.mark.parametrize(("begins", "event", "ends"), ROWS, ids=lambda value: getattr(value, "__name__", value))
def test_each_row_of_the_table(begins: Step, event: Step | str, ends: str) -> None:
    """An event with a name alone is that transition of the block."""
    rig = Rig()
    begins(rig)
    assert rig.case() == begins.__name__
    rig.check_account()
    getattr(rig.transitions, event)(rig.block) if isinstance(event, str) else event(rig)
    assert rig.case() == ends
    rig.check_account()


def test_whoever_waits_for_memory_hears_of_every_copy_that_ends() -> None:
    rig = Rig()
    rig.clean()
    assert rig.ends == 2, "one out, one in"
    rig.transitions.write(rig.block)
    rig.offloading()
    rig.copy_fails()
    assert rig.ends == 3


def test_evictions_are_counted_also_where_nothing_is_copied() -> None:
    rig = Rig()
    rig.clean()
    rig.offloading()
    assert rig.account.evictions == 2 and rig.mover.log.count("out w") == 1
