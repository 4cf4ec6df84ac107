"""Stores in files: where the files are and how they are opened; the errors when a drive is full, broken or missing."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.storage import PosixStore

from ..memory import COPIES, Memory, break_io, read_slot, refuse_direct_io, write_slot
from ..processes import Forking, Process

MIB = 1 << 20
Call = Callable[..., int]


@pytest.mark.parametrize("way", ["direct", "refused", "buffered"])
def test_files_are_private_reserved_and_opened_as_told(folders: list[Path], monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Direct I/O is taken if the file system has it and nobody has said no."""
    if way == "refused":
        refuse_direct_io(monkeypatch)
    store = PosixStore(folders, budget_bytes=None, direct=way != "buffered")
    store.ensure_capacity(10 * MIB + 1)
    assert store.capacity_bytes == 10 * MIB + 4096
    slot = store.allocate(MIB, "weights")
    assert sum(os.fstat(extent.file_descriptor).st_blocks for extent in slot.extents) * 512 >= store.capacity_bytes
    for extent, folder in zip(slot.extents, folders, strict=True):
        file = os.fstat(extent.file_descriptor)
        assert extent.path.parent == folder and not list(folder.iterdir())
        assert stat.S_IMODE(file.st_mode) == 0o600 and extent.drive == file.st_dev
        assert bool(fcntl.fcntl(extent.file_descriptor, fcntl.F_GETFL) & os.O_DIRECT) == (way == "direct") == store.direct
    store.close()


@pytest.mark.parametrize("call", ["write", "read"])
def test_an_io_error_names_file_block_and_errno(store: PosixStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    slot, memory = store.allocate(MIB, "layers.3.weight"), Memory(MIB)
    break_io(monkeypatch, "pwritev" if call == "write" else "preadv")
    with pytest.raises(StorageIOError) as raised:
        COPIES[call](store, slot, memory.address)
    assert raised.value.path == str(slot.extents[0].path)
    assert raised.value.block == "layers.3.weight"
    assert raised.value.errno == errno.EIO
    for part in (f"cannot {call} block 'layers.3.weight'", raised.value.path, "[errno 5]"):
        assert part in str(raised.value)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_short_transfers_are_continued(store: PosixStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real: Call = getattr(os, call)
    lengths: list[int] = []

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        lengths.append(min(len(buffers[0]), 3 * 4096))
        return real(descriptor, [buffers[0][: lengths[-1]]], offset)

    monkeypatch.setattr(os, call, short)
    slot = store.allocate(MIB, "weights")
    memory, read = Memory(MIB, random=True), Memory(MIB)
    write_slot(store, slot, memory.address)
    read_slot(store, slot, read.address)
    assert read.content == memory.content
    assert len(lengths) > MIB // (3 * 4096)


def test_too_little_free_space_is_found_before_anything_is_reserved(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.fstatvfs

    def nearly_full(descriptor: int) -> os.statvfs_result:
        fields = list(real(descriptor))
        fields[4] = 5 * MIB // fields[1]  # f_bavail, in f_frsize
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", nearly_full)
    assert store.limit_bytes == 5 * MIB
    with pytest.raises(StorageFullError) as raised:
        store.ensure_capacity(6 * MIB)
    for part in ("6,291,456 more bytes", str(tmp_path), "5,242,880 bytes free", "raise memory_budget"):
        assert part in str(raised.value)
    assert store.capacity_bytes == 0
    store.allocate(5 * MIB, "what just fits")  # less than the usual growth of a file
    assert store.capacity_bytes == 5 * MIB


def test_directories_on_one_drive_share_its_free_space(tmp_path: Path, store: PosixStore) -> None:
    free = os.statvfs(tmp_path)
    with pytest.raises(StorageFullError):
        store.ensure_capacity(free.f_bavail * free.f_frsize + 64 * MIB)  # each half would fit
    assert store.capacity_bytes == 0


def test_a_file_that_is_cut_short(store: PosixStore) -> None:
    slot, memory = store.allocate(2 * MIB, "weights"), Memory(2 * MIB)
    os.truncate(f"/proc/self/fd/{slot.extents[0].file_descriptor}", MIB // 2)
    with pytest.raises(StorageIOError, match="beyond the end of the file"):
        read_slot(store, slot, memory.address)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_drive_that_fills_up_while_room_is_reserved(store: PosixStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        real(descriptor, offset, length // 2)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError, match="more bytes are needed in"):
        store.allocate(MIB, "weights")
    assert store.capacity_bytes == store.used_bytes == 0
    assert store.limit_bytes > 0


def test_a_limit_on_file_size_is_named(store: PosixStore) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(StorageIOError, match="reserve room for block 'weights'") as raised:
            store.allocate(2 * MIB, "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert store.capacity_bytes == 0
    store.allocate(2 * MIB, "weights")


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused: list[tuple[list[Path | str], str]] = [
        ([tmp_path / "absent"], "does not exist; create it"),
        ([tmp_path / "file"], "is not a directory"),
        ([tmp_path, f"{tmp_path}/."], "one or several different directories"),
        ([], "one or several different directories"),
        (["/proc"], "cannot create a spill file"),
        ([tmp_path, tmp_path / "absent"], "does not exist"),
    ]
    for directories, why in refused:
        with pytest.raises(StorageError, match=why):
            PosixStore(directories, budget_bytes=None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]  # the file in the good one was removed


# -- a forked child of a process with a store keeps nothing of it, and takes nothing away

WITH_A_STORE = """
import os, signal, sys, time
from runtime.storage import PosixStore
store = PosixStore([sys.argv[1]], budget_bytes=None)
store.allocate(1 << 20, "weights")
"""


@pytest.fixture
def start(forking: Forking, tmp_path: Path) -> Callable[[str], Process]:
    """Start a process with a store under `tmp_path`, which then runs `code`. Wait for its first line."""

    def begin(code: str) -> Process:
        process = forking.start(WITH_A_STORE + code, tmp_path)
        assert process.stdout.readline() == "ready\n", process.errors.read_text()
        return process

    return begin


def test_a_forked_child_keeps_the_parents_files(start: Callable[[str], Process], tmp_path: Path) -> None:
    process = start("""
def leave(way):
    if way == "close":
        store.close()
    if way == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(0)
for way in ("exit", "close", "signal"):
    child = os.fork()
    if child == 0:
        leave(way)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGTERM if way == "signal" else 0), (way, status)
    slot = store.allocate(1 << 20, "more")
    store.release(slot)
print("ready", flush=True)
time.sleep(60)
""")
    assert not list(tmp_path.iterdir())
    process.signal(signal.SIGINT)
    process.wait()


def test_a_forked_child_that_outlives_its_parent_keeps_no_file(start: Callable[[str], Process], tmp_path: Path) -> None:
    process = start("""
if not os.fork():
    print("ready", os.getpid(), sep="\\n", flush=True)
time.sleep(600)
""")
    child = int(process.stdout.readline())
    try:
        process.signal(signal.SIGKILL)
        process.wait()
        held = [os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir()]
        assert not [path for path in held if path.startswith(str(tmp_path))]
    finally:
        os.kill(child, signal.SIGKILL)
