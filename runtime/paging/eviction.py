"""Who leaves the device first when memory is short."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.paging.block import ON_DEVICE, Block

_NEVER = 1 << 62


class EvictionPolicy:
    """Belady's rule: the block whose next use is furthest away leaves first.

    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.

    clock: position of the stage that runs now, counted since the start. A block whose `next_use` is not after the clock
    has no known next use, and leaves before all others.
    """

    def __init__(self) -> None:
        self.clock = 0

    def order(self, blocks: Iterable[Block], *, keep: Collection[Block] = ()) -> list[Block]:
        """Return the blocks that can be evicted now, the first to leave first; none of `keep`."""
        kept = frozenset(keep)
        idle = [b for b in blocks if b.state is ON_DEVICE and not b.pins and b.span is not None and b not in kept]
        idle.sort(key=lambda b: b.next_use if b.next_use > self.clock else _NEVER, reverse=True)
        return idle
