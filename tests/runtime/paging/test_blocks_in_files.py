"""Blocks whose copy is a range of a file of the user: read as they are, never written, given up when changed. For each mover."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import ChecksumError, StorageIOError, UnsupportedError
from runtime.cuda import StreamMover
from runtime.paging import Block, CheckedMover, Pager, State, Tier, Tiers
from runtime.storage import FileSpace, KvikioStore, StagedStore
from runtime.system import storage_swap
from runtime.transfer import Engine

from ..block_machine import Allocator
from ..cpu_machine import MIB, SECONDS, CpuMachine, slot_of, within
from ..memory import anonymous_bytes, refuse_direct_io
from ..simulated_device import SimulatedDevice
from ..storage.fakes import CompatMode, FakeKvikio, SlowCopier

SIZE = MIB + 8
"""Of a weight: not whole pages."""
PLACE = 808
"""Of a weight, unless told otherwise: not the begin of a page."""
FILE_BYTES = 4 * MIB + 77


class Rig(ABC):
    """Weights in a file of the user, in a region of a pager with a storage tier.

    path: of the file; before: what is in it. reach: user code can read and write weights where they wait.
    """

    reach: bool
    pager: Pager
    store: Any
    engine: Engine
    tiers: Tiers

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self.spill = folder / "spill"
        self.spill.mkdir()
        self.path = folder / "weights"
        self.before = random.Random(0).randbytes(file_bytes)
        self.path.write_bytes(self.before)

    def weight(
        self, offset: int = PLACE, size: int = SIZE, *, name: str = "w", path: Path | None = None
    ) -> tuple[torch.Tensor, Block]:
        storage = self.pager.block_in_file(name, path=path or self.path, offset_bytes=offset, size_bytes=size)
        tensor = storage_swap.tensor_over(storage, torch.uint8, (size,))
        block = self.pager.known_block(tensor)
        assert block is not None
        return tensor, block

    def content(self, offset: int = PLACE, size: int = SIZE) -> bytes:
        return self.before[offset : offset + size]

    def unchanged(self) -> bool:
        return self.path.read_bytes() == self.before

    def use(self, block: Block, write: Callable[[], object] | None = None) -> None:
        """Run a stage that reads a weight, and writes it if `write` is given."""
        within(SECONDS, lambda: self.pager.acquire([block], 0, "use"))
        self.settle()
        if write is not None:
            write()
        self.pager.retire([block], [block] if write is not None else [])

    def user_code(self, *work: Callable[[], object]) -> None:
        """Leave the region, run each of `work`, and enter the next one."""
        self.pager.leave_region()
        self.settle()
        for each in work:
            each()
        self.pager.enter_region()

    def leave(self, block: Block) -> None:
        """Send a block away as often as it takes: the first time may only find that it has left its file."""
        for _ in range(2):
            self.pager.offload(block)
            self.settle()
        assert block.state is State.OFFLOADED

    def settle(self) -> None:
        """Let copies out end."""
        deadline = time.monotonic() + SECONDS
        while True:
            with self.pager.condition:
                if not self.pager.account.offloading_bytes:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.001)

    @abstractmethod
    def close(self) -> None: ...


class InMainMemory(Rig):
    reach = True

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES, **settings: Any) -> None:
        super().__init__(folder, file_bytes)
        self.machine = CpuMachine(self.spill, **settings)
        self.pager, self.store, self.tiers = self.machine.pager, self.machine.store, self.machine.tiers
        self.engine = self.machine.engine

    def close(self) -> None:
        self.machine.close()


def staged(folder: Path, checksums: bool = False) -> StagedStore:
    return StagedStore([folder], SlowCopier(), budget_bytes=None, buffer_bytes=MIB // 4, checksums=checksums)  # type: ignore[arg-type]


def kvikio(folder: Path) -> KvikioStore:
    return KvikioStore([folder], budget_bytes=None, kvikio=FakeKvikio(compatible_only=False))


class OnStreams(Rig):
    """On a simulated device, whose work is done before the test goes on."""

    reach = False

    def __init__(self, folder: Path, make: Callable[[Path], FileSpace] = staged, *, debug: bool = False) -> None:
        super().__init__(folder)
        self.store = make(self.spill)
        self.engine = Engine(self.store, threads=2, chunk_bytes=MIB // 2)
        self.device = SimulatedDevice(0, pieces=3, unit=2 * MIB)
        self.tiers = Tiers([Tier(store=self.store, engine=self.engine)])
        mover = StreamMover(self.device, self.tiers, in_reach=False, poison=debug)
        self.pager = Pager(
            mover=CheckedMover(mover, mover.read) if debug else mover, budget_bytes=4 * MIB, device=Allocator(self.device)
        )
        self._region = self.device.region()
        self._region.__enter__()
        self.pager.enter_region()

    def settle(self) -> None:
        self.device.synchronise()
        super().settle()

    def close(self) -> None:
        self._region.__exit__(None, None, None)
        self.engine.close()
        self.store.close()


IN_MEMORY: dict[str, Callable[[Path], Rig]] = {
    "main memory": InMainMemory,
    "main memory, hashes": partial(InMainMemory, unchanged=True),
    "main memory, checksums": partial(InMainMemory, checksums=True),
    "main memory, debug": partial(InMainMemory, debug=True),
}
RIGS = {
    **IN_MEMORY,
    "streams": OnStreams,
    "streams, checksums": partial(OnStreams, make=partial(staged, checksums=True)),
    "streams, kvikio": partial(OnStreams, make=kvikio),
    "streams, debug": partial(OnStreams, debug=True),
}
in_main_memory = pytest.mark.parametrize("rig", IN_MEMORY, indirect=True)
with_hashes = pytest.mark.parametrize("rig", ["main memory, hashes"], indirect=True)
with_either_mover = pytest.mark.parametrize("rig", ["main memory, hashes", "main memory, debug"], indirect=True)


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = RIGS[request.param](tmp_path)
    yield rig
    rig.close()


def data_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy().tobytes())


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return data_of(torch.empty(0, dtype=torch.uint8).set_(storage))


# -- read, and never written


@pytest.mark.parametrize("offset", [0, 1, 4095, PLACE, FILE_BYTES - SIZE], ids=["first", "odd", "page", "usual", "last"])
def test_any_range_takes_no_memory_is_read_when_a_stage_needs_it_and_never_written(rig: Rig, offset: int) -> None:
    tensor, block = rig.weight(offset)
    assert block.state is State.OFFLOADED and rig.pager.account.used_bytes == rig.engine.read_link.moved_bytes == 0
    assert block.span is not None
    if rig.reach:
        assert anonymous_bytes(block.span) == 0 and data_of(tensor) == rig.content(offset), "user code reads the file"
    else:
        with pytest.raises(RuntimeError, match="is not in memory: teraio has moved it to storage"):
            tensor.sum()
    for _ in range(3):
        rig.use(block)
        assert block.state is State.ON_DEVICE and data_of(tensor) == rig.content(offset)
        rig.user_code(tensor.sum)
        rig.leave(block)
        assert not rig.reach or anonymous_bytes(block.span) == 0
    assert slot_of(block).file is not None and rig.pager.account.used_bytes == 0
    assert rig.engine.read_link.moved_bytes == 3 * slot_of(block).size_bytes
    assert rig.engine.write_link.moved_bytes == rig.store.used_bytes == rig.store.capacity_bytes == 0 and rig.unchanged()


def test_a_file_is_read_by_the_page_cache_where_there_is_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct_io(monkeypatch)
    rig = InMainMemory(tmp_path)
    tensor, block = rig.weight(FILE_BYTES - SIZE)
    assert not slot_of(block).file.direct  # type: ignore[union-attr]
    rig.use(block)
    assert data_of(tensor) == rig.content(FILE_BYTES - SIZE)
    rig.close()


@with_hashes
def test_a_file_is_opened_once_and_closed_with_its_last_block(rig: InMainMemory, tmp_path: Path) -> None:
    other = tmp_path / "other name"
    os.link(rig.path, other)
    known = len(os.listdir("/proc/self/fd"))
    first, a = rig.weight()
    second, b = rig.weight(3 * MIB - 9, path=other)
    assert slot_of(a).file is slot_of(b).file and len(os.listdir("/proc/self/fd")) == known + 1
    for tensor in (first, second):
        assert tensor.untyped_storage().nbytes() == SIZE
    del first, tensor
    rig.pager.forget_dead()
    assert data_of(second) == rig.content(3 * MIB - 9) and len(os.listdir("/proc/self/fd")) == known + 1
    rig.use(b)
    del second
    gc.collect()
    rig.pager.forget_dead()
    assert len(os.listdir("/proc/self/fd")) == known and rig.pager.account.used_bytes == 0
    assert rig.machine.memory.allocated_bytes < SIZE


def test_kvikio_opens_a_file_by_its_descriptor_and_by_the_host_where_cufile_cannot(tmp_path: Path) -> None:
    fake = FakeKvikio(compatible_only=False)
    rig = OnStreams(tmp_path, lambda folder: KvikioStore([folder], budget_bytes=None, kvikio=fake))
    fake.refuses = True
    tensor, block = rig.weight()
    descriptor = slot_of(block).extents[0].file_descriptor
    by_descriptor = f"/proc/self/fd/{descriptor}"
    assert fake.opened[-2:] == [(by_descriptor, CompatMode.OFF), (by_descriptor, CompatMode.ON)]
    rig.path.unlink()
    rig.use(block)
    assert data_of(tensor) == rig.content()
    del tensor
    deadline = time.monotonic() + SECONDS
    while not block.dead and time.monotonic() < deadline:  # the thread of the copy lets go of it last
        time.sleep(0.001)
    rig.pager.forget_dead()
    assert len(fake.live) == 1, "that of the spill file"
    rig.close()


# -- changed by user code, by a stage


@pytest.mark.parametrize(
    "writer", ["a stage", "user code", "user code while it is away", "user code in the middle of a copy out"]
)
def test_what_is_written_gets_a_slot_of_its_own_and_the_file_stays(rig: Rig, writer: str) -> None:
    if not rig.reach and writer not in ("a stage", "user code"):
        pytest.skip("user code cannot reach it then")
    tensor, block = rig.weight()
    expected = bytearray(rig.content())

    def write() -> None:
        for index in (0, 5000, SIZE - 1):
            tensor[index] ^= 1
            expected[index] ^= 1

    if writer == "a stage":
        rig.use(block, write)
    else:
        if "away" not in writer:
            rig.use(block)
        if "copy out" in writer:
            rig.user_code()
            rig.pager.offload(block)
        rig.user_code(write)
    rig.leave(block)
    assert slot_of(block).file is None and rig.store.used_bytes == slot_of(block).size_bytes
    if rig.reach and writer != "a stage":
        assert data_of(tensor) == bytes(expected)
        rig.user_code(lambda: tensor[7].fill_(3))
        expected[7] = 3
    rig.use(block)
    assert data_of(tensor) == bytes(expected) and rig.unchanged()
    assert rig.store.user_files._files == {}
    within(SECONDS, rig.pager.closing.bring_back)
    assert data_of(tensor) == bytes(expected)


def test_the_host_tier_takes_what_has_left_its_file(tmp_path: Path) -> None:
    """Its data does not begin with a page there; the host's processor finds it all the same."""
    rig = InMainMemory(tmp_path, host_bytes=8 * MIB)
    tensor, block = rig.weight()
    rig.user_code(lambda: tensor[0].fill_(7))
    assert block.tier == "host"
    addresses = rig.pager.lending.lend_memory([block])
    assert addresses is not None
    found = torch.frombuffer((ctypes.c_char * SIZE).from_address(addresses[0]), dtype=torch.uint8)
    assert found[0] == 7 and data_of(found[1:]) == rig.content()[1:]
    found[1] = 9
    rig.pager.lending.give_back([block])
    rig.use(block)
    assert tensor[:2].tolist() == [7, 9] and data_of(tensor[2:]) == rig.content()[2:]
    rig.close()


def test_no_room_keeps_what_user_code_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = InMainMemory(tmp_path)
    tensor, block = rig.weight()
    rig.pager.leave_region()
    tensor[3] = 5
    monkeypatch.setattr(rig.store, "_budget_bytes", 0)
    with pytest.raises(Exception, match="storage_budget allows 0"):
        rig.pager.enter_region()
    assert tensor[3] == 5 and slot_of(block).file is not None
    monkeypatch.undo()
    rig.pager.enter_region()
    rig.use(block)
    assert tensor[3] == 5
    rig.close()


# -- changed by others


@in_main_memory
@pytest.mark.parametrize(("change", "here"), [("written", True), ("written", False), ("cut", True), ("longer", False)])
def test_a_file_that_changes_is_an_error(rig: Rig, change: str, here: bool) -> None:
    _tensor, block = rig.weight()
    if here:
        rig.use(block)
    if change == "written":
        with rig.path.open("r+b") as file:
            file.write(b"x")
        os.utime(rig.path, ns=(1, 1))  # clocks of file systems tick slowly
    else:
        os.truncate(rig.path, MIB if change == "cut" else 8 * MIB)
    found = {"written": "it was written to", "cut": "1,048,576 bytes now, and had 4,194,381", "longer": "8,388,608 bytes now"}
    rig.pager.leave_region()
    with pytest.raises(StorageIOError, match=f"block 'w' in {rig.path}.*leave a checkpoint as it is") as raised:
        rig.pager.enter_region()
    assert found[change] in str(raised.value) and raised.value.path == str(rig.path)
    with pytest.raises(StorageIOError, match=found[change]):
        rig.weight()


def test_a_file_that_is_cut_before_it_is_read_is_an_error(rig: Rig) -> None:
    _tensor, block = rig.weight(2 * MIB)
    os.truncate(rig.path, MIB)
    with pytest.raises(StorageIOError, match=r"it has 1,048,576 bytes now, and had 4,194,381.*leave a checkpoint as it is"):
        rig.use(block)
    assert block.state is State.OFFLOADED and rig.pager.account.used_bytes == 0


@with_hashes
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_gone_stays_usable(rig: Rig, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    tensor, block = rig.weight()
    after = random.Random(1).randbytes(3 * MIB)
    if how == "removed":
        rig.path.unlink()
    else:
        (tmp_path / "new").write_bytes(after)
        (tmp_path / "new").replace(rig.path)
    rig.user_code()
    rig.user_code()
    assert caplog.text.count(f"{rig.path} was removed or replaced while weights are read from it") == 1
    rig.use(block)
    assert data_of(tensor) == rig.content()
    if how == "replaced":
        other, _ = rig.weight()
        assert data_of(other) == after[PLACE : PLACE + SIZE], "its name leads to the new file"


@with_hashes
def test_what_cannot_be(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageIOError, match="cannot open the file of block 'w' in .*gone: .*No such file"):
        rig.weight(path=tmp_path / "gone")
    with pytest.raises(StorageIOError, match="Is a directory"):
        rig.weight(path=tmp_path)
    with pytest.raises(StorageIOError, match="cannot read bytes 4,194,300 to 5,242,884 .the file has 4,194,381. of block 'w'"):
        rig.weight(4 * MIB - 4)
    with pytest.raises(UnsupportedError, match="less than 1,048,576 do not move: read it instead"):
        rig.weight(0, MIB - 1)
    monkeypatch.setattr("runtime.cpu.mover.system_tells", lambda: False)
    with pytest.raises(UnsupportedError, match="does not tell whether your code writes to it"):
        rig.weight()
    assert rig.store.user_files._files == {} and not rig.pager.blocks


def test_without_a_storage_tier_it_cannot_be() -> None:
    machine = CpuMachine(host_bytes=4 * MIB)
    with pytest.raises(UnsupportedError, match="there is no storage tier.*give the option storage"):
        machine.pager.block_in_file("w", path=Path("weights"), offset_bytes=0, size_bytes=SIZE)
    machine.close()


@pytest.mark.parametrize("checks", ["checksums", "debug"])
def test_the_checks_compare_with_the_first_read(tmp_path: Path, checks: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = InMainMemory(tmp_path, **{checks: True})
    _tensor, block = rig.weight()
    assert f"weights that stay in {rig.path} and other files are checked against their first read" in caplog.text
    for _ in range(2):
        rig.use(block)
        rig.leave(block)
    times = rig.path.stat()
    with rig.path.open("r+b") as file:
        file.seek(5000)
        file.write(bytes([rig.before[5000] ^ 1]))
    os.utime(rig.path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a drive that forgets a bit
    with pytest.raises(ChecksumError, match=f"block 'w' in {rig.path}"):
        rig.use(block)
    rig.close()


# -- the end of a run, see `Closing.leave_behind`


def is_open(path: Path) -> bool:
    """Whether this process has a descriptor of the file, by whatever name."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.stat(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if os.path.samestat(found, path.stat()):
            return True
    return False


@in_main_memory
def test_what_ends_in_its_file_stays_there_and_the_next_run_takes_it_over(rig: InMainMemory) -> None:
    expected = bytearray(rig.content())
    tensor, block = rig.weight()
    dies, _ = rig.weight(2 * MIB + 3, name="dies")
    rig.pager.leave_region()
    assert rig.pager.closing.leave_behind() == 2 * SIZE
    rig.close()
    assert block.span is not None and anonymous_bytes(block.span) == 0 and not list(rig.spill.iterdir())
    assert data_of(tensor) == rig.content() and data_of(dies) == rig.content(2 * MIB + 3)
    del dies
    gc.collect()
    assert is_open(rig.path), "one that lives needs it"
    tensor[5000] ^= 1
    expected[5000] ^= 1

    following = CpuMachine(rig.spill, ownership=rig.machine.ownership)
    assert following.pager.make_movable(tensor) and not is_open(rig.path)
    taken = following.pager.block_of(tensor, name="w", kind="parameter", user_visible=True)
    for _ in range(2):
        assert data_of(tensor) == bytes(expected)
        following.leave(taken)
        assert data_of(tensor) == bytes(expected)
        following.use(taken)
    following.close()
    assert rig.unchanged()


@pytest.mark.parametrize("rig", [name for name in RIGS if name not in IN_MEMORY], indirect=True)
def test_what_ends_in_its_file_and_cannot_be_reached_is_saved_and_taken_over_from_there(rig: OnStreams) -> None:
    tensor, _ = rig.weight()
    before = rig.pager.map_away(tensor)
    assert before is not None and rig.pager.map_away(tensor) is before
    assert rig.pager.closing.leave_behind() == SIZE
    rig.engine.close()
    rig.store.close()
    with pytest.raises(RuntimeError, match="when teraio's run ended, neither the device nor the host tier had room"):
        tensor.sum()
    storage = tensor.untyped_storage()
    after = rig.tiers.ownership.map_left(storage)
    assert after is not None and rig.tiers.ownership.map_left(storage) is after
    following = StreamMover(rig.device, Tiers([], ownership=rig.tiers.ownership))
    assert following.span(storage, adopt=True) is not None
    rig.device.synchronise()
    assert data_of(tensor) == bytes_of(before) == bytes_of(after) == rig.content() and rig.unchanged()
    assert rig.store.user_files._files, "readers need it"
    before = after = None
    assert not rig.store.user_files._files


@with_hashes
def test_a_file_that_was_cut_after_the_end_is_not_taken_over(rig: InMainMemory) -> None:
    tensor, _ = rig.weight()
    rig.pager.closing.leave_behind()
    rig.close()
    os.truncate(rig.path, MIB // 2)
    following = CpuMachine(rig.spill, ownership=rig.machine.ownership)
    with pytest.raises(StorageIOError, match="it has 524,288 bytes now"):
        following.pager.make_movable(tensor)
    following.close()


@with_either_mover
@pytest.mark.parametrize("written", [False, True], ids=["in its file", "in a slot of its own"])
def test_a_reader_has_the_bytes_of_a_block_and_no_others(rig: Rig, written: bool) -> None:
    expected = bytearray(rig.content())
    tensor, block = rig.weight()
    if written:
        rig.user_code(partial(tensor[7].fill_, 3))
        expected[7] = 3
    reader = rig.tiers.map(block)
    assert rig.tiers.map(block) is reader and (slot_of(block).file is None) == written
    del tensor, block
    rig.pager.forget_dead()
    rig.close()
    assert bytes_of(reader) == bytes(expected)
    del reader
    gc.collect()
    assert not is_open(rig.path)


# -- under a budget


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_stages_and_user_code_in_random_order_under_a_budget(tmp_path: Path, debug: bool) -> None:
    """Weights in a file, which user code or stages write to in part, beside blocks that were never in a file."""
    rig = InMainMemory(tmp_path, file_bytes=16 * MIB, budget_bytes=6 * MIB, debug=debug, unchanged=not debug)
    draw = random.Random(1)
    places = [(number * 2 * MIB + draw.randrange(4096), draw.randrange(MIB, 3 * MIB // 2)) for number in range(7)]
    made = [rig.weight(*place, name=f"w{number}") for number, place in enumerate(places)]
    expected = [bytearray(rig.content(*place)) for place in places]
    made += [rig.machine.make(size, 7, f"w{size}") for size in (MIB, MIB + 4096, 2 * MIB)]
    expected += [bytearray([7]) * tensor.nbytes for tensor, _ in made[7:]]
    written: set[int] = set()

    def change(number: int, value: int) -> None:
        made[number][0][value % 4096], expected[number][value % 4096] = value % 256, value % 256
        written.add(number)

    def run() -> None:
        for step in range(150):
            chosen = draw.sample(range(10), draw.randint(1, 2))
            blocks = [made[number][1] for number in chosen]
            rig.pager.acquire(blocks, MIB, "stage", then_fetch=[made[draw.randrange(10)][1]])
            assert all(made[number][0][::997].tolist() == list(expected[number][::997]) for number in chosen)
            changed = [number for number in chosen if number > 4 and draw.random() < 0.2]
            for number in changed:
                change(number, step * 31)
            rig.pager.retire(blocks, [made[number][1] for number in changed])
            rig.pager.offload(made[draw.randrange(10)][1])
            if draw.random() < 0.3:
                rig.pager.leave_region()
                if draw.random() < 0.3:
                    change(draw.randrange(3, 7), step * 17)
                rig.pager.enter_region()

    within(SECONDS, run)
    assert rig.pager.account.peak_bytes <= 6 * MIB and written == set(range(3, 10))
    assert all(slot_of(made[number][1]).file is not None for number in range(3)), "what nobody wrote is in its file"
    within(SECONDS, rig.pager.closing.bring_back)
    assert [data_of(tensor) for tensor, _ in made] == [bytes(each) for each in expected]
    assert rig.unchanged() and rig.engine.read_link.moved_bytes > rig.engine.write_link.moved_bytes > 20 * MIB
    made.clear()
    rig.pager.forget_dead()
    assert rig.pager.account.used_bytes == rig.store.used_bytes == 0
    rig.close()
