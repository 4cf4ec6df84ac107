"""The pager over an in-memory mover: the budget, and who leaves. Copies end when the test says so.

Random sequences: `test_pager_sequences.py`; real memory and files: `test_mover.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from planner.errors import BudgetError, StorageError
from runtime.device import CpuDevice
from runtime.paging import Pager, State

from ..memory_mover import UNIT, Bench, evicted


class Counting(CpuDevice):
    """A device that knows how much memory is allocated."""

    allocated_bytes = 0

    def external_bytes(self, known_bytes: int) -> int:
        return self.allocated_bytes - known_bytes


def test_what_was_there_before_it_was_seen_counts_once() -> None:
    device = Counting()
    pager = Pager(mover=None, budget_bytes=None, device=device)
    weight, batch, output = (torch.zeros(UNIT * number, dtype=torch.uint8) for number in (4, 2, 1))
    device.allocated_bytes = 10 * UNIT
    for _ in range(2):
        pager.enter_region()
        pager.block_of(weight, name="weight", kind="parameter", user_visible=True)
        pager.block_of(batch, name="batch", kind="activation", user_visible=True)
        assert (pager.account.used_bytes, pager.account.unmoved_bytes) == (6 * UNIT, 4 * UNIT)
        pager.leave_region()
    device.allocated_bytes += UNIT
    pager.block_of(output, name="output", kind="activation", user_visible=False)
    assert (pager.account.used_bytes, pager.account.unmoved_bytes) == (7 * UNIT, 4 * UNIT), "a stage's output is new"
    assert pager.account.peak_bytes <= device.allocated_bytes


@pytest.mark.parametrize(("uses", "leaves"), [((1, 9, 5), 1), ((100, 0, 5), 1), ((3, 2, 0), 2)])
def test_the_block_that_is_used_last_or_nobody_knows_when_leaves_and_no_other(uses: Sequence[int], leaves: int) -> None:
    bench = Bench(6 * UNIT)
    blocks = [bench.make(name, 2) for name in "abc"]
    for block, use in zip(blocks, uses, strict=True):
        block.next_use = use
    bench.make("new", 2)
    assert [number for number, block in enumerate(blocks) if block.state is State.OFFLOADED] == [leaves]


def test_what_the_stage_reads_stays() -> None:
    bench = Bench(4 * UNIT)
    other, read = bench.make("other", 2), bench.make("read", 2)
    other.next_use, read.next_use = 1, 100
    bench.run(read, new_bytes=2 * UNIT)
    assert (read.state, other.state) == (State.ON_DEVICE, State.OFFLOADED) and "out read" not in bench.mover.log


def test_copies_are_exposed_while_the_training_thread_waits_and_hidden_else() -> None:
    busy = {"out": 0.0, "in": 0.0}
    bench = Bench(4 * UNIT, busy_seconds=lambda: dict(busy))
    first = bench.make("first", 2)
    bench.make("second", 2)

    def copy_ends() -> bool:
        busy[bench.mover.flying[0].kind] += 3.0
        return Bench.finish_one(bench)

    bench.condition.finish_one = copy_ends
    evicted(bench, first)  # nobody waits
    assert bench.pager.account.exposed_seconds == {}
    bench.make("third", 2)
    assert bench.pager.account.exposed_seconds == {}, "there was room"
    bench.run(first)  # waits until another has left, and then until it is here
    assert bench.pager.account.exposed_seconds == {"out": 3.0, "in": 3.0}
    bench.pager.offload(first)
    busy["out"] += 5.0
    bench.mover.finish_all()
    assert bench.pager.account.exposed_seconds == {"out": 3.0, "in": 3.0}, "nobody waited for this one"


def test_dead_blocks_are_room() -> None:
    bench = Bench(4 * UNIT)
    bench.make("kept", 2)
    bench.make("dropped", 2)
    bench.drop("dropped")
    bench.make("new", 2)
    assert "out kept" not in bench.mover.log


def test_last_used_blocks_are_free_when_the_stage_retires() -> None:
    bench = Bench(4 * UNIT)
    kept, dropped = bench.make("kept", 2), bench.make("dropped", 2)
    bench.pager.acquire([kept, dropped], 0, "last")
    bench.drop("dropped")
    bench.pager.retire([kept, dropped], [], last_used=[kept, dropped])
    assert bench.pager.account.used_bytes == 2 * UNIT
    assert kept in bench.pager.blocks


def test_a_budget_that_one_stage_does_not_fit_in() -> None:
    bench = Bench(6 * UNIT)
    bench.pager.account.fixed_bytes = UNIT
    first, second = bench.make("first", 2), bench.make("second", 2)
    with pytest.raises(BudgetError) as raised:
        bench.pager.acquire([first, second], 3 * UNIT, "forward/big")
    assert raised.value.smallest_bytes == 8 * UNIT
    assert raised.value.stage == "forward/big"
    assert first.pins == second.pins == 0
    bench.pager.acquire([first], 3 * UNIT, "smaller")
    assert second.state is State.OFFLOADED


def test_no_mover_and_no_room() -> None:
    pager = Pager(mover=None, budget_bytes=4 * UNIT)
    pager.enter_region()
    with pytest.raises(StorageError, match="set the option storage to a directory"):
        pager.acquire([], 5 * UNIT, "big")


def test_memory_that_is_kept_for_reuse_counts_as_well() -> None:
    bench = Bench(8 * UNIT)
    bench.pager.account.fixed_bytes = UNIT
    bench.make("kept", 4)
    bench.pager.acquire([], 2 * UNIT, "stage")
    assert bench.device.spare_bytes == 3 * UNIT, "what the stage allocates comes out of it"
    bench.pager.retire([], [])
    bench.drop("kept")
    bench.pager.leave_region()
    assert bench.device.spare_bytes == 7 * UNIT


def test_one_storage_is_one_block_until_it_is_resized_and_without_a_budget_nothing_moves() -> None:
    bench = Bench(None)
    block = bench.make("base", 64)
    view = bench.tensors["base"].view(64, UNIT)[1]
    assert bench.pager.block_of(view, name="view", kind="activation", user_visible=True) is block
    assert block.user_visible and bench.pager.account.used_bytes == 64 * UNIT
    bench.tensors["base"].untyped_storage().resize_(4 * UNIT)
    new = bench.pager.block_of(bench.tensors["base"], name="x", kind="activation", user_visible=False)
    assert new is not block and bench.pager.account.used_bytes == 4 * UNIT and bench.pager.blocks == [new]
    assert bench.pager.account.evictions == 0 and bench.pager.account.peak_bytes == 64 * UNIT
