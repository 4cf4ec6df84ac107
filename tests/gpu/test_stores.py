"""The stores that work with a GPU: the contract of all stores over device memory, and tests that need CUDA."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from planner.errors import StorageError, UnsupportedError
from runtime.cuda import CudaStreams
from runtime.cuda.drive_paths import CudaCopier
from runtime.device import OUTWARD
from runtime.storage import ALIGNMENT_BYTES, HostStore, KvikioStore, StagedStore, Store, load_kvikio
from runtime.system import PIN_CHUNK_BYTES, CudaPinner

from ..runtime.memory import Memory, write_slot
from ..runtime.storage import contract

MIB = 1 << 20
CUDA = torch.device("cuda", 0)
Folders = Sequence[Path]


class GpuBytes:
    """Aligned device memory, filled with random bytes or zeros."""

    def __init__(self, size_bytes: int, random: bool) -> None:
        room = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=CUDA)
        begin = -room.data_ptr() % ALIGNMENT_BYTES
        self.tensor = room[begin : begin + size_bytes]
        if random:
            self.tensor.random_(0, 256)
        else:
            self.tensor.zero_()
        self.address = self.tensor.data_ptr()
        torch.cuda.synchronize()

    @property
    def content(self) -> bytes:
        return self.tensor.cpu().numpy().tobytes()


def pinned_store(folders: Folders, size_bytes: int) -> Store:
    store = HostStore(size_bytes, pinner=CudaPinner(CUDA))
    assert store.pinned
    return store


def staged_store(buffer_bytes: int) -> Callable[[Folders, int], Store]:
    return lambda folders, size: StagedStore(folders, CudaCopier(CUDA), budget_bytes=size, buffer_bytes=buffer_bytes)


MAKERS: dict[str, Callable[[Folders, int], Store]] = {
    "staged": staged_store(4 << 20),
    "staged, small buffers": staged_store(300_000),
    "kvikio": lambda folders, size: KvikioStore(folders, budget_bytes=size),
    "host, pinned": pinned_store,
}


@pytest.fixture(params=MAKERS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[object]:
    if request.param == "kvikio":
        need_kvikio()
    host = request.param == "host, pinned"
    with contract.opened(
        MAKERS[request.param],
        [tmp_path / "a", tmp_path / "b"],
        memory=(lambda size, random: Memory(size, random=random)) if host else GpuBytes,
        option="host_budget" if host else "storage_budget",
        stripes=1 if host else 2,
        mappable=request.param != "kvikio",
        whole=host,
    ) as case:
        yield case


def need_kvikio() -> None:
    """Skip the test where KvikIO is not installed. Where it is, it must work."""
    try:
        load_kvikio()
    except UnsupportedError as error:
        if importlib.util.find_spec("kvikio") is not None:
            raise
        pytest.skip(str(error))


class TestStoreWithAGpu(contract.StoreContract):
    """The contract."""


def test_copies_do_not_wait_for_the_default_stream() -> None:
    copier = CudaCopier(CUDA)
    buffer, device = copier.buffer(MIB), GpuBytes(MIB, True)
    expected = device.content
    kernel = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    kernel.record()
    copier.copy(buffer, device.address, to_device=False)()
    assert not kernel.query()
    assert ctypes.string_at(buffer.data_ptr(), MIB) == expected
    copier.copy(buffer, device.address, to_device=True)()
    assert not kernel.query()
    torch.cuda.synchronize()


def test_a_slab_of_several_chunks_is_pinned_and_given_back() -> None:
    store = HostStore(PIN_CHUNK_BYTES + 64 * MIB, pinner=CudaPinner(CUDA))
    slot = store.allocate(store.capacity_bytes, "all of it")
    assert store.pinned and len(slot.extents) == 2
    device, streams = GpuBytes(64 * MIB, True), CudaStreams(CUDA)
    host = slot.extents[1].address
    assert host is not None
    streams.copy(OUTWARD, target=host, source=device.address, size_bytes=64 * MIB)
    streams.record(OUTWARD).wait()
    assert ctypes.string_at(host, 64 * MIB) == device.content
    store.close()


def test_a_slab_that_nobody_closes_is_given_back_before_its_memory_is_freed() -> None:
    for _ in range(3):  # the next one may lie where the last one was
        store = HostStore(64 * MIB, pinner=CudaPinner(CUDA))
        assert store.pinned
        del store
        gc.collect()


def test_a_failed_pin_leaves_no_error_behind() -> None:
    with pytest.raises(StorageError, match="cannot pin 4,096 bytes of host memory: CUDA error"):
        CudaPinner(CUDA).pin(1 << 46, 4096)  # nothing is there
    assert int((torch.ones(4, device=CUDA) + 1).sum().item()) == 8


def test_what_kvikio_does_is_told(tmp_path: Path) -> None:
    need_kvikio()
    store = KvikioStore([tmp_path], budget_bytes=None)
    assert store.description.startswith("kvikio ")
    memory = GpuBytes(8 * MIB, True)
    slot = store.allocate(8 * MIB, "weights")
    write_slot(store, slot, memory.address)
    on_drive = Path(f"/proc/self/fd/{slot.extents[0].file_descriptor}").read_bytes()[: 8 * MIB]
    assert on_drive == memory.content
    store.close()
