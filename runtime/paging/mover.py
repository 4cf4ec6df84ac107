"""What the pager needs of a device: copies of blocks to a lower tier and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.device import Span
from runtime.paging.block import Block
from runtime.storage import RangeCopy

Done = Callable[[StorageError | None], None]
"""Called once, in any thread, when a copy that threads make has ended; with its error if it failed."""


def dropped_message(block: Block) -> str:
    """Say what whoever accesses a dropped block has to do."""
    return (
        f"{block.name} ({block.kind}, {block.size_bytes:,} bytes) is not in memory: teraio has dropped it, to make it anew when "
        "the backward pass needs it. If your code reads it before, set the option recompute='off'"
    )


class Mover(Protocol):
    """Copies blocks between the device and the tiers below. The pager's lock guards the calls.

    `copy_out` and `copy_in` return at once; the other calls are short.

    [Note: Two kinds of time]
    A copy that threads make has ended when its `Done` is called. A copy that the device makes by itself, in the order of its
    queues, is only queued when `copy_out` or `copy_in` returns True, and there is no `Done`. `finished` returns whether it has
    ended. Whoever needs its result makes the device wait for it, not the host: `wait_resident` for copies in, `release` for
    copies out.
    """

    @property
    def keeps_mappings(self) -> bool:
        """Whether it has to be told that user code has run, see `invalidate_mapping`."""

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        """Return the part of `storage` that can leave the device; None if the storage has to stay."""

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        """Whether `storage`, the block's, still has the memory that the block was last seen with or moved to."""

    def maybe_replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return those of `blocks` whose storages may have other memory or size now. A quick look at many; all is right too."""

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Move the data of `storage` to memory that it can leave the device from, unless it is there or must stay where it is."""

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Let the storage stay where it is for good: its memory is another library's."""

    def trim(self, spare_bytes: int) -> None:
        """Free memory that is kept for reuse, but for `spare_bytes`: so much of the budget is not in use."""

    def together(self) -> AbstractContextManager[object]:
        """Return a context for copies that the training thread lets begin together: the device computes nothing new meanwhile."""

    def has_room(self, block: Block, tier: WaitingTier) -> bool:
        """Whether the block has a slot in the tier, or could get one."""

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        """Begin to copy a block to a slot in `tier`; in the first tier with room if `tier` is full or None.

        Returns whether the device makes the copy by itself. Raises StorageFullError if no tier has room, StorageError if the copy
        cannot begin.
        """

    def finished(self, block: Block) -> bool:
        """Whether the device has ended a copy out. Never waits. Such copies end in the order in which they began."""

    def release(self, block: Block) -> None:
        """Free the memory of a block whose slot is valid. From now on the slot stands in for it."""

    def discard(self, block: Block) -> None:
        """Free the memory of a block that has no slot. Its content is gone, and whoever accesses it gets an error."""

    def renew(self, block: Block, fresh: torch.UntypedStorage) -> None:
        """Give a discarded block the memory of `fresh`, a storage of its size that nobody else uses."""

    def drop_copy(self, block: Block) -> None:
        """Free the slot of a block that is on the device, and whose copy in has ended."""

    def copy_in(self, block: Block, done: Done) -> bool:
        """Begin to copy a block from its slot into new memory. `install` gives that memory to the block's storage.

        Returns whether the device makes the copy by itself. Raises StorageError if the copy cannot begin.
        """

    def install(self, block: Block) -> None:
        """Give the block's storage the memory that `copy_in` fills."""

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Make what the device does from now on wait until the copies in of these blocks have ended.

        In the debug mode the host waits too. Raises ChecksumError there if a block is not what it was when it left.
        """

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to copy a range of a lent slot, from `begin_bytes` on, to `memory`, a tensor of bytes on the device.

        Address and size of `memory` and `begin_bytes` are multiples of ALIGNMENT_BYTES. Bytes beyond the slot's end are not
        copied. The caller owns the memory, and must not touch it before it has waited for the copy. The mover keeps it alive
        until then. Raises StorageError if the copy cannot begin.
        """

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        """Begin to copy `memory` to a range of a lent slot, after all computation that was queued so far; see `read_range`."""

    def prioritize(self, block: Block) -> None:
        """Move the copy of this block to the front of its link, if it has not begun."""

    def check(self) -> None:
        """Raise StorageIOError if a copy has made no progress for too long: its drive does not answer any more."""

    def poll(self) -> None:
        """Free what copies needed that have ended meanwhile. Never waits."""

    def invalidate_mapping(self, block: Block) -> None:
        """The slot of a block that is away may be changed, or was: by user code through what stands in for it, or by the host's
        processor. Drop what is cached or known of its content."""

    def host_address(self, block: Block) -> int | None:
        """Return where the host's processor can read and write the slot of a block that is away.

        None if the slot is not in the host tier, or not in one piece.
        """

    def forget(self, block: Block) -> None:
        """The block is gone: free its slot."""

    def close(self) -> None:
        """Stop moving. All blocks must be on the device. Waits until no copy is running."""
