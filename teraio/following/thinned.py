"""Plans for smaller inputs: a plan for large ones, without the moves that small ones have room for.

[Note: Thinned plans]
One plan is followed for inputs of all sizes, see [Note: Positions] in `teraio.following.observer`. It is made for the largest, so
smaller ones move blocks for which there would be room. When an iteration with clearly smaller inputs has run, its own sizes and
times tell what can stay on the device: the plan is replayed with fewer and fewer moves, the largest left out first, as long as it
fits and ends no later. It serves for all inputs that are no larger in any size. What moves over the end of an iteration does so
as ever, so that each iteration finds blocks where any of these plans expects them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import planner
from planner.errors import TeraioError
from runtime.execution import SizedGraph
from teraio.following.schedule import StageSchedule
from teraio.profiling import Iteration, Profile

_MOST = 12  # plans that are kept for one plan
_CLEARLY_SMALLER = 0.9  # of the bytes of the next larger inputs that have a plan of their own


class _Thinned(NamedTuple):
    """What is followed where the first graph has no larger inputs than `first`.

    made_bytes: see `Iteration`. left_out: number of moves. ended: for smaller inputs nothing more can be left out.
    """

    first: SizedGraph
    made_bytes: int
    schedule: StageSchedule
    left_out: int
    ended: bool


class ThinnedPlans:
    """The plans for smaller inputs that belong to a plan. All calls are for the training thread.

    made_bytes: see `Iteration`; of the inputs that the plan itself is for.
    """

    def __init__(self, profile: Profile, plan: planner.Plan) -> None:
        self._profile = profile
        self._plan = plan
        self._known: list[_Thinned] = []  # the smallest first
        self.made_bytes = profile.made_bytes
        self._comparable = True  # until an iteration is found that used other blocks than the plan's, or used them otherwise

    def schedule_for(self, first: Hashable) -> StageSchedule | None:
        """Return what to follow in an iteration whose first region is the run of `first`; None for the plan itself."""
        known = self._smallest_for(first)
        return None if known is None else known.schedule

    def _smallest_for(self, first: Hashable) -> _Thinned | None:
        return next((known for known in self._known if _no_larger(first, known.first)), None)

    def wanted(self, iteration: Iteration) -> bool:
        """Return whether the inputs of an iteration that ran as planned are clearly smaller than what there are plans for."""
        runs = [region.identity for region in iteration.regions if isinstance(region.identity, SizedGraph)]
        if not self._comparable or len(self._known) == _MOST:
            return False
        if not runs or len({run.graph for run in runs}) < len(runs):  # each microbatch has sizes of its own
            return False
        known = self._smallest_for(runs[0])
        if known is not None and known.ended:
            return False
        return iteration.made_bytes < _CLEARLY_SMALLER * (self.made_bytes if known is None else known.made_bytes)

    def add(self, small: Profile) -> None:
        """Make the plan for the inputs of a profile. Waits for about ten replays."""
        blocks, moves = small.trace.blocks, self._plan.moves
        first = small.iteration.regions[0].identity
        used, planned = ([(block.name, block.uses) for block in each] for each in (blocks, self._profile.trace.blocks))
        if not isinstance(first, SizedGraph) or used != planned:
            self._comparable = False
            return
        count = len(self._profile.trace.stages) + len(self._plan.recompute)
        inside = [number for number, move in enumerate(moves) if move.before < count]
        # What is too small to move at this size does not.
        inside.sort(key=lambda number: (blocks[moves[number].block].movable, -blocks[moves[number].block].size_bytes))
        fewest, most = sum(not blocks[moves[number].block].movable for number in inside), len(inside)
        whole = self._seconds(small.trace, inside[:fewest])
        while whole is not None and fewest < most:
            half = (fewest + most + 1) // 2
            seconds = self._seconds(small.trace, inside[:half])
            fewest, most = (half, most) if seconds is not None and seconds <= whole else (fewest, half - 1)
        schedule = StageSchedule.of(self._profile, self._without(inside[:fewest]))
        larger = self._smallest_for(first)
        ended = fewest == len(inside) or larger is not None and larger.left_out == fewest  # smaller ones will not do with fewer
        self._known.append(_Thinned(first, small.made_bytes, schedule, fewest, ended))
        self._known.sort(key=lambda known: known.made_bytes)

    def _without(self, numbers: Sequence[int]) -> planner.Plan:
        left_out = frozenset(numbers)
        moves = tuple(move for number, move in enumerate(self._plan.moves) if number not in left_out)
        return self._plan.model_copy(update={"moves": moves})

    def _seconds(self, trace: planner.Trace, left_out: Sequence[int]) -> float | None:
        """Return how long an iteration takes without these moves; None if it does not fit."""
        plan = self._without(left_out).model_copy(update={"trace_fingerprint": trace.fingerprint})
        try:
            return planner.simulate(trace, plan).iteration_seconds
        except TeraioError:
            return None


def _no_larger(one: Hashable, other: SizedGraph) -> bool:
    return (
        isinstance(one, SizedGraph)
        and one.graph == other.graph
        and all(a <= b for a, b in zip(one.sizes, other.sizes, strict=True))
    )
