"""Memory that runs out at each line of the pager: nothing is lost, nothing stays held, and training goes on."""

from __future__ import annotations

import linecache
from types import CodeType

import torch

from runtime.paging import Block, State

from ...line_tracing import Place, can_run_out_of_memory, out_of_memory_at, places_in
from ..memory_mover import UNIT, Bench, Deadlock

WATCHED = ("runtime/paging/",)
ENDINGS = {
    "self._release(blocks)",
    "self._transitions.unpin(blocks)",
    "self._transitions.reserve(0)",
    "self._transitions.end_update(blocks)",
    "self._transitions.end_reservation(blocks)",
}
"""Calls that give something back. There is nothing else to be done if these cannot even begin."""


class Program:
    """Some stages that do to blocks all that the pager can do, under a budget that holds half of them."""

    def __init__(self) -> None:
        self.bench = Bench(6 * UNIT)
        self.pager = self.bench.pager
        self.w, self.v = (self.bench.make(name, 2, visible=True, fill=3) for name in "wv")
        self.a, self.s = self.bench.make("a", 2, fill=5), self.bench.make("s", 2, fill=7)
        self.a.source = "a stage"
        self.pager.leave_region()

    def run(self) -> None:
        bench, pager = self.bench, self.pager
        pager.enter_region()
        try:
            self._stage([self.w, self.a], then_fetch=[self.v])
            pager.offload(self.w)
            pager.prefetch(self.s)
            self._stage([self.v, self.s], written=[self.s])
            self._drop_and_renew()
            pager.evict_until_free(4 * UNIT, keep=[self.v])
            self._stage([self.w, self.v])
            self._update()
            self._passing_block()
            bench.mover.finish_all()
            pager.take_late()
        finally:
            pager.leave_region()

    def _stage(self, read: list[Block], written: list[Block] | None = None, then_fetch: list[Block] | None = None) -> None:
        self.pager.acquire(read, 2 * UNIT, "stage", then_fetch=then_fetch or ())
        try:
            self.pager.advance_clock([(read[0], 2)])
        finally:
            self.pager.retire(read, written or [])

    def _drop_and_renew(self) -> None:
        self.pager.drop(self.a)
        if self.a.state is State.DROPPED:
            self.pager.acquire([], 2 * UNIT, "again")
            try:
                fresh = torch.full((2 * UNIT,), 5, dtype=torch.uint8)
                self.pager.renew({self.a: fresh.untyped_storage()})
            finally:
                self.pager.retire([], [])

    def _update(self) -> None:
        self.pager.lending.lend([self.s])
        try:
            self.pager.record(uses={self.s: (1,)})
        finally:
            self.pager.lending.give_back([self.s])
        self.pager.offload(self.w, "host")
        self.bench.mover.finish_all()
        reserved = self.pager.lending.reserve_for_host([self.w, self.s])
        if reserved and self.pager.lending.lend_memory([self.w, self.s]) is not None:
            self.pager.lending.give_back([self.w, self.s])

    def _passing_block(self) -> None:
        made: list[Block] = []
        self.pager.acquire([], 2 * UNIT, "passing")
        try:
            passing = torch.zeros(2 * UNIT, dtype=torch.uint8)
            made.append(self.pager.block_of(passing, name="passing", kind="activation", user_visible=True))
            del passing
        finally:
            self.pager.retire([], [], last_used=made)

    def check(self) -> None:
        """Raise AssertionError unless everything is as after any region."""
        pager, mover = self.pager, self.bench.mover
        if self.a.state is State.DROPPED:
            pager.renew({self.a: torch.full((2 * UNIT,), 5, dtype=torch.uint8).untyped_storage()})
        mover.finish_all()
        try:
            pager.enter_region()
        except MemoryError:  # of the thread of a copy: told once
            pager.enter_region()
        pager.leave_region()
        blocks = pager.blocks
        assert set(blocks) == {self.w, self.v, self.a, self.s}
        assert all(block.state in (State.ON_DEVICE, State.OFFLOADED) and not block.pins for block in blocks)
        account = pager.account
        here = sum(block.size_bytes for block in blocks if block.state is State.ON_DEVICE)
        counted = account.used_bytes, account.reserved_bytes, account.offloading_bytes, account.prefetching_blocks
        assert counted == (here, 0, 0, 0) and not pager.account.reserved_for_host
        assert {block for block in blocks if block.state is State.OFFLOADED} == mover.away
        for name, value in {"w": 3, "v": 3, "a": 5, "s": 7}.items():
            self.bench.tensors[name][0] += 0  # user code may write
            assert self.bench.value(name) == value


def _to_try(code: CodeType, line: int) -> bool:
    """Pins are small numbers, which Python never makes anew."""
    counts_pins = code.co_name in ("pin", "unpin")
    return (
        can_run_out_of_memory(code, line) and not counts_pins and linecache.getline(code.co_filename, line).strip() not in ENDINGS
    )


def test_training_goes_on_after_memory_ran_out_at_any_line_of_the_pager() -> None:
    places = places_in(WATCHED, Program().run, only=_to_try)
    assert len(places) > 150
    wrong: dict[Place, str] = {}
    for place in places:
        program = Program()
        try:
            out_of_memory_at(WATCHED, place, program.run)  # an I/O thread's errors may reach the training thread later
            program.check()
            program.run()
            program.check()
        except (AssertionError, Deadlock, MemoryError, KeyError) as error:
            wrong[place] = repr(error)[:300]
    assert not wrong, "\n".join(f"{place} {why}" for place, why in wrong.items())
