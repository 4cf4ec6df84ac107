"""How much of a GPU's budget is left to the gaps between blocks.

[Note: Memory in gaps]
The budget is what PyTorch's allocator reserves, not what it has handed out. Memory that comes free between blocks serves a larger
request only if it is in one piece. Where there is no such piece, the allocator waits for the GPU, takes free pages away and maps
them again elsewhere (a *retry*), in the middle of an iteration; at worst it finds too little and training ends. So a part of the
budget, the reserve, belongs to no block. How much is needed depends on the sizes and the order of blocks. It is learned: a
planned iteration with retries raises the reserve, and the iterations to come are profiled and planned with the rest. So in the
steady state there are no retries, and the budget stays the limit of what is reserved. Retries that a raise does not lower have
another cause, such as memory of user code that lies in pieces: then the reserve stays, and a warning says whose memory it is.

Why not a pool of its own for blocks that come back (`torch.cuda.MemPool`): stages allocate what later leaves, so the same bytes
would be counted in two pools whose peaks lie at different times. Why not own pages (`cuMemMap`): each move would pay for mapping
and access rights, some 80 microseconds for each 2 MiB, and Inductor's own allocations would not be in them.
"""

from __future__ import annotations

import logging
from typing import Protocol

logger = logging.getLogger("teraio")

# The reserve grows by this part of the budget at first, and by twice as much each time: each raise costs a plan.
_STEP_SHARE = 32
_MOST_SHARE = 4  # it grows to this part of the budget at most
_WARM_UP = 2  # planned iterations in which the allocator may still find its places


class Allocator(Protocol):
    """An allocator that counts. spare_bytes: the reserve, in bytes."""

    spare_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """Bytes that it has taken from the device, handed out or not."""

    @property
    def retries(self) -> int:
        """How often so far it had to take free memory away to serve a request."""

    def describe_pools(self) -> str:
        """Say for people how much memory is in use, and how much lies free, for stages and for all others. May take long."""


class Reserve:
    """The part of `budget_bytes` that no block may use; see [Note: Memory in gaps]."""

    def __init__(self, allocator: Allocator, budget_bytes: int) -> None:
        self._allocator = allocator
        self._step_bytes = budget_bytes // _STEP_SHARE
        self._most_bytes = max(budget_bytes // _MOST_SHARE, allocator.spare_bytes)
        self._known = allocator.retries
        self._iterations = 0
        self._before_raise: int | None = None  # retries in the iteration for which it was raised last
        self._helps = True

    @property
    def size_bytes(self) -> int:
        """Its size now."""
        return self._allocator.spare_bytes

    def begin(self) -> None:
        """A plan takes over. What the allocator does in the next iterations does not count yet."""
        self._iterations = 0

    def planned_iteration_ended(self) -> bool:
        """Raise the reserve if the allocator had to take memory away in this iteration. Return whether it was raised."""
        retries = self._allocator.retries
        new, self._known = retries - self._known, retries
        self._iterations += 1
        if not new or self._iterations <= _WARM_UP or not self._helps or self._allocator.spare_bytes >= self._most_bytes:
            return False
        # A raise that has not lowered the number of times: there is another cause, such as memory of user code in pieces.
        if self._before_raise is not None and new >= self._before_raise:
            self._helps = False
            logger.warning(
                "the allocator takes memory away %d times an iteration, and keeping %s bytes free does not help (%s); allocate "
                "what stays before training, or call torch.cuda.empty_cache() before it",
                new,
                f"{self.size_bytes:,}",
                self._allocator.describe_pools(),
            )
            return False
        self._before_raise = new
        self._allocator.spare_bytes = min(self._allocator.spare_bytes + self._step_bytes, self._most_bytes)
        self._step_bytes *= 2
        return True
