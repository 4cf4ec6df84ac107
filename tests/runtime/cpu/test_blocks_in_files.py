"""Blocks whose copy is a range of a file of the user, in main memory: read as they are, never written, given up when changed."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import ChecksumError, StorageIOError, UnsupportedError
from runtime.paging import Block, State

from ..cpu_machine import MIB, SECONDS, CpuMachine, slot_of, within
from ..memory import anonymous_bytes, refuse_direct_io

SIZE = MIB + 8  # not whole pages


@pytest.fixture(params=["plain", "hashes", "checksums", "debug"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CpuMachine]:
    checks = {"plain": {}, "hashes": {"unchanged": True}, "checksums": {"checksums": True}, "debug": {"debug": True}}
    rig = machine(tmp_path, **checks[request.param])
    yield rig
    rig.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[CpuMachine]:
    rig = machine(tmp_path, unchanged=True)
    yield rig
    rig.close()


def machine(folder: Path, *, host_bytes: int = 0, **options: object) -> CpuMachine:
    (folder / "spill").mkdir()
    return CpuMachine(folder / "spill", host_bytes=host_bytes, **options)  # type: ignore[arg-type]


def checkpoint(folder: Path, size_bytes: int = 4 * MIB, name: str = "weights") -> Path:
    path = folder / name
    path.write_bytes(random.Random(size_bytes).randbytes(size_bytes))
    return path


def weight(rig: CpuMachine, path: Path, offset: int = 808, size: int = SIZE, name: str = "w") -> tuple[torch.Tensor, Block]:
    storage = rig.pager.block_in_file(name, "parameter", path=path, offset_bytes=offset, size_bytes=size)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    block = rig.pager.known_block(tensor)
    assert block is not None
    return tensor, block


def content(path: Path, offset: int = 808, size: int = SIZE) -> bytes:
    return path.read_bytes()[offset : offset + size]


def data_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy().tobytes())


def user_code(rig: CpuMachine, *work: object) -> None:
    """Leave the region, run each of `work`, and enter the next one."""
    rig.pager.leave_region()
    for each in work:
        each()  # type: ignore[operator]
    rig.pager.enter_region()


def spilled_bytes(rig: CpuMachine) -> int:
    return rig.store.used_bytes + rig.store.capacity_bytes + rig.engine.write_link.moved_bytes


# -- read, and never written


def test_it_takes_no_memory_and_reads_nothing_until_a_stage_needs_it(rig: CpuMachine, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    before = path.read_bytes()
    tensor, block = weight(rig, path)
    assert block.state is State.OFFLOADED and rig.pager.account.used_bytes == 0 and rig.engine.read_link.moved_bytes == 0
    assert block.span is not None and anonymous_bytes(block.span) == 0
    assert data_of(tensor) == content(path), "user code reads the file"
    for _ in range(3):
        rig.use(block)
        assert block.state is State.ON_DEVICE and data_of(tensor) == content(path)
        user_code(rig, lambda: tensor.sum())
        rig.leave(block)
        assert anonymous_bytes(block.span) == 0
    assert rig.engine.read_link.moved_bytes == 3 * slot_of(block).size_bytes and slot_of(block).file is not None
    assert spilled_bytes(rig) == 0 and path.read_bytes() == before


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_range_of_a_file_comes_as_it_is(plain: CpuMachine, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "weights"
    if not path.exists():
        checkpoint(tmp_path, 3 * MIB + 1234)
    size = data.draw(st.integers(MIB, 2 * MIB))
    offset = data.draw(st.integers(0, 3 * MIB + 1234 - size))
    tensor, block = weight(plain, path, offset, size)
    plain.use(block)
    assert data_of(tensor) == content(path, offset, size)
    plain.leave(block)
    assert data_of(tensor) == content(path, offset, size)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "page cache"])
def test_the_last_page_of_a_file(plain: CpuMachine, tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        refuse_direct_io(monkeypatch)
    path = checkpoint(tmp_path, 2 * MIB + 1)
    tensor, block = weight(plain, path, MIB - 7, MIB + 8)
    assert slot_of(block).file.direct is direct  # type: ignore[union-attr]
    plain.use(block)
    assert data_of(tensor) == content(path, MIB - 7, MIB + 8)


def test_a_file_is_opened_once_and_closed_with_its_last_block(plain: CpuMachine, tmp_path: Path) -> None:
    path, other = checkpoint(tmp_path), tmp_path / "other name"
    os.link(path, other)
    known = len(os.listdir("/proc/self/fd"))
    first, a = weight(plain, path)
    second, b = weight(plain, other, 3 * MIB - 9)
    assert slot_of(a).file is slot_of(b).file and len(os.listdir("/proc/self/fd")) == known + 1
    for tensor in (first, second):
        assert tensor.untyped_storage().nbytes() == SIZE
    del first, tensor
    plain.pager.forget_dead()
    assert data_of(second) == content(path, 3 * MIB - 9) and len(os.listdir("/proc/self/fd")) == known + 1
    plain.use(b)
    del second
    gc.collect()
    plain.pager.forget_dead()
    assert len(os.listdir("/proc/self/fd")) == known and plain.pager.account.used_bytes == 0
    assert plain.memory.allocated_bytes < SIZE


# -- changed by user code, by a stage


@pytest.mark.parametrize("place", ["away", "here", "in the middle of a copy out"])
def test_what_user_code_writes_is_kept_and_the_file_stays(rig: CpuMachine, tmp_path: Path, place: str) -> None:
    path = checkpoint(tmp_path)
    before, expected = path.read_bytes(), bytearray(content(path))
    tensor, block = weight(rig, path)
    if place != "away":
        rig.use(block)
    if place == "in the middle of a copy out":
        user_code(rig)
        rig.pager.offload(block)
    for index in (0, 5000, SIZE - 1):
        expected[index] ^= 1

    def write() -> None:
        for index in (0, 5000, SIZE - 1):
            tensor[index] ^= 1

    user_code(rig, write)
    for _ in range(2):
        rig.pager.offload(block)
        rig.until(block, State.OFFLOADED, State.ON_DEVICE)
    rig.leave(block)
    assert slot_of(block).file is None, "it has a slot of its own"
    assert data_of(tensor) == bytes(expected)
    user_code(rig, lambda: tensor[7].fill_(3))
    expected[7] = 3
    rig.use(block)
    assert data_of(tensor) == bytes(expected)
    assert path.read_bytes() == before
    within(SECONDS, rig.pager.closing.bring_back)
    assert data_of(tensor) == bytes(expected)


def test_what_a_stage_writes_is_kept_and_the_file_stays(rig: CpuMachine, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    before = path.read_bytes()
    tensor, block = weight(rig, path)
    within(SECONDS, lambda: rig.pager.acquire([block], 0, "update"))
    tensor.add_(1)
    rig.pager.retire([block], [block])
    rig.leave(block)
    assert slot_of(block).file is None and rig.store.used_bytes == slot_of(block).size_bytes
    rig.use(block)
    assert data_of(tensor) == bytes((each + 1) % 256 for each in content(path)) and path.read_bytes() == before
    assert rig.store.user_files._files == {}  # type: ignore[union-attr]


def test_the_host_tier_takes_what_has_left_its_file(tmp_path: Path) -> None:
    """Its data does not begin with a page there; the host's processor finds it all the same."""
    rig = machine(tmp_path, host_bytes=8 * MIB)
    path = checkpoint(tmp_path)
    tensor, block = weight(rig, path)
    user_code(rig, lambda: tensor[0].fill_(7))
    assert block.tier == "host"
    addresses = rig.pager.lending.lend_memory([block])
    assert addresses is not None
    found = torch.frombuffer((ctypes.c_char * SIZE).from_address(addresses[0]), dtype=torch.uint8)
    assert found[0] == 7 and data_of(found[1:]) == content(path)[1:]
    found[1] = 9
    rig.pager.lending.give_back([block])
    rig.use(block)
    assert tensor[:2].tolist() == [7, 9] and data_of(tensor[2:]) == content(path)[2:]
    rig.close()


def test_no_room_keeps_what_user_code_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = machine(tmp_path)
    path = checkpoint(tmp_path)
    tensor, block = weight(rig, path)
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


@pytest.mark.parametrize("here", [True, False], ids=["on the device", "away"])
@pytest.mark.parametrize("change", ["written", "cut", "longer"])
def test_a_file_that_changes_is_an_error(rig: CpuMachine, tmp_path: Path, change: str, here: bool) -> None:
    path = checkpoint(tmp_path)
    _tensor, block = weight(rig, path)
    if here:
        rig.use(block)
    if change == "written":
        with path.open("r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(1, 1))  # clocks of file systems tick slowly
    else:
        os.truncate(path, MIB if change == "cut" else 8 * MIB)
    found = {"written": "it was written to", "cut": "1,048,576 bytes now, and had 4,194,304", "longer": "8,388,608 bytes now"}
    rig.pager.leave_region()
    with pytest.raises(StorageIOError, match=f"block 'w' in {path}.*leave a checkpoint as it is") as raised:
        rig.pager.enter_region()
    assert found[change] in str(raised.value) and raised.value.path == str(path)
    with pytest.raises(StorageIOError, match=found[change]):
        weight(rig, path)


def test_a_file_that_is_cut_before_it_is_read_is_an_error(plain: CpuMachine, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    _tensor, block = weight(plain, path)
    os.truncate(path, MIB // 2)
    with pytest.raises(StorageIOError, match="it has 524,288 bytes now, and had 4,194,304"):
        plain.use(block)
    assert block.state is State.OFFLOADED and plain.pager.account.used_bytes == 0


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_gone_stays_usable(plain: CpuMachine, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(tmp_path)
    before = content(path)
    tensor, block = weight(plain, path)
    if how == "removed":
        path.unlink()
    else:
        checkpoint(tmp_path, 3 * MIB, "new").replace(path)
    with caplog.at_level(logging.WARNING, "teraio"):
        user_code(plain)
        user_code(plain)
    assert caplog.text.count(f"{path} was removed or replaced while weights are read from it") == 1
    plain.use(block)
    assert data_of(tensor) == before
    if how == "replaced":
        other, _ = weight(plain, path)
        assert data_of(other) == content(path), "its name leads to the new file"


def test_what_cannot_be(plain: CpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path)
    with pytest.raises(StorageIOError, match="cannot open the file of block 'w' in .*gone: .*No such file"):
        weight(plain, tmp_path / "gone")
    with pytest.raises(StorageIOError, match="Is a directory"):
        weight(plain, tmp_path)
    with pytest.raises(StorageIOError, match="cannot read bytes 4,194,300 to 5,242,884 .the file has 4,194,304. of block 'w'"):
        weight(plain, path, 4 * MIB - 4)
    with pytest.raises(UnsupportedError, match="less than 1,048,576 do not move: read it instead"):
        weight(plain, path, 0, MIB - 1)
    monkeypatch.setattr("runtime.cpu.mover.system_tells", lambda: False)
    with pytest.raises(UnsupportedError, match="does not tell whether your code writes to it"):
        weight(plain, path)
    assert plain.store.user_files._files == {} and not plain.pager.blocks  # type: ignore[union-attr]


def test_without_a_storage_tier_it_cannot_be(tmp_path: Path) -> None:
    rig = CpuMachine(host_bytes=4 * MIB)
    with pytest.raises(UnsupportedError, match="there is no storage tier.*give the option storage"):
        weight(rig, checkpoint(tmp_path))
    rig.close()


@pytest.mark.parametrize("checks", ["checksums", "debug"])
def test_the_checks_compare_with_the_first_read(tmp_path: Path, checks: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "teraio"):
        rig = machine(tmp_path, **{checks: True})
        path = checkpoint(tmp_path)
        _tensor, block = weight(rig, path)
    assert f"weights that stay in {path} and other files are checked against their first read" in caplog.text
    rig.use(block)
    rig.leave(block)
    rig.use(block)
    rig.leave(block)
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(bytes([content(path, 5000, 1)[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a drive that forgets a bit
    with pytest.raises(ChecksumError, match=f"block 'w' in {path}"):
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


def test_what_ends_in_its_file_stays_there_and_the_next_run_takes_it_over(rig: CpuMachine, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    before, expected = path.read_bytes(), bytearray(content(path))
    tensor, block = weight(rig, path)
    dies, _ = weight(rig, path, 2 * MIB + 3, name="dies")
    rig.pager.leave_region()
    assert rig.pager.closing.leave_behind() == 2 * SIZE
    rig.close()
    assert block.span is not None and anonymous_bytes(block.span) == 0 and not list((tmp_path / "spill").iterdir())
    assert data_of(tensor) == content(path) and data_of(dies) == content(path, 2 * MIB + 3)
    del dies
    gc.collect()
    assert is_open(path), "one that lives needs it"
    tensor[5000] ^= 1
    expected[5000] ^= 1

    following = CpuMachine(tmp_path / "spill", ownership=rig.ownership)
    assert following.pager.make_movable(tensor) and not is_open(path)
    taken = following.pager.block_of(tensor, name="w", kind="parameter", user_visible=True)
    for _ in range(2):
        assert data_of(tensor) == bytes(expected)
        following.leave(taken)
        assert data_of(tensor) == bytes(expected)
        following.use(taken)
    following.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("here", [True, False], ids=["on the device", "away"])
def test_a_file_is_closed_though_a_spilled_block_is_left(rig: CpuMachine, tmp_path: Path, here: bool) -> None:
    """At once if its bytes are on the device; otherwise with its tensor."""
    path = checkpoint(tmp_path)
    tensor, block = weight(rig, path)
    other, gone = rig.make(MIB, 7)
    rig.leave(gone)
    if here:
        rig.use(block)
    assert rig.pager.closing.leave_behind() == MIB + (0 if here else SIZE)
    rig.close()
    assert data_of(tensor) == content(path) and is_open(path) != here
    del tensor, block
    gc.collect()
    assert not is_open(path)
    assert set(other.tolist()) == {7} and path.stat().st_blocks * 512 >= 4 * MIB, "no hole is made in a file of the user"


def test_a_file_that_was_cut_after_the_end_is_not_taken_over(plain: CpuMachine, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    tensor, _ = weight(plain, path)
    plain.pager.closing.leave_behind()
    plain.close()
    os.truncate(path, MIB // 2)
    following = CpuMachine(tmp_path / "spill", ownership=plain.ownership)
    with pytest.raises(StorageIOError, match="it has 524,288 bytes now"):
        following.pager.make_movable(tensor)
    following.close()


@pytest.mark.parametrize("written", [False, True], ids=["in its file", "in a slot of its own"])
def test_a_reader_has_the_bytes_of_a_block_and_no_others(rig: CpuMachine, tmp_path: Path, written: bool) -> None:
    path = checkpoint(tmp_path)
    expected = bytearray(content(path))
    tensor, block = weight(rig, path)
    if written:
        user_code(rig, partial(tensor[7].fill_, 3))
        expected[7] = 3
    reader = rig.tiers.map(block)
    assert rig.tiers.map(block) is reader and (slot_of(block).file is None) == written
    del tensor, block
    rig.pager.forget_dead()
    rig.close()
    assert bytes(torch.empty(0, dtype=torch.uint8).set_(reader).numpy().tobytes()) == bytes(expected)
    del reader
    gc.collect()
    assert not is_open(path)


# -- under a budget


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_stages_and_user_code_in_random_order_under_a_budget(tmp_path: Path, debug: bool) -> None:
    rig = machine(tmp_path, budget_bytes=6 * MIB, debug=debug, unchanged=True)
    path = checkpoint(tmp_path, 16 * MIB)
    before = path.read_bytes()
    draw = random.Random(1)
    places = [(number * 2 * MIB + draw.randrange(4096), draw.randrange(MIB, 3 * MIB // 2)) for number in range(7)]
    made = [weight(rig, path, *place, name=f"w{number}") for number, place in enumerate(places)]
    expected = [bytearray(before[offset : offset + size]) for offset, size in places]
    written: set[int] = set()

    def change(number: int, value: int) -> None:
        made[number][0][value % 4096], expected[number][value % 4096] = value % 256, value % 256
        written.add(number)

    def run() -> None:
        for step in range(150):
            chosen = draw.sample(range(7), draw.randint(1, 2))
            blocks = [made[number][1] for number in chosen]
            rig.pager.acquire(blocks, MIB, "stage", then_fetch=[made[draw.randrange(7)][1]])
            assert all(made[number][0][::997].tolist() == list(expected[number][::997]) for number in chosen)
            changed = [number for number in chosen if number > 4 and draw.random() < 0.2]
            for number in changed:
                change(number, step * 31)
            rig.pager.retire(blocks, [made[number][1] for number in changed])
            rig.pager.offload(made[draw.randrange(7)][1])
            if draw.random() < 0.3:
                rig.pager.leave_region()
                if draw.random() < 0.3:
                    change(draw.randrange(3, 7), step * 17)
                rig.pager.enter_region()

    within(SECONDS, run)
    assert rig.pager.account.peak_bytes <= 6 * MIB and written == {3, 4, 5, 6}
    assert all(slot_of(made[number][1]).file is not None for number in range(3)), "what nobody wrote is in its file"
    within(SECONDS, rig.pager.closing.bring_back)
    assert [data_of(tensor) for tensor, _ in made] == [bytes(each) for each in expected]
    assert path.read_bytes() == before
    rig.close()
