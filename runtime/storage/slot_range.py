"""A part of a slot: what is read and written where a block is updated in the tier that it waits in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, zip_longest
from typing import Protocol

from planner.errors import StorageError
from runtime.storage.store import ALIGNMENT_BYTES, Extent, Slot


class RangeCopy(Protocol):
    """A copy of a part of a slot that has begun, or is in the device's queues."""

    def wait(self) -> None:
        """What the device does from now on comes after the copy. Blocks until its end where threads make it.

        Raises the StorageError that it failed with, StorageIOError where a drive does not answer any more.
        """


def slot_range(slot: Slot, begin_bytes: int, size_bytes: int) -> Slot:
    """So many bytes of `slot` from `begin_bytes` on, fewer where it ends before; as a slot, for copies only.

    Raises StorageError unless both are multiples of ALIGNMENT_BYTES and the range begins within the slot.
    """
    end = min(begin_bytes + size_bytes, slot.size_bytes)
    if begin_bytes % ALIGNMENT_BYTES or size_bytes % ALIGNMENT_BYTES or not 0 <= begin_bytes < end:
        raise StorageError(
            f"bytes {begin_bytes:,} to {begin_bytes + size_bytes:,} are no range of the slot of block {slot.name!r}, which has "
            f"{slot.size_bytes:,} in pages of {ALIGNMENT_BYTES:,}; this is a bug in teraio, please report it"
        )
    return Slot(
        name=slot.name,
        size_bytes=end - begin_bytes,
        content_bytes=max(min(end, slot.content_bytes) - begin_bytes, 0),
        extents=tuple(_within(slot.extents, begin_bytes, end)),
        of=slot.of or slot,
    )


def in_turns(slot: Slot, begins_bytes: Sequence[int]) -> list[int]:
    """The same places in the slot, in an order that gives all of its drives work: each in turn, as far as it has any left."""
    ends = list(accumulate(extent.length_bytes for extent in slot.extents))
    by_drive: dict[int, list[int]] = {}
    for begin in begins_bytes:
        extent = next(e for e, end in zip(slot.extents, ends, strict=True) if begin < end)
        by_drive.setdefault(extent.drive, []).append(begin)
    return [begin for begin in chain.from_iterable(zip_longest(*by_drive.values())) if begin is not None]


def _within(extents: Sequence[Extent], begin: int, end: int) -> list[Extent]:
    """What of the extents lies between two places in their slot."""
    found, first = [], 0
    for extent in extents:
        skipped = max(begin - first, 0)
        length = min(extent.length_bytes, end - first) - skipped
        if length > 0:
            found.append(replace(extent, offset_bytes=extent.offset_bytes + skipped, length_bytes=length))
        first += extent.length_bytes
    return found
