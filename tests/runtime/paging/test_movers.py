"""The contract of all movers under the pager: what is away, changed meanwhile, lost or damaged. For each mover and tier."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, StorageError, UnsupportedError
from runtime.device import COMPUTE, USER
from runtime.paging import Block, State
from runtime.storage import ALIGNMENT_BYTES

from ...thoroughness import every_other
from ..cpu_machine import MIB, CpuMachine, Drive, slot_of
from ..memory import break_io, flip_a_bit
from ..simulated_machine import SimulatedMachine


class InMainMemory:
    """A mover with one tier under a pager, in a region. debug: it compares what is recomputed too.

    reach: user code can read and write blocks where they wait.
    """

    reach = True

    def __init__(self, folder: Path, tier: str, *, checksums: bool = False, debug: bool = False) -> None:
        files = [folder] if tier == "storage" else []
        self.tier, self.debug = tier, debug
        self.machine = CpuMachine(*files, host_bytes=0 if files else 16 * MIB, checksums=checksums, debug=debug)
        self.pager = self.machine.pager
        self.tensors: dict[Block, tuple[torch.Tensor, torch.Tensor]] = {}

    def make(self) -> Block:
        """Run a stage that makes a block of at least four pages."""
        tensor, block = self.machine.make(4 * MIB, 7)
        self.tensors[block] = tensor, tensor.clone()
        return block

    def read(self, block: Block) -> None:
        """Run a stage that reads a block, and check that it finds what was written last."""
        self.machine.use(block)
        assert torch.equal(*self.tensors[block])

    def write(self, block: Block) -> None:
        """Run a stage that writes a block."""
        self.pager.acquire([block], 0, "write")
        for each in self.tensors[block]:
            each.fill_(8)
        self.pager.retire([block], [block])

    def user_writes(self, block: Block) -> None:
        for each in self.tensors[block]:
            each[MIB] = 9

    def expect(self, block: Block, value: int) -> None:
        """From now on, all bytes of a block should have this value."""
        self.tensors[block][1].fill_(value)

    def recomputed(self, block: Block, *, wrong: bool) -> torch.UntypedStorage:
        """Return new memory with the bytes of a block, or with others."""
        made = self.tensors[block][1].clone()
        made[5] += wrong
        return made.untyped_storage()

    def damage(self, block: Block) -> None:
        """Change a bit of the slot, as a bad drive or bad memory does."""
        flip_a_bit(slot_of(block).extents[0], 3 * MIB)

    def break_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.tier == "storage":
            break_io(monkeypatch, "preadv")
        else:
            monkeypatch.setattr(self.machine.memory, "take_pages", refuse)

    def hold_copies(self) -> None:
        """Let no copy out end before `end_copies`, where that can be arranged."""
        if isinstance(self.machine.store, Drive):
            self.machine.store.go_on.clear()

    def end_copies(self) -> None:
        if isinstance(self.machine.store, Drive):
            self.machine.store.go_on.set()
        for block in self.tensors:
            self.machine.until(block, State.ON_DEVICE, State.OFFLOADED, State.UPDATING)

    def forget(self, block: Block) -> int:
        """Let a block die and its copies end. Return the bytes that are then in use in the tier."""
        del self.tensors[block]
        self.machine.engine.close()
        self.pager.forget_dead()
        return self.machine.store.used_bytes

    def user_code_ends(self) -> None:
        """The device has other work to do than user code's, for the pager or for a region."""

    def close(self) -> None:
        self.machine.close()


class OnStreams:
    """The same on a simulated device."""

    def __init__(self, tier: str, *, debug: bool = False) -> None:
        self.tier, self.debug, self.reach = tier, debug, tier == "host"
        self.machine = SimulatedMachine(0, budget_blocks=4, tiers=(tier,), debug=debug, unit=4 * ALIGNMENT_BYTES)
        self.pager = self.machine.pager
        self.user_code_ends()
        self.pager.enter_region()

    def make(self) -> Block:
        return self.machine.made()

    def read(self, block: Block) -> None:
        self._run(block, None)
        self.machine.device.synchronise()
        assert not self.machine.wrong

    def write(self, block: Block) -> None:
        self._run(block, self.machine.new_value())

    def _run(self, block: Block, value: int | None) -> None:
        self.pager.acquire([block], 0, "stage")
        self.machine.kernel(COMPUTE, block, value)
        self.pager.retire([block], [] if value is None else [block])

    def user_writes(self, block: Block) -> None:
        self._region.__exit__(None, None, None)
        self.machine.kernel(USER, block, self.machine.new_value())

    def expect(self, block: Block, value: int) -> None:
        self.machine.expected[block] = value

    def recomputed(self, block: Block, *, wrong: bool) -> torch.UntypedStorage:
        made = self.machine.device.allocate(self.machine.unit)
        ctypes.memset(made.data_ptr(), self.machine.expected[block] ^ wrong, self.machine.unit)
        return made

    def damage(self, block: Block) -> None:
        (extent,) = slot_of(block).extents
        if self.tier == "storage":
            self.machine.drive.content[extent.offset_bytes] ^= 1
        else:
            assert extent.address is not None
            last = extent.address + self.machine.unit - 1
            ctypes.memset(last, self.machine.expected[block] ^ 1, 1)

    def break_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.machine.drive, "read", refuse)
        monkeypatch.setattr(self.machine.device, "allocate", refuse)

    def hold_copies(self) -> None: ...

    def end_copies(self) -> None:
        self.machine.finish_queued()
        self.pager.forget_dead()

    def forget(self, block: Block) -> int:
        del self.machine.tensors[block], self.machine.expected[block]
        for _ in range(2):  # what a copy brings, and that it has died meanwhile
            self.end_copies()
        return self.machine.slab.used_bytes + self.machine.files.used_bytes

    def user_code_ends(self) -> None:
        self._region = self.machine.device.region()
        self._region.__enter__()

    def close(self) -> None:
        self.machine.mover.close()


Case = InMainMemory | OnStreams


def leave(case: Case, block: Block) -> None:
    """Send a block away, and wait until it is."""
    case.pager.offload(block)
    case.end_copies()
    assert block.state is State.OFFLOADED and block.tier == case.tier


def refuse(*_: object) -> None:
    raise StorageError("the drive is gone")


CASES: dict[str, Callable[[Path], Case]] = {
    "main memory, files": lambda folder: InMainMemory(folder, "storage"),
    "main memory, files, checksums": lambda folder: InMainMemory(folder, "storage", checksums=True),
    "main memory, files, debug": lambda folder: InMainMemory(folder, "storage", debug=True),
    "main memory, host": lambda folder: InMainMemory(folder, "host"),
    "main memory, host, debug": lambda folder: InMainMemory(folder, "host", debug=True),
    "streams, host": lambda _: OnStreams("host"),
    "streams, host, debug": lambda _: OnStreams("host", debug=True),
    "streams, drive": lambda _: OnStreams("storage"),
    "streams, drive, debug": lambda _: OnStreams("storage", debug=True),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    case = CASES[request.param](tmp_path)
    yield case
    case.close()


def test_a_block_comes_back_as_it_left_and_leaves_again_without_a_copy(case: Case) -> None:
    block = case.make()
    leave(case, block)
    case.read(block)
    assert block.copy_is_valid
    case.pager.offload(block)
    assert block.state is State.OFFLOADED, "at once: nothing is copied"
    case.read(block)


def test_a_write_that_overtakes_the_copy_out_is_kept(case: Case) -> None:
    block = case.make()
    case.hold_copies()
    case.pager.offload(block)
    case.write(block)
    case.end_copies()
    assert block.state is State.ON_DEVICE and not block.copy_is_valid
    leave(case, block)
    case.read(block)


@pytest.mark.parametrize(
    ("back", "seen"),
    every_other(
        ("by the next region", "before it left"),
        ("by the next region", "while it was away"),
        ("all at once", "while it was away"),
        ("all at once", "before it left"),
    ),
)
def test_what_user_code_writes_while_a_block_is_away_comes_back_and_is_no_damage(case: Case, back: str, seen: str) -> None:
    block = case.make()
    block.user_visible = seen == "before it left"
    leave(case, block)
    block.user_visible = True
    case.pager.leave_region()
    if case.reach:
        case.user_writes(block)
    else:
        with pytest.raises(RuntimeError, match=f"{block.name} .* is not in memory: teraio has moved it to storage"):
            case.user_writes(block)
    case.user_code_ends()
    case.pager.enter_region() if back == "by the next region" else case.pager.closing.bring_back()
    assert back == "by the next region" or block.state is State.ON_DEVICE
    case.read(block)


def test_what_is_recomputed_is_as_it_was_dropped(case: Case) -> None:
    block = case.make()
    case.read(block)
    block.source = object()
    case.pager.drop(block)
    assert block.state is State.DROPPED and case.pager.account.used_bytes == 0
    if case.debug:
        with pytest.raises(UnsupportedError, match=f"^{block.name} was recomputed with other bytes: its checksum was"):
            case.pager.renew({block: case.recomputed(block, wrong=True)})
        assert block.state is State.DROPPED, "nothing has changed"
    case.pager.renew({block: case.recomputed(block, wrong=False)})
    case.read(block)


@pytest.mark.parametrize("case", [name for name in CASES if "debug" in name or "checksums" in name], indirect=True)
@pytest.mark.parametrize(
    ("copies", "visible"), every_other(("new", False), ("new", True), ("used before", True), ("used before", False))
)
def test_damage_is_found_again_and_again(case: Case, copies: str, visible: bool) -> None:
    block = case.make()
    block.user_visible = visible
    leave(case, block)
    if copies == "used before":
        case.read(block)
        leave(case, block)
    case.damage(block)
    for _ in range(2):
        with pytest.raises(ChecksumError, match=f"block '{block.name}' in ") as raised:
            case.read(block)
        extent = slot_of(block).extents[0]
        assert raised.value.path == str(extent.path)
        assert extent.offset_bytes <= raised.value.offset_bytes < extent.offset_bytes + extent.length_bytes


def test_a_copy_in_that_fails_leaves_the_block_away_and_can_be_repeated(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    block = case.make()
    leave(case, block)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        case.break_reads(patch)
        case.pager.acquire([block], 0, "read")
    assert block.state is State.OFFLOADED and not block.pins and case.pager.account.used_bytes == 0
    case.read(block)


def test_a_block_is_changed_in_its_slot(case: Case) -> None:
    block = case.make()
    leave(case, block)
    case.pager.lending.lend([block])
    half = block.size_bytes // 2
    for begin in (0, half):
        part = torch.zeros(half, dtype=torch.uint8)
        case.pager.lending.copy_range(block, begin, part, to_slot=False)()
        case.end_copies()
        part += 1
        case.pager.lending.copy_range(block, begin, part, to_slot=True)()
        case.end_copies()
    case.pager.lending.give_back([block])
    (value,) = part.unique().tolist()
    assert value > 1
    case.expect(block, value)
    case.read(block)


@pytest.mark.parametrize("state", [State.ON_DEVICE, State.OFFLOADING, State.OFFLOADED, State.PREFETCHING])
def test_a_block_that_dies_leaves_nothing_behind(case: Case, state: State) -> None:
    block = case.make()
    if state is State.OFFLOADING:
        case.pager.offload(block)
    elif state is not State.ON_DEVICE:
        leave(case, block)
    if state is State.PREFETCHING:
        case.pager.prefetch(block)
    assert case.forget(block) == 0 and block.dead
    assert case.pager.account.used_bytes == 0 and not case.pager.blocks
