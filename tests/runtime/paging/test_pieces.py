"""[Note: Memory in pieces]: what a stage allocates is recorded once there was a retry, and blocks make way for it then."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence

import pytest
import torch

from runtime.device import DeviceMemoryError
from runtime.paging import Block, State

from ..memory_mover import UNIT, Bench, evicted


class ListedPieces:
    """`Pieces` that record what `needs` says, and list what they were asked for. movable: the last blocks that might move.
    serves: whether none has to. short: bytes that blocks let go of, as long as there are any; let_go: how often some did."""

    def __init__(self, needs: Sequence[int]) -> None:
        self.needs = needs
        self.recordings = 0
        self.gathered: list[Sequence[int]] = []
        self.movable: list[int] = []
        self.serves = False
        self.short = self.let_go = 0

    def begin_recording(self) -> bool:
        self.recordings += 1
        return True

    def recorded(self) -> Sequence[int]:
        return tuple(self.needs)

    def gather(
        self,
        history: Sequence[int],
        movable: Callable[[], MutableMapping[int, int]],
        move: Callable[[int, torch.UntypedStorage], None],
        let_go: Callable[[int], bool],
    ) -> bool:
        self.gathered.append(history)
        self.movable = list(movable())
        while self.short and let_go(self.short):
            self.let_go += 1
        return self.serves


@pytest.fixture
def bench() -> Bench:
    bench = Bench(64 * UNIT)
    bench.device.pieces = ListedPieces([4 * UNIT, UNIT])
    return bench


def stage(bench: Bench, name: str = "stage", *blocks: Block, retries: int = 0) -> list[Sequence[int]]:
    """Run one in a region of its own. Return the pieces that it got."""
    bench.pager.leave_region()
    bench.pager.enter_region()
    bench.device.pieces.gathered.clear()
    bench.pager.acquire(blocks, 4 * UNIT, name)
    bench.device.retries += retries
    bench.pager.retire(blocks, [])
    return list(bench.device.pieces.gathered)


def test_without_a_retry_nothing_is_recorded_and_nothing_makes_way(bench: Bench) -> None:
    for _ in range(4):
        assert not stage(bench)
    assert not bench.device.pieces.recordings


def test_after_one_each_stage_is_recorded_in_its_second_run_and_gets_its_pieces(bench: Bench) -> None:
    stage(bench, retries=1)
    for name in ("stage", "another"):
        stage(bench, name)
        stage(bench, name)
        assert stage(bench, name) == [(4 * UNIT, UNIT)]
    assert bench.device.pieces.recordings == 2


def test_blocks_move_that_nobody_else_holds_and_no_copy_uses(bench: Bench) -> None:
    free, read, held, leaving = (bench.make(name, 2) for name in ("free", "read", "held", "leaving"))
    stage(bench, retries=1)
    stage(bench)
    stage(bench)
    bench.pager.acquire([held], 0, "tensors that user code asked for")
    bench.pager.offload(leaving)
    assert leaving.state is State.OFFLOADING
    assert stage(bench, "stage", read)
    assert bench.device.pieces.movable == [free.address, read.address]
    bench.pager.retire([held], [])


def test_blocks_make_way_for_a_large_one_that_comes_back(bench: Bench) -> None:
    bench.pager.enter_region()
    large, small = bench.make("large", 8), bench.make("small", 2)

    def comes_back(block: Block) -> list[Sequence[int]]:
        evicted(bench, block)
        bench.device.pieces.gathered.clear()
        thread = threading.Thread(target=bench.pager.prefetch, args=(block,)) if in_a_thread else None
        thread.start() if thread else bench.pager.prefetch(block)
        if thread:
            thread.join()
        bench.mover.finish_all()
        assert block.state is State.ON_DEVICE
        return list(bench.device.pieces.gathered)

    in_a_thread = False
    assert not comes_back(large), "there was no retry"
    stage(bench, retries=1)
    stage(bench)
    assert comes_back(large) == [(large.size_bytes,)]
    bench.pager.account.budget_bytes = 64 * large.size_bytes
    assert not comes_back(small) and comes_back(large)
    in_a_thread = True
    assert not comes_back(large), "only who runs the region queues what the device computes"
    in_a_thread = False
    stage(bench, retries=1)
    assert not comes_back(small)
    stage(bench, retries=1)
    assert comes_back(small), "there was a retry, perhaps for it"


def test_everything_leaves_once_when_a_plan_begins_after_retries(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    resting = bench.make("resting", 2)
    emptied: list[str] = []
    monkeypatch.setattr(bench.device, "give_back_memory", lambda: emptied.append("once"))
    bench.pager.plan_begins()
    for _ in range(3):
        stage(bench)
    assert not emptied, "there was no retry"
    stage(bench, retries=1)
    bench.pager.plan_begins()
    for _ in range(6):
        stage(bench)
    assert emptied == ["once"]
    bench.pager.plan_begins()
    bench.mover.refuse = DeviceMemoryError("no memory for a block that comes back")
    stage(bench, "stage", evicted(bench, resting))
    assert emptied == ["once"] * 2, "everything has left for that block already"


def test_the_error_of_a_prefetch_without_memory_keeps_no_tensor_alive(bench: Bench) -> None:
    """It waits for the next stage, and autograd takes a gradient for `.grad` as it is only if nothing else holds the tensor."""
    resting = evicted(bench, bench.make("resting", 2))

    def region() -> Callable[[], torch.Tensor | None]:
        result = torch.empty(1)
        try:
            raise torch.OutOfMemoryError
        except torch.OutOfMemoryError as error:
            bench.mover.refuse = DeviceMemoryError("no memory in one piece")
            bench.mover.refuse.__cause__ = error
        bench.pager.prefetch(resting)
        bench.mover.refuse = None
        assert resting.state is State.OFFLOADED
        return weakref.ref(result)

    assert region()() is None
