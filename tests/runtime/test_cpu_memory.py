"""Pages really leave and come back at the same address; what is not glibc's own mapping stays where it is."""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from planner.errors import StorageError
from runtime.cpu_memory import PAGE_BYTES, CpuMemory, Span
from runtime.storage.posix import PosixStore
from runtime.storage.store import Slot

MIB = 1 << 20


@pytest.fixture
def memory() -> CpuMemory:
    return CpuMemory()


@pytest.fixture(params=[1, 2])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PosixStore]:
    parents = [tmp_path / str(number) for number in range(request.param)]
    for parent in parents:
        parent.mkdir()
    store = PosixStore(parents, budget_bytes=None)
    yield store
    store.close()


def status_bytes(field: str) -> int:
    """RssAnon and the like of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def resident(span: Span) -> int:
    """Anonymous resident bytes of the mappings that lie in a span."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(bounds[1], 16), int(bounds[2], 16)
            inside = span.address <= begin and end <= span.address + span.length_bytes
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) << 10
    return total


def movable(memory: CpuMemory, tensor: torch.Tensor) -> Span:
    span = memory.span(tensor.untyped_storage())
    assert span is not None
    return span


def leave(memory: CpuMemory, store: PosixStore, span: Span) -> Slot:
    slot = store.allocate(span.length_bytes, "w")
    store.write(slot, span.address)
    memory.map_files(span, slot.extents)
    return slot


def come_back(memory: CpuMemory, store: PosixStore, span: Span, slot: Slot) -> None:
    area = memory.new_pages(span.length_bytes)
    store.read(slot, area.address)
    memory.move_pages(area, span)


def test_pages_leave_and_come_back(memory: CpuMemory, store: PosixStore) -> None:
    tensor = torch.arange(64 * MIB // 4, dtype=torch.float32)
    expected, address = tensor.clone(), tensor.data_ptr()
    span = movable(memory, tensor)
    before = status_bytes("RssAnon")
    slot = leave(memory, store, span)
    assert resident(span) == 0
    assert before - status_bytes("RssAnon") > 56 * MIB  # that counter is not exact
    assert torch.equal(tensor, expected), "what stands in for the block must show its content"
    come_back(memory, store, span, slot)
    assert resident(span) == span.length_bytes
    assert torch.equal(tensor, expected) and tensor.data_ptr() == address
    store.release(slot)
    assert torch.equal(tensor, expected), "what is back does not depend on its slot"


def test_writes_to_the_stand_in_come_back(memory: CpuMemory, store: PosixStore) -> None:
    tensor = torch.zeros(2 * MIB, dtype=torch.uint8)
    row = tensor.view(2, MIB)[1]
    span = movable(memory, tensor)
    slot = leave(memory, store, span)
    tensor[:4096].fill_(1)
    row.fill_(2)
    memory.forget_cached(span)
    assert int(row.sum()) == 2 * MIB
    come_back(memory, store, span, slot)
    assert tensor[:4096].unique().tolist() == [1]
    assert tensor[4096:MIB].unique().tolist() == [0] and row.unique().tolist() == [2]


def test_forgetting_cached_pages_makes_them_leave_the_resident_set(memory: CpuMemory, store: PosixStore) -> None:
    tensor = torch.ones(8 * MIB, dtype=torch.uint8)
    span = movable(memory, tensor)
    leave(memory, store, span)
    tensor.fill_(3)
    used = status_bytes("VmRSS")
    memory.forget_cached(span)
    assert used - status_bytes("VmRSS") > 7 * MIB
    assert tensor.unique().tolist() == [3]


def test_the_ends_of_a_block_never_move(memory: CpuMemory) -> None:
    tensor = torch.empty(2 * MIB + 100, dtype=torch.uint8)
    span = movable(memory, tensor)
    assert span.address % PAGE_BYTES == span.length_bytes % PAGE_BYTES == 0
    assert 0 < span.address - tensor.data_ptr() < PAGE_BYTES
    assert 0 <= tensor.data_ptr() + tensor.nbytes - (span.address + span.length_bytes) < PAGE_BYTES


def test_freeing_a_block_that_is_away(memory: CpuMemory, store: PosixStore) -> None:
    tensor = torch.ones(4 * MIB, dtype=torch.uint8)
    span = movable(memory, tensor)
    slot = leave(memory, store, span)
    del tensor
    mappings = Path("/proc/self/maps").read_text()
    assert all(str(extent.path) not in mappings for extent in slot.extents), "the slot is still mapped"
    fresh, other = (torch.full((4 * MIB,), fill, dtype=torch.uint8) for fill in (0, 9))
    store.write(slot, movable(memory, other).address)
    assert int(fresh.sum()) == 0


@pytest.mark.parametrize("size", [MIB, MIB + 1, 3 * MIB + 4095, 64 * MIB])
def test_large_tensors_are_movable(memory: CpuMemory, size: int) -> None:
    assert movable(memory, torch.empty(size, dtype=torch.uint8)).length_bytes > size - 2 * PAGE_BYTES
    assert movable(memory, torch.nn.Parameter(torch.empty(size))).length_bytes > 4 * size - 2 * PAGE_BYTES


def test_small_tensors_are_not(memory: CpuMemory) -> None:
    assert memory.span(torch.empty(MIB - 1, dtype=torch.uint8).untyped_storage()) is None
    assert memory.span(torch.empty(0).untyped_storage()) is None
    assert memory.in_place(torch.empty(100).untyped_storage())


def foreign_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors over memory whose owner may outlive them."""
    path = folder / "file"
    path.write_bytes(bytes(4 * MIB))
    return {
        "numpy": torch.from_numpy(numpy.ones(4 * MIB, dtype=numpy.uint8)),
        "bytearray": torch.frombuffer(bytearray(4 * MIB), dtype=torch.uint8),
        "dlpack": torch.from_dlpack(numpy.ones(4 * MIB, dtype=numpy.uint8)),
        "file": torch.from_file(str(path), shared=True, size=4 * MIB, dtype=torch.uint8),
        "shared memory": torch.ones(4 * MIB, dtype=torch.uint8).share_memory_(),
    }


@pytest.mark.parametrize("owner", ["numpy", "bytearray", "dlpack", "file", "shared memory"])
def test_memory_of_others_is_not_movable(memory: CpuMemory, tmp_path: Path, owner: str) -> None:
    tensor = foreign_tensors(tmp_path)[owner]
    span, in_place = memory.span(tensor.untyped_storage()), memory.in_place(tensor.untyped_storage())
    assert span is None and not in_place  # no storage in an assertion: pytest would print all of it


def test_views_move_with_their_storage(memory: CpuMemory) -> None:
    base = torch.empty(4, MIB, dtype=torch.uint8)
    assert movable(memory, base[2]) == movable(memory, base)


def test_holes_in_the_heap_are_plugged() -> None:
    memory = CpuMemory()
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    small = [libc.malloc(MIB // 2) for _ in range(16)]  # below the threshold: from the heap
    guard = libc.malloc(64)
    for address in small:
        libc.free(address)
    memory.plug_heap()
    tensors = [torch.empty(2 * MIB, dtype=torch.uint8) for _ in range(8)]
    assert all(memory.span(tensor.untyped_storage()) is not None for tensor in tensors)
    libc.free(guard)


def test_tidy_plugs_holes_that_were_met() -> None:
    memory = CpuMemory()
    with tempfile.TemporaryDirectory() as folder:
        memory.span(foreign_tensors(Path(folder))["numpy"].untyped_storage())
    memory.tidy()
    assert memory.span(torch.empty(2 * MIB, dtype=torch.uint8).untyped_storage()) is not None


def test_a_mapping_that_can_not_be_made(memory: CpuMemory) -> None:
    with pytest.raises(StorageError, match=r"mmap of \d+ bytes failed: .*vm.max_map_count"):
        memory.new_pages(1 << 60)


def test_pages_that_did_not_arrive_are_dropped(memory: CpuMemory) -> None:
    before = status_bytes("VmSize")
    memory.drop_pages(memory.new_pages(64 * MIB))
    assert status_bytes("VmSize") <= before
