"""A pager and a stream mover over blocks with known bytes, driven by random sequences. For any device with streams."""

from __future__ import annotations

import ctypes
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from runtime.cuda import StreamMover
from runtime.device import CpuDevice, DeviceMemoryError, Lane, Pieces
from runtime.paging import Block, CheckedMover, Pager, State, Tier, Tiers
from runtime.storage import RangeCopy

SLICES = 4
TIERS = [("host",), ("storage",), ("host", "storage")]


class Allocator(CpuDevice):
    """What the pager asks of the device's allocator; of other memory on the device it knows nothing."""

    retries = 1  # so that blocks make way for stages, where they can move on the device

    def __init__(self, streams: Any) -> None:
        super().__init__(streams.trim)
        self._streams = streams

    @property
    def pieces(self) -> Pieces | None:  # type: ignore[override]
        return getattr(self._streams, "pieces", None)

    def keep_until_computed(self, storage: torch.UntypedStorage) -> None:
        self._streams.keep_until_computed(storage)

    def give_back_memory(self) -> None:
        self._streams.give_back_memory()


class Machine(ABC):
    """A pager over blocks of one size. All bytes of a block have one known value.

    device: `Streams`. tiers: the fastest first. unit: bytes of a block. wrong: a line for each block whose bytes were not
    those written last. debug: the mover runs in the debug mode. lends: some blocks are updated in their slots, in slices;
    `unit` is a multiple of 4 pages then. parks: the device is emptied between some regions. condition: the pager's lock.
    """

    def __init__(
        self,
        seed: int,
        device: Any,
        *,
        budget_blocks: int,
        unit: int,
        tiers: Sequence[Tier],
        debug: bool = False,
        lends: bool = False,
        condition: threading.Condition | None = None,
    ) -> None:
        self.draw = random.Random(seed)
        self.device = device
        self.unit = unit
        self.lends = lends
        self.parks = False
        self.mover = StreamMover(device, Tiers(tiers), poison=debug)
        self.checked = CheckedMover(self.mover, self.mover.read) if debug else None
        self.pager = Pager(
            mover=self.checked or self.mover, budget_bytes=budget_blocks * unit, condition=condition, device=Allocator(device)
        )
        self.budget_blocks = budget_blocks
        self.tiers = [tier.name for tier in tiers]
        self.tensors: dict[Block, torch.Tensor] = {}
        self.expected: dict[Block, int] = {}
        self.values = 0
        self.count = 0
        self.between_regions = False
        self.wrong: list[str] = []
        self.host_work: deque[tuple[list[Block], list[torch.Tensor], Any]] = deque()

    # -- what depends on the device

    @abstractmethod
    def queue_check(self, lane: Lane, tensor: torch.Tensor, value: int, what: str) -> None:
        """Queue a kernel that notes in `wrong` if not all bytes are `value`."""

    @abstractmethod
    def queue_fill(self, lane: Lane, tensor: torch.Tensor, value: int) -> None:
        """Queue a kernel that sets all bytes to `value`."""

    @abstractmethod
    def time_passes(self) -> None:
        """Let the device and the drives go on for a while."""

    @abstractmethod
    def finish_queued(self) -> None:
        """End all that was queued."""

    # -- what runs on the device

    def kernel(self, lane: Lane, block: Block, value: int | None) -> None:
        """Queue a kernel that checks the block's bytes, and then gives them another value."""
        tensor, before = self.tensors[block], self.expected.get(block)
        if before is not None:
            self.queue_check(lane, tensor, before, f"{lane.name} {block.name}")
        if value is not None:
            self.expected[block] = value
            self.queue_fill(lane, tensor, value)

    def new_value(self) -> int:
        self.values = (self.values + 1) % 200
        return self.values

    # -- what the host does

    def run(self, regions: int) -> None:
        """Run so many regions, and check after each. Then read all blocks that are left."""
        for _ in range(regions):
            self.region(8)
            self.check()
        self.finish()

    @contextmanager
    def in_region(self) -> Iterator[None]:
        """A region that the pager is told of, with what the test does in it."""
        with self.device.region():
            self.pager.enter_region()
            yield
            self.pager.leave_region()

    def region(self, steps: int) -> None:
        """Run a compiled region of stages, hints and deaths, then user code."""
        with self.in_region():
            if self.parks and self.draw.random() < 0.5:
                self.pager.parking.wake()
            for _ in range(steps):
                kinds = (self.stage, self.hint, self.drop, self.die, self.update, self.set_aside, self.update_on_host)
                self.draw.choices(kinds, weights=(6, 3, not self.lends, 1, 2 * self.lends, 2, 1))[0]()
                self.time_passes()
            while self.host_work:
                self.update_on_host()
        if self.parks and self.draw.random() < 0.2:
            self.park()
        self.between_regions = True
        self.user_code()
        self.between_regions = False

    def park(self) -> None:
        """Empty the device between two regions; the next one wakes it, or later ones bring in what they need."""
        with self.in_region():
            self.pager.parking.park()
        assert not self.pager.account.used_bytes, "all blocks can leave, and the lower tiers have room"

    def pick(self, most: int) -> list[Block]:
        return self.draw.sample(list(self.tensors), min(len(self.tensors), self.draw.randint(0, most)))

    def drop(self) -> None:
        """Drop blocks, as if stages could make them anew."""
        for block in self.pick(2):
            block.source = "a stage"
            self.pager.drop(block)

    def renew(self, blocks: Sequence[Block]) -> None:
        """Run the stages again that make those of these blocks that were dropped."""
        for block in blocks:
            if block.state is State.DROPPED:
                self.pager.acquire([], self.unit, "again")
                self.find_memory([])
                fresh = self.device.allocate(self.unit)
                self.queue_fill(
                    Lane.COMPUTE, torch.empty(0, dtype=torch.uint8, device=self.device.device).set_(fresh), self.expected[block]
                )
                self.pager.renew({block: fresh})
                self.pager.retire([], [])

    def stage(self) -> None:
        read = self.pick(2)
        self.renew(read)
        makes = len(self.tensors) < 16 and self.draw.random() < 0.4
        self.pager.advance_clock()
        hints = [block for block in self.pick(2) if self.draw.random() < 0.5]
        self.pager.acquire(read, self.unit if makes else 0, "stage", then_fetch=hints)
        if makes:
            self.find_memory(read)
        written = [block for block in read if self.draw.random() < 0.4]
        for block in read:
            self.kernel(Lane.COMPUTE, block, self.new_value() if block in written else None)
        if makes:
            self.make(visible=self.draw.random() < 0.4)
        self.pager.retire(read, written)
        for block in read:
            block.next_use = self.pager.account.clock + self.draw.randint(-3, 12)

    def find_memory(self, held: Sequence[Block]) -> None:
        """Where the allocator has no memory for the stage that holds these blocks, let the pager make room in one piece."""
        try:
            self.device.allocate(self.unit)
        except DeviceMemoryError:
            self.pager.acquire_again(held, self.unit, "stage")

    def make(self, *, visible: bool = False) -> Block:
        """Make a new block, the output of a stage."""
        self.count += 1
        tensor = torch.empty(0, dtype=torch.uint8, device=self.device.device).set_(self.device.allocate(self.unit))
        block = self.pager.block_of(tensor, name=f"b{self.count}", kind="activation", user_visible=visible)
        assert block.span is not None
        self.tensors[block] = tensor
        self.kernel(Lane.COMPUTE, block, self.new_value())
        return block

    def made(self, *, visible: bool = False) -> Block:
        """Run a stage that makes one block."""
        self.pager.acquire([], self.unit, "make")
        self.find_memory([])
        block = self.make(visible=visible)
        self.pager.retire([], [])
        return block

    def update(self) -> None:
        """Run a stage that updates a block in its slot. The slices pass through two buffers on the device."""
        for block in self.pick(1):
            self.renew([block])
            self.pager.advance_clock()
            self.pager.lending.lend([block])
            self.pager.acquire([], self.unit, "update", then_fetch=self.pick(2))
            self.find_memory([])
            area = self.device.allocate(self.unit)
            memory = torch.empty(0, dtype=torch.uint8, device=self.device.device).set_(area)
            before, value = self.expected[block], self.new_value()
            writes: list[RangeCopy] = []
            for number in range(SLICES):
                if number >= 2:
                    writes[number - 2]()
                begin = number * self.unit // SLICES
                buffer = memory[number % 2 * self.unit // SLICES :][: self.unit // SLICES]
                self.pager.lending.copy_range(block, begin, buffer, to_slot=False)()
                self.queue_check(Lane.COMPUTE, buffer, before, f"slice {number} of {block.name}")
                self.queue_fill(Lane.COMPUTE, buffer, value)
                writes.append(self.pager.lending.copy_range(block, begin, buffer, to_slot=True))
                self.time_passes()
            for write in writes:
                write()
            self.expected[block] = value
            del memory, area, buffer
            self.pager.retire([], [])
            self.pager.lending.give_back([block])

    def set_aside(self) -> None:
        """Let the host's processor update some blocks later, as `HostUpdates.begin` does."""
        blocks = [block for block in self.pick(2) if not any(block in waiting for waiting, _, _ in self.host_work)]
        if blocks and self.pager.lending.reserve_for_host(blocks):
            self.host_work.append((blocks, [self.tensors[block] for block in blocks], self.device.record(Lane.COMPUTE)))

    def update_on_host(self) -> None:
        """Run the first update that is due, unless stages have taken its blocks. What it reads and leaves must be right."""
        if not self.host_work:
            return
        blocks, _, device_passed = self.host_work.popleft()
        device_passed.wait()
        addresses = self.pager.lending.lend_memory(blocks)
        if addresses is None:
            return
        for block, address in zip(blocks, addresses, strict=True):
            before, value = self.expected.get(block), self.new_value()
            found = set(ctypes.string_at(address, block.size_bytes))
            if before is not None and found != {before}:
                self.wrong.append(f"the host found {found} instead of {before} in {block.name}")
            ctypes.memset(address, value, block.size_bytes)
            self.time_passes()
            if (found := set(ctypes.string_at(address, block.size_bytes))) != {value}:
                self.wrong.append(f"the device left {found} instead of {value} where the host updates {block.name}")
            if before is not None:
                self.expected[block] = value
        self.pager.lending.give_back(blocks)

    def hint(self) -> None:
        leaving = []
        for block in self.pick(2):
            if self.draw.random() < 0.5:
                leaving.append((block, self.draw.choice((None, *self.tiers))))
            else:
                self.pager.prefetch(block)
        self.pager.offload_all(leaving)

    def die(self, spared: Sequence[Block] = ()) -> None:
        arriving = [block for block in list(self.mover._in) if block in self.tensors]
        for block in arriving[:1] if self.draw.random() < 0.5 else self.pick(1):
            if block not in spared:
                del self.tensors[block], self.expected[block]

    def user_code(self) -> None:
        """Run user code between regions. It reads and writes blocks that it can reach, wherever they are, and drops some."""
        used = [block for block in self.pick(3) if block.user_visible]
        for block in used:
            if block.state is State.OFFLOADED and block.tier == "storage":
                with pytest.raises(RuntimeError, match=f"{block.name} .* is not in memory: teraio has moved it to storage"):
                    self.tensors[block].sum()
            else:
                self.kernel(Lane.USER, block, self.new_value() if self.draw.random() < 0.5 else None)
        if self.draw.random() < 0.5:
            self.die(spared=used)  # see [Note: What orders what] for what user code frees while it still uses it
        self.time_passes()

    def check(self) -> None:
        pager = self.pager
        with pager.condition:
            on_device = sum(b.size_bytes for b in pager.table if b.state not in (State.OFFLOADED, State.DROPPED))
            assert pager.account.used_bytes == on_device <= self.budget_blocks * self.unit
        assert not self.wrong, self.wrong

    def finish(self) -> None:
        """Bring back all that is left, one by one, and check that it is as it was written."""
        with self.in_region():
            for block in list(self.tensors):
                self.renew([block])
                self.pager.acquire([block], 0, "finish")
                self.kernel(Lane.COMPUTE, block, None)
                self.pager.retire([block], [])
        self.finish_queued()
        self.check()
