"""A device with streams that runs its lanes in any order that their events allow, as a GPU may.

The host only queues work. A random source decides which lane goes on, and when. Memory that is freed within a region is
poisoned in the order of computation. Any freed memory serves the next allocation at once, as in PyTorch's caching
allocator. So memory that is used too early or too long shows as wrong bytes.

Where memory is short, the pages of free memory are unmapped, as PyTorch does with expandable segments: once the lane has ended
that they were allocated for, whatever the other lanes do. What touches unmapped memory is noted in `faults`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence

import torch

from planner.errors import BudgetError
from runtime.device import DeviceMemoryError, Lane

POISON = 0xEE


class SimulatedEvent:
    """A point in a lane; passed once the lane has reached it."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.passed = False
        self.at_step = 0
        self._device = device

    def done(self) -> bool:
        self._device.go_on(self._device.pace)
        return self.passed

    def reached(self) -> None:
        self.passed, self.at_step = True, self._device.steps

    def seconds_since(self, earlier: SimulatedEvent) -> float:
        self.wait()
        return float(self.at_step - earlier.at_step)

    def wait(self) -> None:
        while not self.passed:
            went_on = self._device.step()  # or another thread's call has meanwhile
            assert went_on or self.passed, "the host waits for something that nobody does"


class Arena:
    """A pool of memory in pieces of `unit` bytes. What was freed serves again at once, in any order.

    What user code allocated is in a pool of its own: it serves nothing else before it was unmapped. That waits for computation if
    `keep_until_computed` has asked for it.
    """

    def __init__(self, device: SimulatedDevice, pieces: int, unit: int) -> None:
        self._memory = ctypes.create_string_buffer(pieces * unit)
        self._begin = ctypes.addressof(self._memory)
        self._free = [range(begin, begin + unit) for begin in range(0, pieces * unit, unit)]
        self._users: list[range] = []
        self._kept: set[range] = set()
        self._until: list[SimulatedEvent] = []
        self._unmapped: set[range] = set()
        self._device, self.unit = device, unit

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def allocate(self, size_bytes: int, lane: Lane) -> torch.UntypedStorage:
        if not self._free:
            self.unmap()
        if not self._free or size_bytes > self.unit:
            raise BudgetError(smallest_bytes=size_bytes, budget_bytes=0, stage="simulation")
        place = self._free.pop(self._device.draw.randrange(len(self._free)))
        self._unmapped.discard(place)
        piece = (ctypes.c_char * size_bytes).from_buffer(self._memory, place.start)
        weakref.finalize(piece, self._give_back, place, size_bytes, lane)
        return torch.frombuffer(piece, dtype=torch.uint8).untyped_storage()

    def unmap(self) -> None:
        """Take the pages of free memory away, each after waiting for the lane that it was allocated for."""
        for event in self._until:
            event.wait()
        self._until = []
        if self._users and not self._device.elsewhere:
            self._device.drain(Lane.USER)
        self._take_away(self._users)
        if self._free:
            self._device.drain(Lane.COMPUTE)
        self._take_away(self._free)
        self._free += self._users
        self._users = []

    def _take_away(self, places: list[range]) -> None:
        for place in places:
            ctypes.memset(self._begin + place.start, POISON, len(place))
        self._unmapped.update(places)

    def keep_until_computed(self, address: int) -> None:
        begin = address - self._begin
        self._kept.add(range(begin, begin + self.unit))

    def is_mapped(self, address: int, size_bytes: int) -> bool:
        """Whether the range may be read and written. Memory outside of the arena always may."""
        begin = address - self._begin
        return not any(place.start < begin + size_bytes and begin < place.stop for place in self._unmapped)

    def _give_back(self, place: range, size_bytes: int, lane: Lane) -> None:
        if lane is Lane.USER:
            if place in self._kept:
                self._kept.remove(place)
                self._until.append(self._device.record(Lane.COMPUTE))
            self._users.append(place)
            return
        address = self._begin + place.start
        if self._device.in_region:
            self._device.queue(Lane.COMPUTE, lambda: ctypes.memset(address, POISON, size_bytes) and None)
        self._free.append(place)


class SimulatedPieces:
    """`Pieces` of a simulated device: whichever blocks may move do so at random. moved: how many have."""

    def __init__(self, device: SimulatedDevice, seed: int) -> None:
        self.moved = 0
        self._device = device
        self._draw = random.Random(seed)

    def begin_recording(self) -> bool:
        return True

    def recorded(self) -> Sequence[int]:
        return (self._device.arena.unit,)

    def gather(
        self,
        history: Sequence[int],
        movable: Callable[[], MutableMapping[int, int]],
        move: Callable[[int, torch.UntypedStorage], None],
        let_go: Callable[[int], bool],
    ) -> bool:
        if self._draw.random() < 0.3:
            let_go(self._device.arena.unit)
        blocks = sorted(movable().items())
        for address, size in self._draw.sample(blocks, min(len(blocks), self._draw.randint(0, 3))):
            if self._device.arena.has_free:
                fresh = self._device.allocate(size)
                move(address, fresh)
                self.moved += 1
        return False

    def copy(self, address: int, fresh: torch.UntypedStorage) -> None:
        self._device.copy(Lane.COMPUTE, target=fresh.data_ptr(), source=address, size_bytes=fresh.nbytes())


class SimulatedDevice:
    """`Streams` in ordinary memory.

    pace: steps that it makes while the host does something. speeds: weights of the lanes. faults: what touched unmapped memory.
    crumbled: free memory is in pieces that serve nobody, until all of it was given back. pieces: None if no block moves on it.
    elsewhere: another device is current, so that the allocator waits for that one's default stream instead of the user's lane.
    """

    device = torch.device("cpu")

    def __init__(self, seed: int, *, pieces: int, unit: int) -> None:
        self.draw = random.Random(seed)
        self.pace = self.draw.choice((0, 1, 6))
        self.speeds = {lane: self.draw.choice((0.01, 1.0)) for lane in Lane}
        self.lanes: dict[Lane, deque[tuple[SimulatedEvent | None, Callable[[], None]]]] = {lane: deque() for lane in Lane}
        self.arena = Arena(self, pieces, unit)
        self.in_region = False
        self.spared = 0
        self.steps = 0
        self._turn = threading.RLock()  # threads of an engine wait for events, too
        self.faults: list[str] = []
        self.elsewhere = False
        self.crumbled = False
        self.pieces: SimulatedPieces | None = None

    # -- the device's side

    def step(self) -> bool:
        """Let one lane that can go on do one thing. Returns False if none can."""
        with self._turn:
            able = [lane for lane, work in self.lanes.items() if work and (work[0][0] is None or work[0][0].passed)]
            if not able:
                assert not any(self.lanes.values()), "all lanes wait for one another"
                return False
            (lane,) = self.draw.choices(able, [self.speeds[lane] for lane in able])
            _, action = self.lanes[lane].popleft()
            self.steps += 1
            action()
            return True

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def synchronise(self) -> None:
        while self.step():
            pass

    def drain(self, lane: Lane) -> None:
        """Run until the lane has ended all that is queued there."""
        while self.lanes[lane]:
            self.step()

    def touch(self, lane: Lane, address: int, size_bytes: int) -> None:
        """Note a fault if the range is not mapped, as a copy or a kernel that reads or writes it would raise one."""
        if not self.arena.is_mapped(address, size_bytes):
            self.faults.append(f"{lane.name} found unmapped memory instead of a block")

    def queue(self, lane: Lane, action: Callable[[], None]) -> None:
        self.lanes[lane].append((None, action))

    # -- Streams

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        self.wait(Lane.COMPUTE, self.record(Lane.USER))
        self.in_region = True
        try:
            yield
        finally:
            self.in_region = False
            self.wait(Lane.USER, self.record(Lane.COMPUTE))

    def record(self, lane: Lane) -> SimulatedEvent:
        event = SimulatedEvent(self)
        self.queue(lane, event.reached)
        return event

    def wait(self, lane: Lane, event: SimulatedEvent) -> None:
        self.lanes[lane].append((event, lambda: None))

    def mark_lane(self, lane: Lane) -> SimulatedEvent:
        return self.record(lane)

    def copy(self, lane: Lane, *, target: int, source: int, size_bytes: int) -> None:
        half = size_bytes // 2
        for address in (target, source):
            self.queue(lane, functools.partial(self.touch, lane, address, size_bytes))
        self.queue(lane, lambda: ctypes.memmove(target, source, half) and None)
        self.queue(lane, lambda: ctypes.memmove(target + half, source + half, size_bytes - half) and None)

    def fill(self, lane: Lane, address: int, size_bytes: int, value: int) -> None:
        half = size_bytes // 2
        self.queue(lane, lambda: ctypes.memset(address, value, half) and None)
        self.queue(lane, lambda: ctypes.memset(address + half, value, size_bytes - half) and None)

    def read(self, lane: Lane, address: int, size_bytes: int) -> memoryview:
        found = bytearray()
        self.queue(lane, lambda: found.extend(ctypes.string_at(address, size_bytes)))
        self.record(lane).wait()
        return memoryview(found)

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        if self.crumbled:
            raise DeviceMemoryError("crumbled")
        return self.arena.allocate(size_bytes, Lane.COMPUTE)

    def keep_until_computed(self, storage: torch.UntypedStorage) -> None:
        self.arena.keep_until_computed(storage.data_ptr())

    def give_back_memory(self) -> None:
        self.synchronise()
        self.crumbled = False

    def can_move(self, storage: torch.UntypedStorage) -> bool:
        return True

    def trim(self, spare_bytes: int) -> None:
        self.spared = spare_bytes
