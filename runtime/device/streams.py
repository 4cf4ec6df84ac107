"""The queues of a device that copies by itself while it computes.

[Note: What orders what]
A device runs the work of each lane in the order in which the host has queued it, and the lanes side by side. What one
lane must see of another it waits for by an event. teraio keeps five rules, and needs no others:

1. A copy out waits for all computation that was queued before it: whoever wrote the block has written it.
2. A copy in waits for all computation, also the user's, that was queued before its memory was taken: whoever used that
   memory before has done with it, and what user code wrote to the copy is there.
3. Before a stage may use a block, computation waits for the block's copy in.
4. Before the memory of a block is given back, computation waits for its copies out and in. Freed memory serves later
   computation, and later copies in by rule 2: both come after that wait.
5. A block whose copy in is not known to have ended is kept alive: its memory is not freed while something writes to it.

The user's lane is joined with the lane of computation where a compiled region begins and ends. A slot needs no rule of
its own: copies out run in one lane, one after the other, and a copy in reads a slot that rule 4 has waited for.
"""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from runtime.device.device import Mark

if TYPE_CHECKING:
    import torch


class Lane(enum.Enum):
    """COMPUTE: stages. USER: what user code runs between regions. OUTWARD, INWARD: copies to and from the host tier."""

    COMPUTE = enum.auto()
    USER = enum.auto()
    OUTWARD = enum.auto()
    INWARD = enum.auto()


class Event(Protocol):
    """A point in a lane."""

    def done(self) -> bool:
        """Whether the device has passed it. Never blocks."""

    def wait(self) -> None:
        """Block the calling thread until the device has passed it."""


class Streams(Protocol):
    """The lanes of one device, and its memory. All calls but `Event.wait` and `read` return at once."""

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""

    @property
    def in_region(self) -> bool:
        """Whether a compiled region runs: user code has queued nothing since the lanes were joined."""

    def region(self) -> AbstractContextManager[None]:
        """Computation within goes to the lane of computation, after all that user code has queued, and before the rest."""

    def record(self, lane: Lane) -> Event:
        """A point in `lane` after all that was queued there so far."""

    def wait(self, lane: Lane, event: Event) -> None:
        """What is queued in `lane` from now on waits for `event`."""

    def mark_lane(self, lane: Lane) -> Mark:
        """The moment when the device comes to what is queued in `lane` next."""

    def copy(self, lane: Lane, *, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy between addresses, one on the device and one in memory that it can reach."""

    def fill(self, lane: Lane, address: int, size_bytes: int, value: int) -> None:
        """Queue the writing of one value (0 to 255) to all bytes of a piece of device memory."""

    def read(self, lane: Lane, address: int, size_bytes: int) -> memoryview:
        """A copy of device memory, the caller's, as it is after all that was queued in `lane` so far. Blocks until then."""

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """Memory on the device, from the pool of the lane of computation: freed, it serves what is queued there after.

        Raises StorageError where there is none.
        """

    def can_move(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage's memory is this device's and its own, so that it may be freed, and enough to be worth it."""

    def trim(self, spare_bytes: int) -> None:
        """So much of the budget is not in use: free memory that is kept for reuse should not be larger."""
