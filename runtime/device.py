"""Where stages run: order, time, and memory that can leave; and the queues of a device that copies while it computes.

[Note: What orders what]
A device runs the work of each lane in the order in which the host has queued it, and runs the lanes in parallel. A lane that
needs a result of another lane waits for an event. teraio keeps seven rules, and needs no others:

1. A copy out waits for all computation that was queued before it: whoever wrote the block has written it.
2. A copy in waits for all computation, also the user's, that was queued before its memory was allocated: whoever used that
   memory before has finished, and what user code wrote to the slot is there.
3. Before a stage may use a block, computation waits for the block's copy in, or for one that was queued later in that lane.
4. Before the memory of a block is given back, computation waits for its copies out and in. Freed memory serves later
   computation, and later copies in by rule 2: both come after that wait.
5. A block is kept alive until its copies out and in are known to have ended: its memory is not freed while something reads or
   writes it, also if nobody else holds the block any more.
6. Memory that user code allocated, once it is freed, serves nobody and is not taken away before computation has passed what was
   queued there until then: also that of gradients and batches, which a stage frees while the region still runs.
7. Before the host's processor reads or writes a slot, it waits for the last copy from or to that slot, and for all computation,
   also the user's, that was queued when the update was asked for. Before it uses a free slot, it waits for the whole device.

Freed memory need not serve again: where the device is short of memory, PyTorch's allocator takes free pages away altogether
(`cuMemUnmap`). It waits for the stream that they were allocated for before, and for no other. That is the lane of computation,
which has waited by rule 4, except for what user code allocated: for that, rule 6, by which the allocator knows of the lane of
computation. Waits in the user's lane would not do. If it is the default stream, the allocator waits for the default stream of
the current device, which may be another one; and within a region, it waits for computation at the end only.

No rule protects what user code frees between regions while kernels in its own stream still use it, if the memory was a stage's
and PyTorch unmaps it at once: by `torch.cuda.empty_cache()`, or where the whole GPU is short of memory. To hold it until the next
region would keep the memory of models that nobody has any more.

The user's lane is joined with the lane of computation where a compiled region begins and ends. Between copies, a slot needs no
rule of its own: copies out run in one lane, one after the other, and a copy in reads a slot that rule 4 has waited for.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from planner.errors import StorageError

if TYPE_CHECKING:
    import torch

MIN_MOVED_BYTES = 1 << 20  # smaller blocks stay on the device: system calls would cost more than the memory is worth


class DeviceMemoryError(StorageError):
    """The device's allocator has no memory in one piece, although the budget has room. The pager makes more room then."""


class Mark(Protocol):
    """A point in the device's work."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from another mark of the same device to this one. Waits until the device has passed both."""

    def wait(self) -> None:
        """Wait until the device has passed it. For any thread."""


class Pieces(Protocol):
    """What lies where in the memory that stages allocate: their allocator serves each request in one piece. For the training
    thread, while no stage runs."""

    def begin_recording(self) -> bool:
        """Record what is allocated and freed from now on. Returns False if that cannot be."""

    def recorded(self) -> Sequence[int]:
        """End the recording. Return the bytes of each allocation, in their order, and where the nth of them was freed, -n.

        Those of less than MIN_MOVED_BYTES do not count, nor do blocks, nor what has memory of its own, away from the blocks.
        """

    def gather(
        self,
        history: Sequence[int],
        movable: Callable[[], MutableMapping[int, int]],
        move: Callable[[int, torch.UntypedStorage], None],
        let_go: Callable[[int], bool],
    ) -> bool:
        """Let free memory lie so that it serves a history that was recorded, as far as that can be: blocks make way, and memory
        that the allocator may still take goes where there are gaps. Never waits for the device. Returns whether nothing had to.

        movable: returns the bytes of blocks that may move, by address. move: gives the block at an address the memory of a
        storage, with its content, and frees that which it had. let_go: frees at least so many bytes of what may not move, for
        which computation waits then; returns False if there are none.
        """

    def copy(self, address: int, fresh: torch.UntypedStorage) -> None:
        """Queue a copy of what lies at an address to all of the memory of `fresh`, in the order of computation. Never waits."""


class Device(Protocol):
    """asynchronous: the host only queues the work, so that times are known only later. pieces: None where memory has none.

    The bodies here are for a device that does its work before a call returns, and whose memory is never short in one piece.
    """

    @property
    def asynchronous(self) -> bool: ...

    @property
    def pieces(self) -> Pieces | None: ...

    @property
    def retries(self) -> int:
        """How often its allocator had to wait for the device and take free memory away so far. Takes some 20 µs on a GPU."""

    def region(self) -> AbstractContextManager[None]:
        """Put a compiled region between what user code has asked for so far and what it asks for next."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """Return the point after all that was asked for so far. Never waits."""
        return WallMark(time.perf_counter())

    def synchronize(self) -> None:
        """Wait until the device has ended everything that it was asked for so far, also by user code."""
        return

    def keep_until_computed(self, storage: torch.UntypedStorage) -> None:
        """The memory of a storage that user code has allocated, once it is freed, serves nobody and is not taken away before the
        device has passed the computation that was asked for until then. Never waits. What a region allocates does not need it.
        """
        return

    def try_memory(self, size_bytes: int) -> None:
        """Raise DeviceMemoryError if the allocator has not so many bytes in one piece for the stage that runs next."""
        return

    def give_back_memory(self) -> None:
        """Let the allocator give all memory back that nobody uses, so that the rest serves in any sizes. Waits for the device."""
        return

    def trim(self, spare_bytes: int) -> None:
        """Free memory that is kept for reuse, but for `spare_bytes`: so much of the budget is not in use."""

    def external_bytes(self, known_bytes: int) -> int:
        """Return the bytes in use on the device that are not among `known_bytes`, those of the pager; 0 if unknown."""
        return 0


@dataclass(frozen=True, slots=True)
class WallMark:
    """A reading of the host's clock. Its zero has no meaning."""

    at_seconds: float

    def seconds_since(self, earlier: WallMark) -> float:
        return self.at_seconds - earlier.at_seconds

    def wait(self) -> None:
        """Return at once: what was asked for before has been done."""


class CpuDevice(Device):
    """The CPU: each call does its work before it returns. trim: of the memory that blocks are in.

    Main memory has other users, and no allocator of its own that could be short: the budget is for what the pager knows of.
    """

    asynchronous = False
    pieces: Pieces | None = None
    retries = 0

    def __init__(self, trim: Callable[[int], None] = lambda spare_bytes: None) -> None:
        self._trim = trim

    def trim(self, spare_bytes: int) -> None:
        self._trim(spare_bytes)


@dataclass(frozen=True, slots=True)
class Span:
    """Whole pages of memory. address, length_bytes: multiples of the page size. serial: of the allocation; never used twice.

    lead_bytes: where the storage's data begins in it: as in its file, see [Note: Blocks in files].
    """

    address: int
    length_bytes: int
    serial: int = 0
    lead_bytes: int = 0


class DeviceBytes:
    """Bytes in device memory as the CUDA array interface (version 3) describes them: for libraries. Does not own them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class Lane(enum.Enum):
    """COMPUTE: stages. USER: what user code runs between regions. OUTWARD, INWARD: copies to and from the host tier."""

    COMPUTE = enum.auto()
    USER = enum.auto()
    OUTWARD = enum.auto()
    INWARD = enum.auto()

    __hash__ = object.__hash__  # `Enum` hashes the name, in Python; lanes are looked up for all that a device is asked for


# For code that runs for each copy: Python 3.11 takes as long to look a member up in an enum as to call a function.
COMPUTE, USER, OUTWARD, INWARD = Lane


class Event(Protocol):
    """A point in a lane."""

    def done(self) -> bool:
        """Whether the device has passed it. Never waits."""

    def wait(self) -> None:
        """Wait until the device has passed it."""


class TimedEvent(Event, Mark, Protocol):
    """A point in a lane, with the moment at which the device passes it."""


class Streams(Protocol):
    """The lanes of one device, and its memory. All calls except `Event.wait` and `read` return at once."""

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""

    @property
    def in_region(self) -> bool:
        """Whether a compiled region runs. User code has queued nothing since it began."""

    def record(self, lane: Lane) -> Event:
        """Return a point in `lane` after all that was queued there so far."""

    def wait(self, lane: Lane, event: Event) -> None:
        """Make what is queued in `lane` from now on wait for `event`."""

    def mark_lane(self, lane: Lane) -> TimedEvent:
        """Return the moment when the device reaches what is queued in `lane` next."""

    def copy(self, lane: Lane, *, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy between two addresses: one on the device, the other in memory that the device can reach."""

    def fill(self, lane: Lane, address: int, size_bytes: int, value: int) -> None:
        """Queue a write of one value (0 to 255) to all bytes of a range of device memory."""

    def read(self, lane: Lane, address: int, size_bytes: int) -> memoryview:
        """Return a copy, the caller's, of device memory as it is after all that was queued in `lane` so far. Waits until then."""

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """Allocate device memory from the pool of the lane of computation. Once freed, it serves later work of that lane.

        Raises DeviceMemoryError if there is none in one piece.
        """

    def can_move(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage owns its memory, so that it may be freed, on this device, and is large enough to be moved."""
