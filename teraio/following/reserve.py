"""How much of a GPU's budget stays free, so that its allocator finds memory in one piece: what retries cost is weighed by times.

[Note: Memory in gaps]
The budget is what PyTorch's allocator reserves, not what it has handed out. Memory that comes free between blocks serves a
larger request only if it is in one piece. Where there is no such piece, the allocator waits for the GPU, takes free pages away
and maps them again elsewhere (a *retry*), in the middle of an iteration. So a part of the budget, the reserve, belongs to no
block. More of it costs time as well: what then does not fit has to be copied. Which costs more depends on the sizes and the order
of blocks.

So it is tried. If iterations show retries and take longer than planned, a plan with a larger reserve is made, while the old one
is followed. It takes over if it promises less than iterations take with the best of what was tried, as measured. If iterations
under it have retries as well, the next raise is tried. In the end the best of what was tried comes back, and nothing more is
tried under this profile. A cause that no reserve cures, such as memory of user code in pieces, shows in the same way.

Why not a pool of its own for blocks that come back (`torch.cuda.MemPool`): stages allocate what later leaves, so the same bytes
would be counted in two pools whose peaks lie at different times. Why not own pages (`cuMemMap`): each move would pay for mapping
and access rights, some 80 microseconds for each 2 MiB, and Inductor's own allocations would not be in them.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from teraio.machine import Allocator

logger = logging.getLogger("teraio")

Followed = TypeVar("Followed")

# Share by which another plan must be better: a change costs one iteration, which begins with blocks in the wrong tiers.
WORTHWHILE = 0.01
# The reserve grows by this part of the budget at first, and by twice as much each time: each raise costs a plan.
_STEP_SHARE = 32
_MOST_SHARE = 4  # it grows to this part of the budget at most
_WARM_UP = 2  # iterations under a plan in which the allocator may still find its places
_COMPARED = 3  # iterations whose times are compared: one that was disturbed changes nothing


class _WithoutRetries:
    """Stands for an allocator where there is none."""

    spare_bytes = reserved_bytes = retries = 0

    def describe_pools(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Tried(Generic[Followed]):
    """A reserve, the plan that was followed with it, and what the latest iterations have shown: median seconds, all retries."""

    spare_bytes: int
    followed: Followed
    seconds: float
    retries: int


class Reserve(Generic[Followed]):
    """The part of `budget_bytes` that no block may use, see [Note: Memory in gaps]. Followed: whatever stands for a plan."""

    def __init__(self, allocator: Allocator | None, budget_bytes: int) -> None:
        """allocator: None if there is none, or if the plan is to stay: then there are no raises."""
        self._allocator = allocator or _WithoutRetries()
        self._step_bytes = budget_bytes // _STEP_SHARE
        self._most_bytes = budget_bytes // _MOST_SHARE
        self._known = self._allocator.retries
        self._tried: list[Tried[Followed]] = []  # without what is followed now
        self.begin()

    def begin(self) -> None:
        """Another plan takes over, or the allocator begins anew: forget the iterations so far."""
        self._left = _WARM_UP
        self._latest: deque[tuple[float, int]] = deque(maxlen=_COMPARED)

    def iteration_ended(self, seconds: float) -> None:
        """Take in an iteration that ran as planned."""
        retries = self._allocator.retries
        if self._left:
            self._left -= 1
        else:
            self._latest.append((seconds, retries - self._known))
        self._known = retries

    def shown(self, followed: Followed) -> Tried[Followed] | None:
        """Return what the latest iterations show; None before there are enough to compare."""
        if len(self._latest) < _COMPARED:
            return None
        seconds, retries = statistics.median(each for each, _ in self._latest), sum(count for _, count in self._latest)
        return Tried(self._allocator.spare_bytes, followed, seconds, retries)

    @property
    def raised(self) -> bool:
        """Whether it has been raised, and what is best is still to be found."""
        return bool(self._tried)

    def next_raise(self, now: Tried[Followed], predicted_seconds: float) -> int:
        """Return by how many bytes to raise it next; 0 if that cannot pay. predicted_seconds: by the plan that is followed."""
        # With less room, no plan promises less than the one that is followed.
        if not now.retries or not self.pays(now, predicted_seconds):
            return 0
        return max(min(self._step_bytes, self._most_bytes - self._allocator.spare_bytes), 0)

    def pays(self, now: Tried[Followed], promised_seconds: float) -> bool:
        """Return whether that is less than iterations take with the best reserve so far."""
        return promised_seconds < _best([*self._tried, now]).seconds * (1 - WORTHWHILE)

    def try_more(self, raise_bytes: int, before: Tried[Followed]) -> None:
        """Raise it: the plan that was made for that takes over. before: what has been followed."""
        self._tried.append(before)
        self._allocator.spare_bytes += raise_bytes
        self._step_bytes *= 2

    def settle(self, now: Tried[Followed]) -> Tried[Followed]:
        """Raise it no more, return to the best that was tried, and say which that is."""
        tried, self._tried = [*self._tried, now], []
        best = _best(tried)
        self._step_bytes = 0
        if len(tried) == 1:
            return best
        self._allocator.spare_bytes = best.spare_bytes
        told = ", ".join(f"{each.seconds:.3f} s with {each.spare_bytes:,} bytes" for each in tried)
        logger.info("of what may stay free between blocks, %s bytes are best (%s)", f"{best.spare_bytes:,}", told)
        if best is tried[0] and min(each.retries for each in tried[1:]) >= best.retries:  # there is another cause
            logger.warning(
                "the allocator takes memory away %.1f times an iteration, and keeping more of it free does not help (%s): "
                "allocate what stays before training, or call torch.cuda.empty_cache() before it",
                tried[0].retries / _COMPARED,
                self._allocator.describe_pools(),
            )
        return best


def _best(tried: Sequence[Tried[Followed]]) -> Tried[Followed]:
    """Return the first, with the smallest reserve, that no other one plainly beats."""
    fastest = min(each.seconds for each in tried)
    return next(each for each in tried if each.seconds * (1 - WORTHWHILE) <= fastest)
