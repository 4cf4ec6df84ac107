"""Blocks whose copy is a range of a file of the user, on a simulated device, by each store between a device and drives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from planner.errors import StorageIOError
from runtime.cuda import StreamMover
from runtime.paging import Block, CheckedMover, Pager, State, Tier, Tiers
from runtime.storage import FileSpace, KvikioStore, StagedStore
from runtime.system import storage_swap
from runtime.transfer import Engine

from ..block_machine import Allocator
from ..cpu_machine import MIB, SECONDS, slot_of, within
from ..simulated_device import SimulatedDevice
from ..storage.fakes import CompatMode, FakeKvikio, SlowCopier

SIZE = MIB + 8


def staged(folder: Path, checksums: bool = False) -> StagedStore:
    return StagedStore([folder], SlowCopier(), budget_bytes=None, buffer_bytes=MIB // 4, checksums=checksums)  # type: ignore[arg-type]


def kvikio(folder: Path) -> KvikioStore:
    return KvikioStore([folder], budget_bytes=None, kvikio=FakeKvikio(compatible_only=False))


class Rig:
    """A pager on a device, whose work is done before the test goes on."""

    def __init__(self, folder: Path, make: Callable[[Path], FileSpace], *, debug: bool = False) -> None:
        (folder / "spill").mkdir()
        self.path = folder / "weights"
        self.path.write_bytes(random.Random(0).randbytes(3 * MIB + 77))
        self.before = self.path.read_bytes()
        self.store = make(folder / "spill")
        self.engine = Engine(self.store, threads=2, chunk_bytes=MIB // 2)  # type: ignore[arg-type]
        self.device = SimulatedDevice(0, pieces=3, unit=2 * MIB)
        self.tiers = Tiers([Tier(name="storage", store=self.store, engine=self.engine)])  # type: ignore[arg-type]
        mover = StreamMover(self.device, self.tiers, lambda extent: 0, in_reach=False, poison=debug)
        self.pager = Pager(
            mover=CheckedMover(mover, mover.read) if debug else mover, budget_bytes=4 * MIB, device=Allocator(self.device)
        )
        self._region = self.device.region()
        self._region.__enter__()
        self.pager.enter_region()

    def close(self) -> None:
        self._region.__exit__(None, None, None)
        self.engine.close()
        self.store.close()

    def weight(self, offset: int) -> tuple[torch.Tensor, Block]:
        storage = self.pager.block_in_file("w", "parameter", path=self.path, offset_bytes=offset, size_bytes=SIZE)
        tensor = storage_swap.tensor_over(storage, torch.uint8, (SIZE,))
        block = self.pager.known_block(tensor)
        assert block is not None
        return tensor, block

    def use(self, block: Block, write: Callable[[], object] | None = None) -> None:
        within(SECONDS, lambda: self.pager.acquire([block], 0, "use"))
        self.device.synchronise()
        if write is not None:
            write()
        self.pager.retire([block], [block] if write is not None else [])

    def user_code(self, work: Callable[[], object]) -> None:
        within(SECONDS, self.pager.leave_region)
        self.device.synchronise()
        work()
        self.pager.enter_region()

    def leave(self, block: Block) -> None:
        """Send a block away as often as it takes: the first time may only find that it has left its file."""
        for _ in range(2):
            self.pager.offload(block)
            self.device.synchronise()
            self.settle()
        assert block.state is State.OFFLOADED

    def settle(self) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            with self.pager.condition:
                if not self.pager.account.offloading_bytes:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.001)


RIGS = {
    "staged": partial(Rig, make=staged),
    "checksums": partial(Rig, make=partial(staged, checksums=True)),
    "kvikio": partial(Rig, make=kvikio),
    "debug": partial(Rig, make=staged, debug=True),
}


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = RIGS[request.param](tmp_path)
    yield rig
    rig.close()


def data_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy().tobytes())


@pytest.mark.parametrize("offset", [0, 1, 4095, 808, 2 * MIB + 69], ids=["first", "odd", "page", "usual", "last"])
def test_any_range_is_read_and_never_written(rig: Rig, offset: int) -> None:
    tensor, block = rig.weight(offset)
    assert block.state is State.OFFLOADED and rig.pager.account.used_bytes == 0
    with pytest.raises(RuntimeError, match="is not in memory: teraio has moved it to storage"):
        tensor.sum()
    for _ in range(3):
        rig.use(block)
        assert data_of(tensor) == rig.before[offset : offset + SIZE]
        rig.user_code(tensor.sum)
        rig.leave(block)
    assert slot_of(block).file is not None and rig.pager.account.used_bytes == 0
    assert rig.engine.read_link.moved_bytes == 3 * slot_of(block).size_bytes
    assert rig.engine.write_link.moved_bytes == rig.store.capacity_bytes == 0 and rig.path.read_bytes() == rig.before


@pytest.mark.parametrize("writer", ["user code", "a stage"])
def test_what_is_written_gets_a_slot_of_its_own(rig: Rig, writer: str) -> None:
    tensor, block = rig.weight(808)
    expected = bytearray(rig.before[808 : 808 + SIZE])

    def write() -> None:
        for index in (0, SIZE - 1):
            tensor[index] ^= 1

    for index in (0, SIZE - 1):
        expected[index] ^= 1
    if writer == "a stage":
        rig.use(block, write)
    else:
        rig.use(block)
        rig.user_code(write)
    rig.leave(block)
    assert slot_of(block).file is None
    rig.use(block)
    assert data_of(tensor) == bytes(expected) and rig.path.read_bytes() == rig.before
    assert rig.store.user_files._files == {}


def test_a_file_that_is_cut_is_an_error(rig: Rig) -> None:
    _tensor, block = rig.weight(2 * MIB)
    with rig.path.open("r+b") as file:
        file.truncate(MIB)
    with pytest.raises(StorageIOError, match=r"it has 1,048,576 bytes now, and had 3,145,805.*leave a checkpoint as it is"):
        rig.use(block)
    assert rig.pager.account.used_bytes == 0


def test_kvikio_opens_a_file_by_its_descriptor_and_by_the_host_where_cufile_cannot(tmp_path: Path) -> None:
    fake = FakeKvikio(compatible_only=False)
    rig = Rig(tmp_path, lambda folder: KvikioStore([folder], budget_bytes=None, kvikio=fake))
    fake.refuses = True
    tensor, block = rig.weight(808)
    descriptor = slot_of(block).extents[0].file_descriptor
    by_descriptor = f"/proc/self/fd/{descriptor}"
    assert fake.opened[-2:] == [(by_descriptor, CompatMode.OFF), (by_descriptor, CompatMode.ON)]
    rig.path.unlink()
    rig.use(block)
    assert data_of(tensor) == rig.before[808 : 808 + SIZE]
    del tensor
    deadline = time.monotonic() + SECONDS
    while not block.dead and time.monotonic() < deadline:  # the thread of the copy lets go of it last
        time.sleep(0.001)
    rig.pager.forget_dead()
    assert len(fake.live) == 1, "that of the spill file"
    rig.close()


def test_what_ends_in_its_file_is_saved_and_taken_over_from_there(rig: Rig) -> None:
    offset, expected = 808, rig.before[808 : 808 + SIZE]
    tensor, _ = rig.weight(offset)
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
    following = StreamMover(rig.device, Tiers([], ownership=rig.tiers.ownership), lambda extent: 0)
    assert following.span(storage, adopt=True) is not None
    rig.device.synchronise()
    assert data_of(tensor) == expected and rig.path.read_bytes() == rig.before
    for reader in (before, after):
        assert data_of(torch.empty(0, dtype=torch.uint8).set_(reader)) == expected
    assert rig.store.user_files._files, "readers need it"
    before = after = reader = None
    assert not rig.store.user_files._files
