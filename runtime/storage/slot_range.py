"""A range of a slot: what is read and written when the host updates a block in the tier that it waits in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

from planner.errors import StorageError
from runtime.storage.store import ALIGNMENT_BYTES, Extent, Slot, alternate


class RangeCopy(Protocol):
    """A copy of a range of a slot that has begun, or that the device has queued."""

    def wait(self) -> None:
        """Order the device's next work after the copy. If threads make the copy, wait until it has ended.

        Raises the StorageError that stopped the copy, StorageIOError if a drive no longer answers.
        """


def slot_range(slot: Slot, begin_bytes: int, size_bytes: int) -> Slot:
    """Return `size_bytes` of `slot` from `begin_bytes` on, or fewer if the slot ends before. The result is for copies only.

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
    """Reorder places in a slot so that its drives take turns. A drive that has no places left is skipped."""
    ends = list(accumulate(extent.length_bytes for extent in slot.extents))
    by_drive: dict[int, list[int]] = {}
    for begin in begins_bytes:
        extent = next(e for e, end in zip(slot.extents, ends, strict=True) if begin < end)
        by_drive.setdefault(extent.drive, []).append(begin)
    return list(alternate(by_drive.values()))


def _within(extents: Sequence[Extent], begin: int, end: int) -> list[Extent]:
    """Return those parts of the extents that lie between two places in their slot."""
    found, first = [], 0
    for extent in extents:
        skipped = max(begin - first, 0)
        length = min(extent.length_bytes, end - first) - skipped
        if length > 0:
            found.append(replace(extent, offset_bytes=extent.offset_bytes + skipped, length_bytes=length))
        first += extent.length_bytes
    return found
