"""Updates by slices on a device with streams: copies that the device makes by itself, and copies by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from runtime.cuda import StreamMover
from runtime.device import Lane, WallMark
from runtime.paging import CheckedMover, Pager, State, Tier, Tiers
from runtime.storage import PosixStore
from runtime.transfer import Engine

from ...runtime.simulated_device import SimulatedDevice
from ...runtime.slab import Slab
from .managed_training import LARGE_BUDGET, ManagedTraining
from .plain_training import LARGE, MIB, adamw, differing, everything, large_parameters, plain, train


class EagerDevice(SimulatedDevice):
    """Does at once what is queued, as optimizers compute at once here; for other orders see `runtime/cuda/test_mover`."""

    asynchronous = True

    def __init__(self, seed: int, *, pieces: int, unit: int) -> None:
        super().__init__(seed, pieces=pieces, unit=unit)
        self.lock = threading.RLock()

    def queue(self, lane: Lane, action: Callable[[], None]) -> None:
        with self.lock:  # I/O threads begin copies as well
            super().queue(lane, action)
            self.synchronise()

    def mark(self) -> WallMark:
        return WallMark(float(self.steps))

    def try_memory(self, size_bytes: int) -> None:
        """There always is some."""

    def external_bytes(self, known_bytes: int) -> int:
        return 0


class Gpu(ManagedTraining):
    """Training on it. host: room for so many blocks of the large parameter's size."""

    def __init__(self, folder: Path | None, *, host: int, debug: bool, last: ExitStack) -> None:
        self.device = EagerDevice(0, pieces=12, unit=2 * MIB)
        slab = Slab(host, 2 * MIB)
        tiers = [Tier(name="host", store=slab, engine=None)] if host else []  # type: ignore[arg-type]
        if folder is not None:
            store = PosixStore([folder], budget_bytes=None, direct=False)
            last.callback(store.close)
            self.engine = Engine(store, threads=2, chunk_bytes=64 << 10, checksums=True)
            last.callback(self.engine.close)
            tiers.append(Tier(name="storage", store=store, engine=self.engine))
        self.mover = StreamMover(self.device, Tiers(tiers), slab.address_of, poison=debug)
        checked = CheckedMover(self.mover, self.mover.read) if debug else self.mover
        last.callback(self.mover.close)
        super().__init__(Pager(mover=checked, budget_bytes=LARGE_BUDGET, device=self.device), large_parameters())
        last.callback(self.steps.close)


@pytest.fixture
def last() -> Iterator[ExitStack]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as last:
        yield last
    torch.set_num_threads(before)


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
@pytest.mark.parametrize("tiers", ["host", "storage", "host and storage"])
def test_the_same_bits(last: ExitStack, tmp_path: Path, tiers: str, debug: bool) -> None:
    """User code sees the states in between where it can; they come back whole, and leave again."""
    room = {"host": 6, "storage": 0, "host and storage": 2}[tiers]
    gpu = Gpu(None if tiers == "host" else tmp_path, host=room, debug=debug, last=last)
    optimizer = adamw(gpu.parameters)
    for step in range(6):
        train(optimizer, 1, first=step)
        gpu.device.synchronise()
        states = list(gpu.states().values())
        assert len(states) == 2 and all(block.state is State.OFFLOADED for block in states)
        if step == 3:
            with gpu.device.region():
                gpu.pager.bring_back_all()
            gpu.device.synchronise()
    assert {block.tier for block in states} == ({tiers} if " and " not in tiers else {"host", "storage"})
    assert gpu.pager.account.peak_bytes >= 2 * LARGE
    if "host" in tiers:
        gpu.mover.finished([])
        assert gpu.mover.moved_bytes["host->device"] > 5 * LARGE
    with gpu.device.region():
        gpu.pager.bring_back_all()
    gpu.device.synchronise()
    assert not differing(everything(optimizer), plain(6, large_parameters(), adamw))
