"""Blocks on a simulated device, over a host tier and one drive whose copies end when the test says so."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from planner.errors import StorageFullError
from planner.schema import WaitingTier
from runtime.device import Lane
from runtime.paging import Block, Tier
from runtime.storage import Extent, Slot
from runtime.transfer import Ready

from .block_machine import Machine
from .memory_mover import Stepping
from .simulated_device import SimulatedDevice

UNIT = 64
"""Bytes of a block, unless told otherwise."""


class Slab:
    """A store in ordinary memory, as far as a mover needs it, with slots of one size. What was freed last is used first."""

    def __init__(self, tier: WaitingTier, slots: int, slot_bytes: int) -> None:
        self.tier = tier
        self._memory = ctypes.create_string_buffer(slots * slot_bytes)
        self._free = list(range(0, slots * slot_bytes, slot_bytes))
        self._slot_bytes = slot_bytes
        self.limit_bytes = slots * slot_bytes
        self.used_bytes = 0

    def allocate(self, size_bytes: int, name: str) -> Slot:
        assert size_bytes <= self._slot_bytes
        if not self._free:
            raise StorageFullError("full")
        offset = self._free.pop()
        where = ctypes.addressof(self._memory) + offset
        extent = Extent(file_descriptor=-1, path=Path("slab"), offset_bytes=offset, length_bytes=self._slot_bytes, address=where)
        self.used_bytes += self._slot_bytes
        return Slot(name=name, extents=(extent,), size_bytes=self._slot_bytes, content_bytes=size_bytes)

    def release(self, slot: Slot) -> None:
        self._free.append(slot.extents[0].offset_bytes)
        self.used_bytes -= self._slot_bytes


class SteppedTransfer:
    """What `Engine.write` and `read` return. It ends when the drive reaches it."""

    error = None

    def __init__(self, drive: SteppedDrive) -> None:
        self.drive = drive
        self.ended = False

    def promote(self) -> bool:
        return False

    def wait(self) -> None:
        while not self.ended:
            assert self.drive.finish(), "the host waits for a copy that is not queued"


class SteppedDrive:
    """Stands in for an engine: one queue, whose copies end when `finish` is called."""

    def __init__(self, size_bytes: int) -> None:
        self.queue: deque[tuple[Callable[[], None], Callable[[Any], None], Ready, SteppedTransfer]] = deque()
        self.content = bytearray(size_bytes)

    def write(self, slot: Slot, address: int, on_done: Callable[[Any], None], ready: Ready) -> SteppedTransfer:
        def move() -> None:
            self.content[self.place(slot)] = ctypes.string_at(address, slot.size_bytes)

        return self._submit(move, on_done, ready)

    def read(self, slot: Slot, address: int, on_done: Callable[[Any], None], ready: Ready) -> SteppedTransfer:
        def move() -> None:
            ctypes.memmove(address, bytes(self.content[self.place(slot)]), slot.size_bytes)

        return self._submit(move, on_done, ready)

    def place(self, slot: Slot) -> slice:
        """Return where the bytes of a slot are."""
        (extent,) = slot.extents
        return slice(extent.offset_bytes, extent.offset_bytes + slot.size_bytes)

    def _submit(self, move: Callable[[], None], on_done: Callable[[Any], None], ready: Ready) -> SteppedTransfer:
        transfer = SteppedTransfer(self)
        self.queue.append((move, on_done, ready, transfer))
        return transfer

    def finish(self) -> bool:
        """End the copy at the head of the queue. False if there is none."""
        if not self.queue:
            return False
        move, on_done, ready, transfer = self.queue.popleft()
        ready()
        move()
        transfer.ended = True
        on_done(transfer)
        return True

    def watch(self, slot: Slot, *, unchanged: bool) -> None:
        """Everything is written."""

    def check(self) -> None:
        """This drive always answers."""


class SimulatedMachine(Machine):
    """A `Machine` on a simulated device with one drive, whose copies end when the test says so. tiers: of "host", "storage".

    crumbles: how likely the allocator is, at each point, to find no memory in one piece from then on.
    """

    def __init__(
        self,
        seed: int,
        *,
        budget_blocks: int,
        tiers: Sequence[str],
        debug: bool = False,
        unit: int = UNIT,
        device: type[SimulatedDevice] = SimulatedDevice,
        lends: bool = False,
        crumbles: float = 0.0,
    ) -> None:
        self.drive = SteppedDrive(64 * unit)
        self.slab, self.files = Slab("host", 64, unit), Slab("storage", 64, unit)
        known = {
            "host": Tier(store=self.slab, engine=None),
            "storage": Tier(store=self.files, engine=self.drive),  # type: ignore[arg-type]
        }
        super().__init__(
            seed,
            device(seed, pieces=budget_blocks, unit=unit),
            budget_blocks=budget_blocks,
            unit=unit,
            tiers=[known[name] for name in tiers],
            debug=debug,
            lends=lends,
            condition=Stepping(lambda: self.drive.finish() or self.device.step()),  # a test may replace `finish`
        )
        self.device.faults = self.wrong
        self._unmaps = random.Random(seed)
        self._crumbles = crumbles

    def queue_check(self, lane: Lane, tensor: torch.Tensor, value: int, what: str) -> None:
        address, size = tensor.data_ptr(), tensor.nbytes  # an error if the block is not there, as for a real kernel

        def check() -> None:
            self.device.touch(lane, address, size)
            found = ctypes.string_at(address, size)
            if found != bytes([value]) * size:
                self.wrong.append(f"{what}: {set(found)} instead of {value}")

        self.device.queue(lane, check)
        self.device.queue(lane, check)

    def queue_fill(self, lane: Lane, tensor: torch.Tensor, value: int) -> None:
        address, half = tensor.data_ptr(), tensor.nbytes // 2
        self.device.queue(lane, lambda: ctypes.memset(address, value, half) and None)
        self.device.queue(lane, lambda: ctypes.memset(address + half, value, half) and None)

    def allocated_by_user(self, value: int) -> torch.Tensor:
        """Let user code allocate and fill a tensor."""
        storage = self.device.arena.allocate(self.unit, Lane.USER)
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.queue_fill(Lane.USER, tensor, value)
        return tensor

    def adopt(self, tensor: torch.Tensor, value: int) -> Block:
        """A stage reads a tensor that user code has made. Return its block."""
        block = self.pager.block_of(tensor, name="user's", kind="parameter", user_visible=True)
        self.tensors[block], self.expected[block] = tensor, value
        self.pager.acquire([block], 0, "adopt")
        self.kernel(Lane.COMPUTE, block, None)
        self.pager.retire([block], [])
        return block

    def time_passes(self) -> None:
        if self._unmaps.random() < 0.1:
            self.device.arena.unmap()
        if self._unmaps.random() < self._crumbles and not self.between_regions:
            self.device.crumbled = True
        self.device.go_on((2 if self.between_regions else 1) * self.device.pace)
        while self.draw.random() < (0.6 if self.between_regions else 0.2):
            self.drive.finish()

    def finish_queued(self) -> None:
        while self.drive.finish():
            pass
        self.device.synchronise()

    def slow(self, *lanes: Lane) -> None:
        """Let all other lanes go first whenever they can."""
        self.device.pace = 0
        self.device.speeds = {lane: 1e-9 if lane in lanes else 1.0 for lane in Lane}
