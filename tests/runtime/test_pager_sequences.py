"""The pager under random sequences of stages, user code, hints, ends of copies, deaths and failures."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planner.errors import BudgetError, StorageError, StorageFullError
from runtime.block import Block, State

from .memory_mover import UNIT, Bench, io_error


class AnySequence(RuleBasedStateMachine):
    """Stages, user code, hints, ends of copies, deaths and failures in any order."""

    @initialize(seed=st.integers(0, 1 << 16), budget=st.integers(10, 24), fixed=st.integers(0, 3))
    def begin(self, seed: int, budget: int, fixed: int) -> None:
        self.bench = Bench(budget * UNIT, seed)
        self.pager, self.mover = self.bench.pager, self.bench.mover
        self.pager.fixed_bytes = fixed * UNIT
        self.blocks: dict[str, Block] = {}
        self.wanted: dict[str, int] = {}
        self.count = 0
        self.allowed = budget * UNIT
        self.in_user_code = False
        self.injected = False
        self.draw = random.Random(seed)

    def pick(self, most: int) -> list[str]:
        names = sorted(self.blocks)
        return self.draw.sample(names, min(len(names), self.draw.randint(0, most)))

    def fits(self, blocks: Sequence[Block], new_bytes: int) -> bool:
        stay = {b for b in self.blocks.values() if b.span is None} | set(blocks)
        assert self.pager.budget_bytes is not None
        return sum(b.size_bytes for b in stay) + new_bytes + self.pager.fixed_bytes <= self.pager.budget_bytes

    @precondition(lambda self: not self.in_user_code)
    @rule(
        units=st.sampled_from([0, 0, 1, 2, 2, 4, 4, 6]),
        workspace=st.integers(0, 3),
        visible=st.booleans(),
        ends=st.integers(0, 2),
        leave=st.booleans(),
    )
    def stage(self, units: int, workspace: int, visible: bool, ends: int, leave: bool) -> None:
        names = self.pick(3)
        blocks = [self.blocks[name] for name in names]
        fetch = [self.blocks[name] for name in self.pick(2)]
        if leave:
            self.hint_offload(names)
        try:
            self.pager.acquire(blocks, (units + workspace) * UNIT, "stage", then_fetch=fetch)
        except BudgetError as error:
            assert not self.fits(blocks, (units + workspace) * UNIT), error
            return
        except StorageError:
            assert self.injected, "an error out of nowhere"
            return
        assert self.fits(blocks, (units + workspace) * UNIT)
        assert self.pager.budget_bytes is not None
        self.allowed = self.pager.budget_bytes
        assert all(b.state in (State.ON_DEVICE, State.LEAVING) for b in blocks)
        written = [name for name in names if self.draw.random() < 0.5]
        for name in written:
            self.wanted[name] = self.draw.randrange(256)
            self.bench.tensors[name].fill_(self.wanted[name])
        for _ in range(ends):
            self.bench.finish_one()
        if units:
            self.add(units, visible)
        last = [name for name in names if self.draw.random() < 0.1]
        for name in last:
            self.forget(name)
        self.pager.retire(blocks, [b for n, b in zip(names, blocks, strict=True) if n in written], last_used=blocks)

    def add(self, units: int, visible: bool) -> None:
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

    @precondition(lambda self: not self.in_user_code)
    @rule()
    def fence(self) -> None:
        try:
            self.pager.fence()
        except StorageError:
            pass
        flying = {copy.block for copy in self.mover.flying}
        assert not any(block.user_visible for block in flying)
        self.in_user_code = True

    @precondition(lambda self: self.in_user_code)
    @rule()
    def enter(self) -> None:
        try:
            self.pager.enter()
        except StorageError:
            self.pager.enter()
        self.in_user_code = False

    @precondition(lambda self: self.in_user_code)
    @rule(units=st.integers(1, 6))
    def user_code(self, units: int) -> None:
        """Writes what it can reach, drops things, brings a new tensor of its own."""
        for name, block in list(self.blocks.items()):
            if block.user_visible and self.draw.random() < 0.5:
                self.wanted[name] = self.draw.randrange(256)
                self.bench.tensors[name].fill_(self.wanted[name])
        if self.draw.random() < 0.2:
            for name in self.pick(1):
                self.forget(name)
        if self.draw.random() < 0.2:
            self.add(units, True)
            self.allowed = max(self.allowed, self.pager.used_bytes + self.pager.fixed_bytes)

    @precondition(lambda self: not self.in_user_code)
    @rule()
    def a_plan_offloads(self) -> None:
        self.hint_offload(self.pick(3))

    def hint_offload(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self.pager.offload(self.blocks[name])
            except StorageError:
                pass

    @rule()
    def hint_prefetch(self) -> None:
        for name in self.pick(2):
            self.pager.prefetch(self.blocks[name])

    @rule(count=st.integers(1, 3))
    def copies_end(self, count: int) -> None:
        for _ in range(count):
            self.bench.finish_one()

    @rule()
    def one_copy_will_fail(self) -> None:
        self.mover.fail_copies, self.injected = [io_error()], True

    @precondition(lambda self: not self.in_user_code)
    @rule()
    def one_copy_will_be_refused(self) -> None:
        self.mover.refuse, self.injected = StorageFullError("full"), True

    @invariant()
    def within_the_budget(self) -> None:
        if not hasattr(self, "pager"):
            return
        assert self.pager.used_bytes + self.pager._reserved + self.pager.fixed_bytes <= self.allowed

    @invariant()
    def the_count_is_right(self) -> None:
        if not hasattr(self, "pager"):
            return
        on_device = sum(b.size_bytes for b in self.pager._blocks.values() if b.state is not State.AWAY)
        assert self.pager.used_bytes == on_device
        kinds = [copy.kind for copy in self.mover.flying]
        states = [b.state for b in self.pager._blocks.values()]
        assert kinds.count("in") == states.count(State.ARRIVING) == self.pager._arriving
        assert kinds.count("out") == states.count(State.LEAVING)
        assert all(block.pins == 0 for block in self.blocks.values())

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "pager"):
            return
        for name, value in self.wanted.items():
            assert self.bench.value(name) == value, f"{self.blocks[name]}"

    def teardown(self) -> None:
        if not hasattr(self, "pager"):
            return
        self.mover.fail_copies, self.mover.refuse = [], None
        for _ in range(2):  # an error that nobody has seen yet is raised first
            try:
                self.pager.bring_back_all()
            except StorageError:
                continue
        assert all(block.state is State.ON_DEVICE for block in self.blocks.values())
        self.nothing_is_lost()
        self.bench.tensors.clear()
        gc.collect()  # tracebacks of errors hold copies
        self.mover.finish_all()
        self.pager.forget_dead()
        assert self.pager.used_bytes == 0 and not self.mover.slots


AnySequence.TestCase.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnySequence = AnySequence.TestCase
