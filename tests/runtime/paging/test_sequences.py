"""The pager under random sequences of stages, user code, hints, ends of copies, deaths and failures; and where memory runs out.

After every step: within the budget, the count is right, and no block has lost a write. Plain seeds rather than
hypothesis' state machine: in the same time they make some thirty times as many steps.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import random
from collections.abc import Sequence
from types import CodeType

import pytest
import torch

from planner.errors import BudgetError, StorageError, StorageFullError
from runtime.paging import Block, State

from ...line_tracing import Place, can_run_out_of_memory, out_of_memory_at, places_in
from ...thoroughness import by_profile
from ..memory_mover import UNIT, Bench, Deadlock, io_error

STEPS = 300


class AnySequence:
    """A pager, and what its blocks should contain. failures: now and then a copy fails, or cannot begin."""

    def __init__(self, seed: int, *, failures: bool) -> None:
        self.draw = random.Random(seed)
        self.failures = failures
        self.budget = self.draw.randint(10, 24) * UNIT
        self.bench = Bench(self.budget, seed)
        self.pager, self.mover = self.bench.pager, self.bench.mover
        self.pager.account.fixed_bytes = self.draw.randint(0, 3) * UNIT
        self.blocks: dict[str, Block] = {}
        self.wanted: dict[str, int] = {}
        self.count = 0
        self.allowed = self.budget
        self.seen = dict.fromkeys(("stages", "refused", "failed", "written while leaving", "prefetched", "dropped", "renewed"), 0)

    def step(self) -> None:
        kinds = (self.stage, self.hints, self.copies_end, self.user_code, self.drop, self.fail)
        self.draw.choices(kinds, weights=(6, 2, 3, 1, 2, 1 if self.failures else 0))[0]()
        self.check()

    def pick(self, most: int) -> list[str]:
        names = sorted(self.blocks)
        return self.draw.sample(names, min(len(names), self.draw.randint(0, most)))

    def copies_end(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            self.bench.finish_one()

    def fail(self) -> None:
        """Let the next copy to end fail, or the next copy to begin."""
        if self.draw.random() < 0.5:
            self.mover.fail_copies = [io_error()]
        else:
            self.mover.refuse = StorageFullError("full")

    def drop(self) -> None:
        """Drop some blocks, those that may be."""
        for name in self.pick(4):
            block = self.blocks[name]
            block.source = None if self.draw.random() < 0.2 else "a stage that can run again"
            self.pager.drop(block)
            self.seen["dropped"] += block.state is State.DROPPED

    def renew(self, names: Sequence[str]) -> bool:
        """Run stages again that make the dropped ones of these blocks. Returns False if one of them does not fit."""
        for name in names:
            block = self.blocks[name]
            if block.state is not State.DROPPED:
                continue
            try:
                self.pager.acquire([], block.size_bytes, "again")
            except StorageError:
                assert self.failures, "an error out of nowhere"
                self.seen["failed"] += 1
                return False
            fresh = torch.full((block.size_bytes,), self.wanted[name], dtype=torch.uint8).untyped_storage()
            self.pager.renew({block: fresh})
            self.pager.retire([], [])
            assert block.state is State.ON_DEVICE
            self.seen["renewed"] += 1
        return True

    # -- stages

    def needed(self, blocks: Sequence[Block], new_bytes: int) -> int:
        stay = {b for b in self.blocks.values() if b.span is None} | set(blocks)
        return sum(b.size_bytes for b in stay) + new_bytes + self.pager.account.fixed_bytes

    def stage(self) -> None:
        names = self.pick(3)
        blocks = [self.blocks[name] for name in names]
        units = self.draw.choice([0, 0, 0, 0, 1, 2, 2, 4]) if len(self.blocks) < 12 else 0
        new_bytes = (units + self.draw.randint(0, 2)) * UNIT
        if not self.renew(names):
            return
        try:
            if self.draw.random() < 0.4:
                for block in blocks:
                    self.pager.offload(block)
            fetch = [self.blocks[name] for name in self.pick(2)]
            self.pager.acquire(blocks, new_bytes, "stage", then_fetch=fetch)
        except BudgetError as error:
            assert self.budget < error.smallest_bytes == self.needed(blocks, new_bytes), error
            self.seen["refused"] += 1
            return
        except StorageError:
            assert self.failures, "an error out of nowhere"
            self.seen["failed"] += 1
            return
        assert self.needed(blocks, new_bytes) <= self.budget
        self.allowed = self.budget
        self.run(names, blocks, units)

    def run(self, names: list[str], blocks: list[Block], units: int) -> None:
        assert all(b.state in (State.ON_DEVICE, State.OFFLOADING) for b in blocks)
        written = [name for name in names if self.draw.random() < 0.5]
        for name in written:
            self.seen["written while leaving"] += self.blocks[name].state is State.OFFLOADING
            self.write(name)
        if self.draw.random() < 0.2:
            self.hints()
        for _ in range(self.draw.choice([0, 0, 1, 2])):
            self.bench.finish_one()
        changed = [self.blocks[name] for name in written]
        if units:
            self.add(units, visible=self.draw.random() < 0.5)
        for name in names:
            if self.draw.random() < 0.07:
                self.forget(name)
        self.pager.retire(blocks, changed, last_used=blocks)
        self.seen["stages"] += 1

    def write(self, name: str) -> None:
        self.wanted[name] = (self.wanted[name] + self.draw.randrange(1, 256)) % 256
        self.bench.tensors[name].fill_(self.wanted[name])

    def add(self, units: int, *, visible: bool) -> None:
        name = f"b{self.count}"
        self.count += 1
        self.wanted[name] = self.draw.randrange(256)
        tensor = torch.full((units * UNIT,), self.wanted[name], dtype=torch.uint8)
        self.bench.tensors[name] = tensor
        block = self.pager.block_of(tensor, name=name, kind="activation", user_visible=visible)
        block.next_use = self.draw.randrange(20)
        self.blocks[name] = block

    def forget(self, name: str) -> None:
        self.bench.drop(name)
        del self.blocks[name], self.wanted[name]

    # -- around stages

    def hints(self) -> None:
        for name in self.pick(3):
            if self.draw.random() < 0.5:
                with contextlib.suppress(StorageError):
                    self.pager.offload(self.blocks[name])
            else:
                self.pager.prefetch(self.blocks[name])
                self.seen["prefetched"] += 1

    def user_code(self) -> None:
        """Run user code: it writes what it can reach, drops blocks, and makes a new tensor. Copies go on meanwhile."""
        with contextlib.suppress(StorageError):
            self.pager.leave_region()
        self.check()
        assert not any(copy.block.user_visible for copy in self.mover.flying)
        for name in self.pick(2):
            self.pager.prefetch(self.blocks[name])
        for name in [name for name, block in self.blocks.items() if block.user_visible]:
            assert self.blocks[name].state is not State.DROPPED
            if self.draw.random() < 0.5:
                self.write(name)
                self.copies_end()
        if self.draw.random() < 0.3:
            for name in self.pick(2):
                self.forget(name)
        if self.draw.random() < 0.3 and len(self.blocks) < 12:
            self.add(self.draw.choice([1, 2, 4]), visible=True)
            self.allowed = max(self.allowed, self.pager.account.used_bytes + self.pager.account.fixed_bytes)
        self.check()
        with contextlib.suppress(StorageError):
            self.pager.enter_region()
            return
        self.pager.enter_region()

    # -- what always holds

    def check(self) -> None:
        assert self.pager.account.used_bytes + self.pager.account.reserved_bytes + self.pager.account.fixed_bytes <= self.allowed
        known = list(self.pager.table)
        absent = (State.OFFLOADED, State.DROPPED)
        assert self.pager.account.used_bytes == sum(b.size_bytes for b in known if b.state not in absent)
        assert self.mover.dropped == {b for b in known if b.state is State.DROPPED}
        assert all(b.copy_is_valid for b in known if b.state is State.OFFLOADED) and not any(
            b.copy_is_valid for b in self.mover.dropped
        )
        kinds, states = [copy.kind for copy in self.mover.flying], [b.state for b in known]
        assert kinds.count("in") == states.count(State.PREFETCHING) == self.pager.account.prefetching_blocks
        assert kinds.count("out") == states.count(State.OFFLOADING)
        assert all(block.pins == 0 for block in self.blocks.values())
        for name, value in self.wanted.items():
            if self.blocks[name].state is State.DROPPED:
                continue
            assert self.bench.value(name) == value, f"{self.blocks[name]}"

    def end(self) -> None:
        """Bring everything back, drop it, and check that nothing is left."""
        self.mover.fail_copies, self.mover.refuse = [], None
        with contextlib.suppress(StorageError):
            self.pager.enter_region()  # raises what nobody has been told yet
        self.pager.account.budget_bytes = None
        self.renew(list(self.blocks))
        self.pager.closing.bring_back()
        self.allowed = self.pager.account.used_bytes + self.pager.account.fixed_bytes
        self.check()
        self.bench.tensors.clear()
        self.mover.finish_all()
        gc.collect()  # tracebacks of errors hold copies
        self.pager.forget_dead()
        assert self.pager.account.used_bytes == 0 and not self.mover.slots


@pytest.mark.parametrize("failures", [False, True])
@pytest.mark.parametrize("seed", range(by_profile(ci=6, long=40)))
def test_any_sequence(seed: int, failures: bool) -> None:
    sequence = AnySequence(seed, failures=failures)
    for _ in range(STEPS):
        sequence.step()
    sequence.end()
    needed = ("stages", "prefetched", "dropped", "renewed", *(["failed"] if failures else []))
    assert all(sequence.seen[name] for name in needed), sequence.seen


# -- memory that runs out at each line: nothing is lost, nothing stays held, and training goes on

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
            self.pager.record_uses({self.s: (1,)})
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
