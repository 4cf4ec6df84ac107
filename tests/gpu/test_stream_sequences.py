"""The contracts of devices and streams, and the random sequences of `tests/runtime/cuda/test_mover.py`, on real streams.

Sometimes a lane is delayed, so that the order of the lanes varies.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from runtime.cuda import CudaStreams
from runtime.cuda.drive_paths import CudaCopier
from runtime.device import Lane
from runtime.paging import Tier
from runtime.storage import HostStore, StagedStore
from runtime.system import CudaPinner
from runtime.transfer import Engine, TorchMemory

from ..runtime.block_machine import TIERS, Machine
from ..runtime.device.contract import DeviceCase, DeviceContract, StreamsContract

DEVICE = torch.device("cuda", 0)
UNIT = 2 << 20
MAX_CYCLES = 2_000_000
"""About a millisecond. A block can be copied about ten times in this time."""


class CudaMachine(Machine):
    """The machine on a GPU. It reads the results of its kernels at the end, so that the host does not wait before."""

    def __init__(self, seed: int, *, budget_blocks: int, tiers: Sequence[str], host: HostStore, files: Tier) -> None:
        known = {"host": Tier(store=host, engine=None), "storage": files}
        super().__init__(
            seed,
            CudaStreams(DEVICE),
            budget_blocks=budget_blocks,
            unit=UNIT,
            tiers=[known[name] for name in tiers],
            lends=True,
        )
        self.found: list[tuple[str, torch.Tensor]] = []

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self.device._streams[lane]

    def queue_check(self, lane: Lane, tensor: torch.Tensor, value: int, what: str) -> None:
        with torch.cuda.stream(self._stream(lane)):
            self.found.append((f"{what}: bytes other than {value}", (tensor != value).any()))

    def queue_fill(self, lane: Lane, tensor: torch.Tensor, value: int) -> None:
        with torch.cuda.stream(self._stream(lane)):
            tensor.fill_(value)

    def time_passes(self) -> None:
        if self.draw.random() < 0.4:
            with torch.cuda.stream(self._stream(self.draw.choice(list(Lane)))):
                torch.cuda._sleep(self.draw.randrange(MAX_CYCLES))

    def finish_queued(self) -> None:
        torch.cuda.synchronize(DEVICE)
        self.wrong += [what for what, wrong in self.found if wrong]


@pytest.fixture
def host() -> Iterator[HostStore]:
    store = HostStore(64 * UNIT, pinner=CudaPinner(DEVICE))
    assert store.pinned
    yield store
    assert store.used_bytes == 0, "every slot came back"
    store.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Tier]:
    with ExitStack() as undo:
        store = StagedStore([tmp_path], CudaCopier(DEVICE), budget_bytes=None, buffer_bytes=1 << 20)
        undo.callback(store.close)
        engine = Engine(store, memory=TorchMemory(DEVICE))
        undo.callback(engine.close)
        yield Tier(store=store, engine=engine)
        assert store.used_bytes == 0, "every slot came back"


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("seed", range(5))
def test_any_sequence(seed: int, tiers: Sequence[str], host: HostStore, files: Tier) -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    machine = CudaMachine(seed, budget_blocks=random.Random(seed).randint(4, 7), tiers=tiers, host=host, files=files)
    machine.parks = seed % 2 == 1
    try:
        machine.run(25)
        assert machine.pager.account.evictions > 20
    finally:
        machine.pager.closing.bring_back()  # the I/O threads must be idle before their engine closes
        machine.tensors.clear()
        machine.found.clear()
        torch.cuda.synchronize(DEVICE)
        machine.pager.forget_dead()
        machine.mover.close()
    del machine
    assert torch.cuda.memory_allocated(DEVICE) == before


class TestGpu(DeviceContract, StreamsContract):
    """The contracts."""

    @pytest.fixture
    def case(self) -> DeviceCase:
        pinned = torch.empty(UNIT, dtype=torch.uint8, pin_memory=True)
        streams = CudaStreams(DEVICE)
        return DeviceCase(device=streams, streams=streams, host_bytes=lambda size: pinned.data_ptr(), unit=UNIT)
