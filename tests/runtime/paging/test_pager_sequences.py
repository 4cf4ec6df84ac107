"""The pager under random sequences of stages, user code, hints, ends of copies, deaths and failures.

After every step: within the budget, the count is right, and no block has lost a write. Plain seeds rather than
hypothesis' state machine: in the same time they make some thirty times as many steps.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Sequence

import pytest
import torch

from planner.errors import BudgetError, StorageError, StorageFullError
from runtime.paging import Block, State

from ..memory_mover import UNIT, Bench, io_error

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

    def fits(self, blocks: Sequence[Block], new_bytes: int) -> bool:
        stay = {b for b in self.blocks.values() if b.span is None} | set(blocks)
        return sum(b.size_bytes for b in stay) + new_bytes + self.pager.account.fixed_bytes <= self.budget

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
            assert not self.fits(blocks, new_bytes), error
            self.seen["refused"] += 1
            return
        except StorageError:
            assert self.failures, "an error out of nowhere"
            self.seen["failed"] += 1
            return
        assert self.fits(blocks, new_bytes)
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
        self.pager.bring_back_all()
        self.allowed = self.pager.account.used_bytes + self.pager.account.fixed_bytes
        self.check()
        self.bench.tensors.clear()
        self.mover.finish_all()
        gc.collect()  # tracebacks of errors hold copies
        self.pager.forget_dead()
        assert self.pager.account.used_bytes == 0 and not self.mover.slots


@pytest.mark.parametrize("failures", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_sequence(seed: int, failures: bool) -> None:
    sequence = AnySequence(seed, failures=failures)
    for _ in range(STEPS):
        sequence.step()
    sequence.end()
    needed = ("stages", "prefetched", "dropped", "renewed", *(["failed"] if failures else []))
    assert all(sequence.seen[name] for name in needed), sequence.seen
