"""A pager over a mover that keeps its slots in memory and ends its copies when a test says so."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from planner.errors import StorageError, StorageIOError
from planner.schema import WaitingTier
from runtime.device import CpuDevice, Span
from runtime.paging import Block, Done, Pager, State, Tiers

UNIT = 16
"""Sizes are multiples of this many bytes."""


class Deadlock(Exception):
    """The pager waits, but no copy is running whose end could wake it."""


class Copy:
    """A copy that is running. It reads its first half when it begins and its second half when it ends."""

    def __init__(self, block: Block, storage: torch.UntypedStorage, kind: str, done: Done) -> None:
        self.block, self.storage, self.kind, self.done = block, storage, kind, done
        self.head = self.source()[: block.size_bytes // 2]

    def source(self) -> bytes:
        return ctypes.string_at(self.storage.data_ptr(), self.storage.nbytes())

    def content(self) -> bytes:
        return self.head + self.source()[self.block.size_bytes // 2 :]


class MemoryTiers(Tiers):
    """The slots of a `MemoryMover`: there is room for all. Logs what is asked of it."""

    def __init__(self, mover: MemoryMover) -> None:
        super().__init__(())
        self.mover = mover

    def __len__(self) -> int:
        return 1

    def has_room(self, block: Block, wanted: WaitingTier) -> bool:
        return True

    def free(self, block: Block) -> None:
        assert block not in self.mover.away, f"the only copy of {block} is dropped"
        self.mover.slots.pop(block, None)
        self.mover.log.append(f"drop {block.name}")

    def host_address(self, block: Block) -> int | None:
        """Return the address of the storage, which stands for the slot."""
        storage = block.storage() if block.tier == "host" else None
        return storage.data_ptr() if storage is not None else None

    def prioritize(self, block: Block) -> None:
        self.mover.log.append(f"prioritize {block.name}")

    def check(self) -> None:
        if self.mover.stuck is not None:
            raise self.mover.stuck


class MemoryMover:
    """A `Mover` whose slots are bytes. While a block is away, its storage stands for its slot, as with mapped files."""

    def __init__(self) -> None:
        self.tiers = MemoryTiers(self)
        self.together: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self.flying: list[Copy] = []
        self.slots: dict[Block, bytes] = {}
        self.away: set[Block] = set()
        self.dropped: set[Block] = set()
        self.arrived: dict[Block, bytes] = {}
        self.log: list[str] = []
        self.refuse: Exception | None = None
        self.fail_copies: list[StorageError | None] = []
        self.stuck: StorageError | None = None

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        if adopt:
            self.log.append("adopt")
        return None if storage.nbytes() % (2 * UNIT) else Span(0, storage.nbytes())

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return [b for b in blocks if (s := b.storage()) is not None and (s.data_ptr(), s.nbytes()) != (b.address, b.size_bytes)]

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> None:
        block.tier = tier or "host"
        self._begin(block, "out", done)

    def copy_in(self, block: Block, done: Done) -> None:
        assert block in self.away, f"{block} is read, but it is not away"
        self._begin(block, "in", done)

    def _begin(self, block: Block, kind: str, done: Done) -> None:
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        assert all(copy.block is not block for copy in self.flying), f"two copies of {block} at once"
        storage = block.storage()
        assert storage is not None, f"{block} is copied, but its storage is gone"
        self.log.append(f"{kind} {block.name}")
        self.flying.append(Copy(block, storage, kind, done))

    def release(self, block: Block) -> None:
        if block.state is State.DROPPED:
            assert block not in self.away and block not in self.slots, f"{block} is dropped, but it has a slot"
            self.dropped.add(block)
            _fill(block, bytes([0xFB]) * block.size_bytes)
            self.log.append(f"discard {block.name}")
        else:
            _fill(block, self.slots[block])
            self.away.add(block)

    def install(self, block: Block, fresh: torch.UntypedStorage | None = None) -> None:
        if fresh is not None:
            self.dropped.remove(block)
            _fill(block, bytes(fresh))
            self.log.append(f"renew {block.name}")
        else:
            _fill(block, self.arrived.pop(block))
            self.away.discard(block)

    def finished(self, blocks: Iterable[Block]) -> list[Block]:
        return list(blocks)

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Nothing to wait for: copies have ended when they are installed."""

    def invalidate(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block in self.away
            self.log.append(f"invalidate {block.name}")

    def forget(self, block: Block) -> None:
        assert all(copy.block is not block for copy in self.flying), f"{block} is forgotten in flight"
        self.slots.pop(block, None)
        self.away.discard(block)
        self.dropped.discard(block)
        self.log.append(f"forget {block.name}")

    def finish(self, index: int = 0) -> None:
        """End a copy that is running."""
        copy = self.flying.pop(index)
        error = self.fail_copies.pop(0) if self.fail_copies else None
        if error is None:
            self.slots[copy.block] = copy.content()  # also on the way in: what user code wrote while away is in the slot
            if copy.kind == "in":
                self.arrived[copy.block] = self.slots[copy.block]
        try:
            copy.done(error)
        finally:
            del copy  # an error's traceback may keep this frame, and that must not keep the storage

    def finish_all(self) -> None:
        while self.flying:
            self.finish()


class QueueingMover(MemoryMover):
    """While `device_copies`, the device makes the copies by itself. Those out have ended only once that is False."""

    device_copies = False

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        super().copy_out(block, tier, done)
        if self.device_copies:
            self.slots[block] = self.flying.pop().content()
        return self.device_copies

    def copy_in(self, block: Block, done: Done) -> bool:
        super().copy_in(block, done)
        if self.device_copies:
            self.flying.pop()
            self.arrived[block] = self.slots[block]
        return self.device_copies

    def finished(self, blocks: Iterable[Block]) -> list[Block]:
        return [] if self.device_copies else list(blocks)


def _fill(block: Block, content: bytes) -> None:
    storage = block.storage()
    assert storage is not None, f"{block} is filled, but its storage is gone"
    ctypes.memmove(storage.data_ptr(), content, len(content))


class Stepping(threading.Condition):
    """[Note: No threads] Where the pager would wait for an I/O thread, a copy ends in the waiting thread itself.

    finish_one: ends a copy; returns False if there is none. silent: nothing ever ends, and nobody is told.
    """

    def __init__(self, finish_one: Callable[[], bool]) -> None:
        super().__init__()
        self.finish_one = finish_one
        self.silent = False

    def wait(self, timeout: float | None = None) -> bool:
        if self.silent:
            return False
        if not self.finish_one():
            raise Deadlock
        return True


class Trimmed(CpuDevice):
    """A device that notes how many bytes may be kept for reuse."""

    spare_bytes: int | None = None

    def trim(self, spare_bytes: int) -> None:
        self.spare_bytes = spare_bytes


class Bench:
    """A pager, its mover, its device, and tensors by name. seed: draws which copy ends first.

    condition: the pager's lock. busy_seconds: see `Pager`.
    """

    def __init__(
        self,
        budget_bytes: int | None,
        seed: int | None = None,
        *,
        busy_seconds: Callable[[], Mapping[str, float]] = dict,
        mover: MemoryMover | None = None,
    ) -> None:
        self.mover = mover or MemoryMover()
        self.device = Trimmed()
        self.condition = Stepping(self.finish_one)
        self.pager = Pager(
            mover=self.mover, device=self.device, budget_bytes=budget_bytes, busy_seconds=busy_seconds, condition=self.condition
        )
        self.order = random.Random(seed) if seed is not None else None
        self.tensors: dict[str, torch.Tensor] = {}
        self.pager.enter_region()

    def finish_one(self) -> bool:
        if not self.mover.flying:
            return False
        self.mover.finish(self.order.randrange(len(self.mover.flying)) if self.order else 0)
        return True

    def make(self, name: str, units: int, *, visible: bool = False, fill: int = 1) -> Block:
        """Run a stage without inputs that makes one block of so many units. One of an odd number cannot move."""
        self.pager.acquire([], units * UNIT, f"make {name}")
        self.tensors[name] = torch.full((units * UNIT,), fill, dtype=torch.uint8)
        block = self.pager.block_of(self.tensors[name], name=name, kind="activation", user_visible=visible)
        self.pager.retire([], [])
        return block

    def run(self, *blocks: Block, new_bytes: int = 0) -> None:
        """Run a stage that reads blocks."""
        self.pager.acquire(blocks, new_bytes, "run")
        assert all(block.state in (State.ON_DEVICE, State.OFFLOADING) for block in blocks)
        self.pager.retire(blocks, [])

    def value(self, name: str) -> int:
        found = set(ctypes.string_at(self.tensors[name].data_ptr(), self.tensors[name].nbytes))
        assert len(found) == 1, f"{name} is torn: {found}"
        return found.pop()

    def drop(self, name: str) -> None:
        del self.tensors[name]


def io_error(name: str = "w") -> StorageIOError:
    return StorageIOError(path="/nowhere", block=name, errno=5)


def evicted(bench: Bench, block: Block) -> Block:
    """Send a block away and let the copy end."""
    bench.pager.offload(block)
    bench.mover.finish_all()
    assert block.state is State.OFFLOADED
    return block
