"""Pages really leave, are used for other blocks, and come back at the same address with the right content, in any order."""

from __future__ import annotations

import gc
import mmap
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

from examples.memory import resident_bytes
from planner.errors import StorageError
from runtime.cpu import CpuMemory
from runtime.device import Span
from runtime.storage import PosixStore, Slot

from ...thoroughness import by_profile
from ..memory import anonymous_bytes, read_slot, write_slot
from ..processes import Forking

MIB = 1 << 20
SLACK = 3 * MIB
"""Allowed difference in bytes: the system's counters are not exact, and the test itself takes memory."""
KEEP = pytest.mark.parametrize("keep_pages", [True, False])


def movable(memory: CpuMemory, tensor: torch.Tensor) -> Span:
    span = memory.span(tensor.untyped_storage())
    assert span is not None
    return span


def leave(memory: CpuMemory, store: PosixStore, span: Span, *, keep_pages: bool = True) -> Slot:
    slot = store.allocate(span.length_bytes, "w")
    write_slot(store, slot, span.address)
    memory.map_files(span, slot.extents, keep_pages=keep_pages)
    return slot


def come_back(memory: CpuMemory, store: PosixStore, span: Span, slot: Slot) -> None:
    area = memory.take_pages(span.length_bytes)
    read_slot(store, slot, area.address)
    memory.install_pages(area, span)


def only_value(tensor: torch.Tensor) -> int:
    """Return the value that all elements have."""
    least, greatest = tensor.min(), tensor.max()
    assert least == greatest
    return int(least)


# -- leaving and coming back


@KEEP
def test_pages_leave_and_come_back(memory: CpuMemory, store: PosixStore, keep_pages: bool) -> None:
    tensor = torch.arange(64 * MIB // 4, dtype=torch.float32)
    expected, address = tensor.clone(), tensor.data_ptr()
    span = movable(memory, tensor)
    before = resident_bytes()["RssAnon"]
    slot = leave(memory, store, span, keep_pages=keep_pages)
    memory.trim(0)
    assert anonymous_bytes(span) == 0
    assert abs(before - resident_bytes()["RssAnon"] - 64 * MIB) < SLACK
    assert torch.equal(tensor, expected), "the mapped slot must show the content of the block"
    come_back(memory, store, span, slot)
    assert anonymous_bytes(span) == span.length_bytes
    assert torch.equal(tensor, expected) and tensor.data_ptr() == address
    store.release(slot)
    assert torch.equal(tensor, expected), "a block that is back does not depend on its slot"


@dataclass
class Gone:
    """A range of a file that cannot be mapped."""

    file_descriptor: int = -1
    offset_bytes: int = 0
    length_bytes: int = 2 * MIB


@KEEP
@pytest.mark.parametrize("good_pieces", [0, 1])
def test_a_file_that_can_not_be_mapped(memory: CpuMemory, tmp_path: Path, keep_pages: bool, good_pieces: int) -> None:
    store = PosixStore([tmp_path], budget_bytes=None)
    tensor = torch.full((4 * MIB,), 5, dtype=torch.uint8)
    span = movable(memory, tensor)
    slot = store.allocate(2 * MIB, "first half")
    write_slot(store, slot, span.address)
    with pytest.raises(StorageError, match=rf"mmap of {4 * MIB} bytes failed: Bad file descriptor"):
        memory.map_files(span, [*[*slot.extents] * good_pieces, *[Gone()] * (2 - good_pieces)], keep_pages=keep_pages)
    assert only_value(tensor) == 5
    del tensor
    fresh = torch.full((4 * MIB,), 6, dtype=torch.uint8)
    write_slot(store, slot, movable(memory, torch.full((2 * MIB,), 7, dtype=torch.uint8)).address)
    assert only_value(fresh) == 6, "no page of a file may be used for another block"
    store.close()


def test_pages_that_the_system_does_not_have(memory: CpuMemory) -> None:
    with pytest.raises(StorageError, match=r"mmap of \d+ bytes failed: .*vm.max_map_count"):
        memory.take_pages(1 << 60)
    with pytest.raises(RuntimeError, match="not enough memory|can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)


# -- what can move


def test_large_tensors_are_movable_and_views_move_with_their_storage(memory: CpuMemory) -> None:
    for size in (MIB, MIB + 1, 3 * MIB + 4095):
        tensor = torch.empty(size, dtype=torch.uint8)
        span = movable(memory, tensor)
        assert span.address == tensor.data_ptr() and span.address % mmap.PAGESIZE == 0
        assert span.length_bytes == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        assert movable(memory, torch.nn.Parameter(torch.empty(size))).length_bytes >= 4 * size
    for small in (torch.empty(MIB - 1, dtype=torch.uint8), torch.empty(0)):
        assert memory.span(small.untyped_storage()) is None
    base = torch.empty(4, MIB, dtype=torch.uint8)
    assert movable(memory, base[2]) == movable(memory, base)


def test_tensors_of_before_are_adopted_and_their_aliases_follow(memory: CpuMemory) -> None:
    memory.stand_back()
    parameter = torch.nn.Parameter(torch.ones(2, MIB))
    alias, row = parameter.detach(), parameter.data[1]
    identity, storage = id(parameter), parameter.untyped_storage()
    memory.take_over()
    assert memory.span(storage) is None
    memory.adopt(storage)
    assert movable(memory, parameter).length_bytes == 8 * MIB
    assert id(parameter) == identity and parameter.requires_grad and only_value(parameter) == 1
    alias[1].fill_(3)
    assert only_value(row) == 3 and only_value(parameter[0]) == 1
    address = parameter.data_ptr()
    memory.adopt(storage)
    assert parameter.data_ptr() == address, "a second call must not move it again"


def foreign_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors over memory whose owner may outlive them, or whose address others know."""
    path = folder / "file"
    path.write_bytes(bytes(4 * MIB))
    seen_by_numpy = torch.ones(4 * MIB, dtype=torch.uint8)
    seen_by_numpy.numpy()
    return {
        "from numpy": torch.from_numpy(numpy.ones(4 * MIB, dtype=numpy.uint8)),
        "to numpy": seen_by_numpy,
        "bytearray": torch.frombuffer(bytearray(4 * MIB), dtype=torch.uint8),
        "dlpack": torch.from_dlpack(numpy.ones(4 * MIB, dtype=numpy.uint8)),
        "file": torch.from_file(str(path), shared=True, size=4 * MIB, dtype=torch.uint8),
        "shared memory": torch.ones(4 * MIB, dtype=torch.uint8).share_memory_(),
    }


@pytest.mark.parametrize("owner", ["from numpy", "to numpy", "bytearray", "dlpack", "file", "shared memory"])
def test_memory_of_others_stays_where_it_is(memory: CpuMemory, tmp_path: Path, owner: str) -> None:
    memory.stand_back()
    tensor = foreign_tensors(tmp_path)[owner]
    memory.take_over()
    address = tensor.data_ptr()
    memory.adopt(tensor.untyped_storage())
    assert tensor.data_ptr() == address and memory.span(tensor.untyped_storage()) is None


@pytest.mark.parametrize("through", ["numpy", "dlpack"])
def test_memory_that_is_lent_back_has_one_owner(memory: CpuMemory, through: str) -> None:
    """Two storages over the same pages would have a slot each, and a write to one slot would be missing in the other."""
    owner = torch.ones(4 * MIB, dtype=torch.uint8)
    interleaved = torch.from_numpy(owner.numpy()) if through == "numpy" else torch.from_dlpack(owner)
    assert interleaved.data_ptr() == owner.data_ptr()
    assert memory.span(interleaved.untyped_storage()) is None
    assert movable(memory, owner).address == owner.data_ptr()


def test_the_same_address_is_not_the_same_memory(memory: CpuMemory) -> None:
    storage = torch.ones(4 * MIB, dtype=torch.uint8).untyped_storage()
    before = memory.span(storage)
    storage.resize_(0)
    storage.resize_(4 * MIB)
    after = memory.span(storage)
    assert before is not None and after is not None and before.serial != after.serial


# -- pages serve again


def test_freed_pages_serve_the_next_tensors(memory: CpuMemory) -> None:
    """Sizes may differ: a range is split, or the pages of several ranges are put together."""
    parts = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(8)]
    parts.append(torch.ones(32 * MIB, dtype=torch.uint8))
    before = resident_bytes()["RssAnon"]
    for sizes in ([45 * MIB], [3 * MIB] * 15, [31 * MIB, 2 * MIB, MIB, 11 * MIB + 5], [7 * MIB] * 6):
        parts.clear()
        assert memory.kept_bytes == 48 * MIB
        parts += [torch.full((size,), 1, dtype=torch.uint8) for size in sizes]
        assert abs(resident_bytes()["RssAnon"] - before) < SLACK
        assert memory.kept_bytes <= 48 * MIB - sum(sizes)
        assert all(only_value(part) == 1 for part in parts)


def test_spare_pages_go_back_to_the_system(memory: CpuMemory) -> None:
    tensors = [torch.ones(size * MIB, dtype=torch.uint8) for size in (1, 2, 4, 8, 16)]
    tensors.clear()
    kept = memory.kept_bytes
    assert kept == 31 * MIB
    before = resident_bytes()["RssAnon"]
    memory.trim(5 * MIB)
    assert 4 * MIB < memory.kept_bytes <= 5 * MIB
    assert abs(before - resident_bytes()["RssAnon"] - 26 * MIB) < SLACK
    memory.trim(-1)
    assert memory.kept_bytes == 0
    memory.drop_pages(memory.take_pages(64 * MIB))
    assert memory.kept_bytes == 64 * MIB, "pages that did not arrive are kept, too"


def test_allocated_bytes_and_their_peak_are_counted_and_the_profiler_sees_them(memory: CpuMemory) -> None:
    before = memory.allocated_bytes
    memory.reset_peak()
    tensor = torch.empty(3 * MIB, dtype=torch.uint8)
    small = torch.empty(1000, dtype=torch.uint8)
    assert 0 <= memory.allocated_bytes - before - 3 * MIB - 1000 < 200
    del tensor, small
    assert memory.allocated_bytes == before
    assert 0 <= memory.peak_bytes - before - 3 * MIB - 1000 < 200
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(5 * MIB, dtype=torch.uint8)
    allocated = {event.name: event.cpu_memory_usage for event in profile.events()}
    assert allocated["aten::empty"] >= 5 * MIB


def test_standing_back(memory: CpuMemory) -> None:
    other = CpuMemory()
    tensor = torch.full((4 * MIB,), 7, dtype=torch.uint8)
    memory.stand_back()
    assert movable(memory, torch.empty(4 * MIB, dtype=torch.uint8)), "another object still needs the pool"
    other.stand_back()
    assert memory.span(torch.empty(4 * MIB, dtype=torch.uint8).untyped_storage()) is None
    assert memory.kept_bytes == 0 and only_value(tensor) == 7
    span = movable(memory, tensor)
    del tensor
    assert memory.kept_bytes == 0 and anonymous_bytes(span) == 0


def mappings() -> int:
    return len(Path("/proc/self/maps").read_bytes().splitlines())


def test_the_count_stays_right_after_standing_back(memory: CpuMemory) -> None:
    """A convolution allocates raw memory. The allocator that PyTorch has at that moment frees it."""
    layer, images = torch.nn.Conv2d(3, 8, 3), torch.rand(4, 3, 64, 64)
    layer(images)  # the first call allocates memory that libraries keep
    memory.stand_back()
    before = memory.allocated_bytes
    for _ in range(3):
        layer(images)
    assert memory.allocated_bytes == before


def test_mappings_do_not_become_more_with_every_iteration(memory: CpuMemory) -> None:
    """The same odd sizes in the same order, again and again: each time a range is split at a new place."""
    draw = random.Random(0)
    sizes = [draw.randint(1000 * 1024, 3 * MIB) for _ in range(24)]
    lives = [draw.randint(1, 6) for _ in sizes]
    begin = mappings()
    for _ in range(200):
        alive: dict[int, torch.Tensor] = {}
        for number, size in enumerate(sizes):
            alive[number] = torch.empty(size, dtype=torch.uint8)
            alive[number][:: mmap.PAGESIZE] = 1
            for other in [n for n in alive if n + lives[n] <= number]:
                del alive[other]
    assert mappings() - begin < 100


NEAR_THE_LIMIT = """
import ctypes, mmap, os, sys, torch
from dataclasses import dataclass
from planner.errors import StorageError
from runtime.cpu import CpuMemory
MIB, LIMIT = 1 << 20, int(open("/proc/sys/vm/max_map_count").read())
memory = CpuMemory()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
base = libc.mmap(None, (LIMIT + 100) * mmap.PAGESIZE, 0, 0x4022, -1, 0)

@dataclass
class FileRange:
    file_descriptor: int
    offset_bytes: int
    length_bytes: int

def protect(number, protection):
    "Every second page of a large mapping can get another protection, which makes two mappings more."
    return libc.mprotect(base + (2 * number + 1) * mmap.PAGESIZE, mmap.PAGESIZE, protection) == 0

protected = 0
def leave_room_for(count):
    global protected
    while protect(protected, 1):
        protected += 1
    release(count // 2)

def release(pages):
    global protected
    for _ in range(pages):
        protected -= 1
        protect(protected, 0)

def make_room():
    release(200)

file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 8 * MIB)
failed = 0
for room in range(0, 48, 3):
    memory.trim(0)
    if room % 2:  # a block in one mapping, or in four
        parts = [torch.ones(MIB, dtype=torch.uint8) for _ in range(4)]
        parts.clear()
    tensor = torch.full((4 * MIB,), 9, dtype=torch.uint8)
    span = memory.span(tensor.untyped_storage())
    ranges = [FileRange(file, i * MIB, MIB // 2) for i in range(8)]
    for each in ranges:
        os.pwrite(file, bytes([9]) * (MIB // 2), each.offset_bytes)
    leave_room_for(room // 2)
    try:
        memory.map_files(span, ranges, keep_pages=True)
    except StorageError:
        failed += 1
        make_room()
        assert int((tensor != 9).sum()) == 0, f"lost with room for {room // 2} mappings"
        continue
    make_room()
    leave_room_for(room // 2)
    try:
        area = memory.take_pages(4 * MIB)
        ctypes.memset(area.address, 9, 4 * MIB)
        memory.install_pages(area, span)
    except StorageError:
        failed += 1
    make_room()
    assert int((tensor != 9).sum()) == 0, f"lost with room for {room // 2} mappings"
    tensor.fill_(9)
print(failed > 0)
"""


def test_nothing_is_lost_where_the_system_has_no_mapping_left(forking: Forking, tmp_path: Path) -> None:
    assert forking.run(NEAR_THE_LIMIT, tmp_path / "file") == (0, "True\n", "")


# -- in any order


class Shuffle:
    """Makes, evicts, brings back, rewrites and frees tensors at random. Knows the value of each tensor."""

    def __init__(self, memory: CpuMemory, store: PosixStore, seed: int) -> None:
        self.memory, self.store, self.draw = memory, store, random.Random(seed)
        self.tensors: dict[int, tuple[torch.Tensor, int]] = {}
        self.slots: dict[int, Slot] = {}
        self.count = 0

    def step(self) -> None:
        number = self.draw.choice([*self.tensors, -1, -1])
        if number < 0:
            size = self.draw.randint(MIB // 2, 4 * MIB)
            self.count += 1
            self.tensors[self.count] = torch.full((size,), self.count % 251, dtype=torch.uint8), self.count % 251
            return
        tensor, value = self.tensors[number]
        assert bool((tensor == value).all())
        span = self.memory.span(tensor.untyped_storage())
        action = self.draw.choice(["free", "move", "move", "write"])
        if action == "free" or span is None:
            del self.tensors[number]
            del tensor
            if number in self.slots:
                self.store.release(self.slots.pop(number))
        elif action == "write":
            self.tensors[number] = tensor.fill_(value + 1), (value + 1) % 256
        elif number in self.slots:
            slot = self.slots.pop(number)
            come_back(self.memory, self.store, span, slot)
            self.store.release(slot)
        else:
            self.slots[number] = leave(self.memory, self.store, span, keep_pages=self.draw.random() < 0.7)
        if self.draw.random() < 0.1:
            self.memory.trim(self.draw.randint(0, 8 * MIB))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for tensor, value in self.tensors.values():
            assert bool((tensor == value).all())
        self.tensors.clear()


def test_any_order(memory: CpuMemory, store: PosixStore) -> None:
    gc.collect()  # what other tests have left would be freed meanwhile
    before = memory.allocated_bytes
    Shuffle(memory, store, 0).run(by_profile(ci=200, long=2000))
    assert memory.allocated_bytes == before
    kept, resident = memory.kept_bytes, resident_bytes()["RssAnon"]
    memory.trim(0)
    assert abs(resident - resident_bytes()["RssAnon"] - kept) < SLACK, "only the kept pages are left"


def test_any_order_in_several_threads(memory: CpuMemory, store: PosixStore) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: Shuffle(memory, store, seed).run(80), range(4)))


def test_a_forked_process_can_allocate_whatever_other_threads_do(forking: Forking) -> None:
    """A child inherits the pool's lock in its state at the time of the fork."""
    code = """
import os, threading, torch
from runtime.cpu import CpuMemory
memory = CpuMemory()
ended = threading.Event()
def churn():
    while not ended.is_set():
        torch.empty(1 << 20)
threads = [threading.Thread(target=churn) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(4):
    child = os.fork()
    if child == 0:
        os._exit(int(torch.empty(1 << 20).fill_(0).sum()))
    assert os.waitpid(child, 0)[1] == 0
ended.set()
print("done")
"""
    assert forking.run(code) == (0, "done\n", "")


def test_no_compiler(forking: Forking, tmp_path: Path) -> None:
    code = """
from planner.errors import UnsupportedError
from runtime.cpu import CpuMemory
try:
    CpuMemory()
except UnsupportedError as error:
    print(error)
"""
    _, printed, errors = forking.run(code, CXX=str(tmp_path / "missing"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert "install g++, or name a compiler in the environment variable CXX" in printed, errors
