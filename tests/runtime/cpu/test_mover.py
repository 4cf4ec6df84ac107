"""The CPU mover over real memory and real files: alone, and under the pager with real threads."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, StorageError, StorageIOError
from runtime.cpu import CheckedCpuMover, CpuMemory, CpuMover
from runtime.paging import Block, Done, Pager, State, StorageOwnership, Tier, Tiers
from runtime.storage import PosixStore
from runtime.transfer import Engine

MIB = 1 << 20
SECONDS = 30


class Rig:
    """A mover and a pager over files in directories. Slots hold 4 MiB each at most."""

    def __init__(
        self,
        *folders: Path,
        budget_bytes: int | None = None,
        checksums: bool = False,
        debug: bool = False,
        ownership: StorageOwnership | None = None,
    ) -> None:
        self.memory = CpuMemory()
        self.ownership = ownership or StorageOwnership()
        self.store = PosixStore(folders, budget_bytes=None)
        self.engine = Engine(self.store, threads=2, chunk_bytes=256 << 10, checksums=checksums)
        checks = checksums or debug
        tier = Tier(name="storage", store=self.store, engine=self.engine)
        self.tiers = Tiers([tier], ownership=self.ownership, mapped=not checks)
        self.plain = CpuMover(self.memory, self.tiers, poison=debug)
        self.mover = CheckedCpuMover(self.plain, self.memory, debug=debug) if checks else self.plain
        self.pager = Pager(mover=self.mover, budget_bytes=budget_bytes)
        self.pager.enter_region()

    def close(self) -> None:
        self.engine.close()
        self.tiers.close()
        self.store.close()
        self.memory.stand_back()

    def make(self, size_bytes: int, fill: int, name: str = "w") -> tuple[torch.Tensor, Block]:
        """Run a stage that makes a block. Return its tensor and the block."""
        self.pager.acquire([], size_bytes, "make")
        tensor = torch.full((size_bytes,), fill, dtype=torch.uint8)
        block = self.pager.block_of(tensor, name=name, kind="activation", user_visible=False)
        assert block.span is not None
        self.pager.retire([], [])
        return tensor, block

    def out(self, block: Block, done: Done) -> None:
        self.mover.copy_out(block, None, done)

    def copied(self, copy: Callable[..., None], block: Block) -> StorageError | None:
        """Make a copy and wait until it has ended. Return its error."""
        ended = threading.Event()
        errors: list[StorageError | None] = []

        def done(error: StorageError | None) -> None:
            errors.append(error)
            ended.set()

        copy(block, done)
        assert ended.wait(SECONDS)
        return errors[0]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def within(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` in a separate thread. Fail if it does not end in time."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # the test raises it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def break_io(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)


def test_there_and_back(rig: Rig) -> None:
    tensor = torch.randint(0, 256, (3 * MIB + 123,), dtype=torch.uint8)
    expected = tensor.clone()
    block = rig.pager.block_of(tensor, name="w", kind="activation", user_visible=False)
    assert rig.copied(rig.out, block) is None
    rig.mover.release(block)
    assert torch.equal(tensor, expected)
    tensor[: 2 * MIB] += 1
    rig.mover.invalidate([block])
    assert rig.copied(rig.mover.copy_in, block) is None
    rig.mover.install(block)
    expected[: 2 * MIB] += 1
    assert torch.equal(tensor, expected)
    assert rig.engine.write_link.moved_bytes == rig.engine.read_link.moved_bytes > 2 * MIB
    rig.mover.forget(block)
    assert rig.store.used_bytes == 0


def test_the_storage_lives_until_its_copies_have_ended(rig: Rig) -> None:
    """Also a copy that begins when another one ends: a prefetch that was waiting for its block."""
    tensor, block = rig.make(4 * MIB, 1)
    began, go_on = threading.Event(), threading.Event()
    real = rig.store.read_chunk

    def slow_read(*arguments: object) -> None:
        began.set()
        assert go_on.wait(SECONDS)
        real(*arguments)  # type: ignore[arg-type]

    rig.engine.read_link._move = slow_read  # type: ignore[assignment]
    rig.pager.offload(block)
    rig.pager.prefetch(block)
    assert began.wait(SECONDS)
    while rig.engine.write_link.busy_seconds == 0 or rig.pager.account.offloading_bytes:
        pass
    writer = rig.tiers._transfers[block]
    del tensor
    threading.Event().wait(0.05)  # time for the I/O thread of the write to return
    alive = block.storage() is not None
    go_on.set()
    writer.wait(SECONDS)
    assert alive, "otherwise pages are moved over memory that others may have by now"


def test_nothing_keeps_a_storage_alive_after_its_copies(rig: Rig) -> None:
    tensor, block = rig.make(2 * MIB, 1)
    rig.copied(rig.out, block)
    rig.engine.write_link.close()
    del tensor
    assert block.dead


def test_a_copy_that_can_not_begin_keeps_nothing(rig: Rig) -> None:
    tensor, block = rig.make(2 * MIB, 1)
    assert rig.copied(rig.out, block) is None
    rig.mover.release(block)
    rig.engine.close()
    with pytest.raises(StorageError, match="closed"):
        rig.mover.copy_in(block, lambda error: None)
    del tensor
    gc.collect()
    assert block.dead and not rig.plain._arrived


def test_a_failed_read_leaves_the_stand_in(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, block = rig.make(2 * MIB, 7)
    rig.copied(rig.out, block)
    rig.mover.release(block)
    break_io(monkeypatch, "preadv")
    error = rig.copied(rig.mover.copy_in, block)
    assert isinstance(error, StorageIOError) and error.block == "w" and error.errno == 5
    assert not rig.plain._arrived
    monkeypatch.undo()
    assert tensor.unique().tolist() == [7]
    assert rig.copied(rig.mover.copy_in, block) is None
    rig.mover.install(block)
    assert tensor.unique().tolist() == [7]


def test_a_failed_write_under_the_pager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, budget_bytes=6 * MIB)
    tensor, block = rig.make(4 * MIB, 7)
    break_io(monkeypatch, "pwritev")
    with pytest.raises(StorageIOError):
        within(SECONDS, lambda: rig.pager.acquire([], 4 * MIB, "next"))
    monkeypatch.undo()
    assert block.state is State.ON_DEVICE and tensor.unique().tolist() == [7]
    within(SECONDS, lambda: rig.pager.acquire([], 4 * MIB, "next"))
    assert block.state is State.OFFLOADED and tensor.unique().tolist() == [7]
    rig.close()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.complex64,
    ],
)
def test_every_type_and_layout_comes_back_as_it_was(rig: Rig, dtype: torch.dtype) -> None:
    content = torch.randint(0, 255, (2 * MIB + 24,), dtype=torch.uint8)
    if dtype is torch.bool:
        content %= 2
    flat = content.clone().view(dtype)
    tensor = flat[: flat.numel() // 8 * 8].view(8, -1).t()[1:]
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    block = rig.pager.block_of(tensor, name="w", kind="activation", user_visible=False)
    del flat
    rig.pager.offload(block)
    while block.state is not State.OFFLOADED:
        threading.Event().wait(0.01)
    rig.pager.acquire([block], 0, "read")
    assert (tensor.size(), tensor.stride(), tensor.storage_offset()) == (size, stride, offset)
    back = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert torch.equal(back, content)
    rig.pager.retire([block], [])


# -- checksums


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, checksums=True)
    yield rig
    rig.close()


@pytest.mark.parametrize("back", ["by the next region", "all at once"])
def test_what_user_code_writes_while_a_block_is_away_is_no_damage(checked: Rig, back: str) -> None:
    tensor, block = checked.make(4 * MIB, 1)
    block.user_visible = True
    checked.pager.offload(block)
    checked.pager.leave_region()
    assert block.state is State.OFFLOADED
    tensor[MIB] = 9
    if back == "by the next region":
        checked.pager.enter_region()
        checked.pager.acquire([block], 0, "read")
        checked.pager.retire([block], [])
    else:
        checked.pager.bring_back_all()
    assert block.state is State.ON_DEVICE
    assert tensor[MIB] == 9 and tensor.unique().tolist() == [1, 9]


def test_a_block_that_user_code_got_hold_of_while_it_was_away(checked: Rig) -> None:
    """A saved tensor that becomes an output: not visible to the user when it left, and written before it came back."""
    tensor, block = checked.make(4 * MIB, 1)
    checked.copied(checked.out, block)
    checked.mover.release(block)
    tensor[MIB] = 9
    checked.mover.invalidate([block])
    assert checked.copied(checked.mover.copy_in, block) is None


def flip_a_bit(block: Block, offset_bytes: int) -> None:
    assert block.slot is not None
    (extent,) = block.slot.extents
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset_bytes + offset_bytes)
        (before,) = file.read(1)
        file.seek(extent.offset_bytes + offset_bytes)
        file.write(bytes([before ^ 1]))


@pytest.mark.parametrize("checks", ["checksums", "debug"])
@pytest.mark.parametrize("moment", ["before user code writes", "after user code has written"])
@pytest.mark.parametrize("place", [MIB, MIB + 99, 3 * MIB], ids=["written byte", "written page", "other page"])
def test_damage_is_told_from_what_user_code_writes(checks: str, moment: str, place: int, tmp_path: Path) -> None:
    rig = Rig(tmp_path, **{checks: True})  # type: ignore[arg-type]
    tensor, block = rig.make(4 * MIB, 1)
    other, good = rig.make(2 * MIB, 2)
    for each in (block, good):
        each.user_visible = True
        rig.pager.offload(each)
    rig.pager.leave_region()
    if moment == "before user code writes":
        flip_a_bit(block, place)
    tensor[MIB], other[MIB] = 9, 8
    if moment == "after user code has written":
        flip_a_bit(block, place)
    with pytest.raises(ChecksumError, match="block 'w' in "):
        rig.pager.enter_region()
        within(SECONDS, lambda: rig.pager.acquire([block], 0, "read"))
    with pytest.raises(RuntimeError, match="w was damaged on its way"):
        tensor.sum()
    with pytest.raises(ChecksumError):
        within(SECONDS, rig.pager.bring_back_all)
    assert good.state is State.ON_DEVICE and other.unique().tolist() == [2, 8], "all others are back"
    flip_a_bit(block, place)
    if place < 3 * MIB:
        with pytest.raises(ChecksumError):  # user code has changed the damaged page
            within(SECONDS, rig.pager.bring_back_all)
    elif checks == "checksums":
        within(SECONDS, rig.pager.bring_back_all)
        assert tensor.unique().tolist() == [1, 9] and tensor[MIB] == 9, "the drive gives the right bytes again"
    rig.close()


def test_what_user_code_has_read_is_compared_when_it_ends(checked: Rig) -> None:
    tensor, block = checked.make(4 * MIB, 1)
    block.user_visible = True
    checked.pager.offload(block)
    checked.pager.leave_region()
    flip_a_bit(block, 3 * MIB)
    checked.pager.enter_region()  # it has read nothing
    checked.pager.leave_region()
    assert tensor[3 * MIB] == 0
    with pytest.raises(ChecksumError):
        checked.pager.enter_region()


def test_ranges_are_compared_however_the_slot_was_written(checked: Rig) -> None:
    """Written as a whole, or in other ranges; the ranges of an update by slices, say."""
    _tensor, block = checked.make(4 * MIB, 1)
    checked.pager.lending.lend([block])
    buffer = torch.full((2 * MIB,), 2, dtype=torch.uint8)
    checked.pager.lending.copy_range(block, MIB, buffer, to_slot=True).wait()
    for place in (0, MIB + 4096, 4 * MIB - 1):
        flip_a_bit(block, place)
        for begin in (0, 2 * MIB):
            copy = checked.pager.lending.copy_range(block, begin, buffer, to_slot=False)
            if begin <= place < begin + 2 * MIB:
                with pytest.raises(ChecksumError):
                    copy.wait()
            else:
                copy.wait()
        flip_a_bit(block, place)
    checked.pager.lending.give_back([block])
    within(SECONDS, lambda: checked.pager.acquire([block], 0, "read"))


def test_a_damaged_file_fails_the_copy_in(checked: Rig) -> None:
    tensor, block = checked.make(4 * MIB, 1)
    checked.pager.offload(block)
    while block.state is not State.OFFLOADED:
        threading.Event().wait(0.01)
    flip_a_bit(block, MIB)
    with pytest.raises(ChecksumError, match="block 'w' in "):
        within(SECONDS, lambda: checked.pager.acquire([block], 0, "read"))
    del tensor


# -- several movers in one process


def test_a_storage_has_one_mover(rig: Rig, tmp_path: Path) -> None:
    """Two movers would each map a slot over the pages, and a write to one slot would be missing in the other."""
    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "other", ownership=rig.ownership)
    tensor, block = rig.make(4 * MIB, 1)
    rig.pager.offload(block)
    block.user_visible = True
    rig.pager.leave_region()
    theirs = other.pager.block_of(tensor, name="w", kind="parameter", user_visible=True)
    assert theirs.span is None
    other.pager.acquire([theirs], 0, "write")
    tensor.fill_(5)
    other.pager.retire([theirs], [theirs])
    other.pager.offload(theirs)
    other.pager.leave_region()
    rig.pager.enter_region()
    rig.pager.acquire([block], 0, "read")
    assert tensor.unique().tolist() == [5]
    rig.pager.retire([block], [])
    other.close()


@pytest.mark.parametrize("end", ["its block is gone", "its mover is closed"])
def test_a_storage_gets_another_mover_after(rig: Rig, tmp_path: Path, end: str) -> None:
    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "other", ownership=rig.ownership)
    tensor, _ = other.make(2 * MIB, 1)
    storage = tensor.untyped_storage()
    assert rig.mover.span(storage) is None
    if end == "its block is gone":
        key = storage._cdata
        del tensor, storage
        other.pager.forget_dead()
        assert key not in rig.ownership._claims
    else:
        other.tiers.close()
        assert rig.mover.span(storage) is not None
    other.close()


def test_what_a_mover_carried_that_is_gone_is_nobodys() -> None:
    class Owner:
        pass

    claims, first, second = StorageOwnership(), Owner(), Owner()
    storage = torch.zeros(8).untyped_storage()
    assert claims.claim(storage, first) and claims.claim(storage, first) and not claims.claim(storage, second)
    del first
    gc.collect()
    assert claims.claim(storage, second)


def test_a_storage_that_gets_the_key_of_a_dead_one_is_nobodys_yet() -> None:
    class Owner:
        pass

    claims, first, second = StorageOwnership(), Owner(), Owner()
    for give in (lambda storage: claims.claim(storage, first), claims.leave):
        storage = torch.zeros(8).untyped_storage()
        give(storage)
        key = storage._cdata
        del storage
        others = [torch.zeros(8).untyped_storage() for _ in range(64)]
        (same,) = [each for each in others if each._cdata == key]
        assert not claims.stays(same) and claims.claim(same, second) and not claims.claim(same, first)


# -- what user code may do to a storage that is away


@pytest.mark.parametrize("end", ["next region", "bring back all"])
@pytest.mark.parametrize("change", ["shared", "resized", "resized and back"])
def test_a_storage_gets_other_memory_while_it_is_away(rig: Rig, change: str, end: str) -> None:
    """By then its old address belongs to another block, even if the storage has it again."""
    tensor, block = rig.make(4 * MIB, 3)
    block.user_visible = True
    rig.pager.offload(block)
    rig.pager.leave_region()
    assert block.state is State.OFFLOADED
    storage = tensor.untyped_storage()
    if change == "shared":
        tensor.share_memory_()
    else:
        storage.resize_(0)
        if change == "resized and back":
            storage.resize_(4 * MIB)
            tensor.fill_(4)
    others = [torch.full((4 * MIB,), 5, dtype=torch.uint8) for _ in range(3)]
    rig.pager.enter_region() if end == "next region" else rig.pager.bring_back_all()
    assert all(other.unique().tolist() == [5] for other in others)
    if change != "resized":
        assert tensor.unique().tolist() == [3 if change == "shared" else 4]


# -- under the pager, with real threads


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_stages_in_random_order_under_a_budget(tmp_path: Path, debug: bool) -> None:
    rig = Rig(tmp_path, budget_bytes=12 * MIB, debug=debug)
    draw = random.Random(0)
    tensors, blocks, values = [], [], []
    for number in range(8):
        tensor, block = rig.make(draw.randint(MIB, 3 * MIB), number, f"w{number}")
        tensors.append(tensor), blocks.append(block), values.append(number)

    def stages() -> None:
        for step in range(200):
            chosen = draw.sample(range(8), draw.randint(1, 3))
            hints = [blocks[i] for i in draw.sample(range(8), 2)]
            rig.pager.acquire([blocks[i] for i in chosen], MIB, "stage", then_fetch=hints)
            assert all(tensors[i][-1] == tensors[i][0] == values[i] for i in chosen)
            written = draw.sample(chosen, draw.randint(0, len(chosen)))
            for i in written:
                values[i] = step % 251
                tensors[i].fill_(values[i])
            rig.pager.retire([blocks[i] for i in chosen], [blocks[i] for i in written])
            rig.pager.offload(blocks[draw.randrange(8)])

    within(SECONDS, stages)
    assert rig.pager.account.peak_bytes <= 12 * MIB
    assert rig.engine.write_link.moved_bytes > 20 * MIB and rig.engine.read_link.moved_bytes > 20 * MIB
    within(SECONDS, rig.pager.bring_back_all)
    assert [tensor.unique().tolist() for tensor in tensors] == [[value] for value in values]
    tensors.clear()
    del tensor
    rig.pager.forget_dead()
    assert rig.pager.account.used_bytes == 0 and rig.store.used_bytes == 0
    rig.close()
