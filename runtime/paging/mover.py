"""What the pager needs of a device: how blocks leave it for a lower tier and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.device import Span
from runtime.paging.block import Block
from runtime.storage import RangeCopy

Done = Callable[[StorageError | None], None]
"""Called once when a copy has ended, or is in the device's queues, see [Note: Two kinds of time]; with the error if it failed."""


class Mover(Protocol):
    """Carries blocks. Copies return at once; the other calls are short.

    [Note: Two kinds of time]
    A copy that threads make has ended when its `Done` is called. A copy that the device makes by itself, in the order
    of its queues, is only queued then: `finished` tells whether it has ended, and whoever needs its result lets the
    device wait for it, not the host (`wait_resident` for copies in, `release` for copies out).
    """

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        """The part of `storage` that can leave the device, None if it has to stay."""

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        """Whether the block's storage still has the memory that it had when it was last seen, or was moved."""

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Move the data of `storage` to memory that can leave the device, if it is not there and may be moved."""

    def trim(self, spare_bytes: int) -> None:
        """So much of the budget is not in use: free memory that is kept for reuse may be that large."""

    def has_room(self, block: Block, tier: WaitingTier) -> bool:
        """Whether the block has a slot in the tier, or could get one."""

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> None:
        """Begin to copy a block to a slot of `tier`, or of the first tier with room if that has none or is None.

        Raises StorageFullError if there is no room for a slot anywhere.
        """

    def finished(self, block: Block) -> bool:
        """Whether a copy out whose `Done` was called has ended."""

    def release(self, block: Block) -> None:
        """Give the memory of a block back whose slot is valid; the slot stands in for it from now on."""

    def drop_copy(self, block: Block) -> None:
        """Free the slot of a block that is on the device and has landed."""

    def copy_in(self, block: Block, done: Done) -> None:
        """Begin to copy a block from its slot into fresh memory, beside what stands in for it."""

    def install(self, block: Block) -> None:
        """Put the memory that `copy_in` fills in place."""

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Let what the device does from now on wait until the copies in of these blocks have ended.

        In the debug mode it blocks until they have, and raises ChecksumError where one is not what it was when it left.
        """

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to copy from the slot of a block that is away, from `begin_bytes` on, to `memory`: bytes on the device.

        Address, size and place are multiples of ALIGNMENT_BYTES; what lies beyond the slot's end is left out. The memory stays
        the caller's, who must not touch it before the copy was waited for; the mover keeps it alive until its end.
        Raises StorageError if the copy cannot begin.
        """

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to copy what the device will have put into `memory` to the slot of a block that is away, see `read_range`."""

    def prioritize(self, block: Block) -> None:
        """A copy of this block that has not begun goes to the front of its link."""

    def check(self) -> None:
        """Raises StorageIOError if a copy has made no progress for too long: its drive does not answer any more."""

    def poll(self) -> None:
        """Let go of what copies needed that have ended meanwhile."""

    def invalidate_mapping(self, block: Block) -> None:
        """User code may have touched what stands in for a block that is away, or the processor its slot."""

    def host_address(self, block: Block) -> int | None:
        """Where the slot of a block that is away can be read and written by the processor; None if not in the host tier, in
        one piece."""

    def forget(self, block: Block) -> None:
        """The block is gone: free its slot."""

    def close(self) -> None:
        """Nothing will be moved any more. All blocks are on the device. Blocks until no copy is under way."""
