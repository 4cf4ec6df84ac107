"""What is followed for shorter inputs, see [Note: Thinned plans] in `planner.policies.shorter`."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import planner
from planner.schema import WaitingTier, dominates
from runtime.execution import SizedGraph
from teraio.following.schedule import StageSchedule
from teraio.profiling import Iteration, Profile, first_sized

_IN_A_ROW = 4  # iterations with inputs as short, until blocks stay on the device over the iteration's end


class ThinnedPlans:
    """The plans for shorter inputs that belong to a plan. All calls are for the training thread; none waits."""

    def __init__(self, profile: Profile, plan: planner.Plan) -> None:
        self._profile = profile
        self._plan = plan
        self._graph = first_sized(profile.iteration)
        self._schedules: dict[tuple[tuple[int, ...], bool], StageSchedule] = {}  # by sizes, and by whether blocks stay
        self._largest: tuple[int, ...] = ()  # of this iteration so far
        self._before: deque[tuple[int, ...]] = deque(maxlen=_IN_A_ROW)
        self._staying: tuple[int, ...] = ()  # moves over the iteration's end that are left out
        self._stayed: tuple[int, ...] = ()  # those of the iteration before
        self._overdue: list[int] = []

    def sizes_of(self, graph: Hashable) -> tuple[int, ...] | None:
        """Return the sizes of the inputs of a graph, as in `Lengths`, if it is the one by which they are told."""
        lengths = self._profile.trace.lengths
        if lengths is None or self._graph is None or not isinstance(graph, SizedGraph) or graph.graph != self._graph.graph:
            return None
        return tuple(graph.sizes[place] for place in lengths.places) if max(lengths.places) < len(graph.sizes) else None

    def covers(self, iteration: Iteration, share: float) -> bool:
        """Return whether none of its inputs is smaller than that share of those for which something is known."""
        lengths = self._profile.trace.lengths
        if lengths is None:  # inputs did not vary before
            return not iteration.sizes_vary or iteration.made_bytes >= share * self._profile.made_bytes
        least = [share * size for size in lengths.lowest]
        found = (self.sizes_of(region.identity) for region in iteration.regions)
        return all(sizes is None or dominates(sizes, least) for sizes in found)

    def is_whole(self, iteration: Iteration) -> bool:
        """Return whether all inputs of an iteration, which ran the graphs of the plan, are of the sizes that the plan is for.

        Not where blocks had stayed on the device until it began.
        """
        lengths = self._profile.trace.lengths
        if lengths is None:
            return iteration.signature == self._profile.iteration.signature
        whole = {self.sizes_of(region.identity) for region in iteration.regions} <= {None, lengths.highest}
        return whole and not self._stayed

    def schedule_for(self, graph: Hashable, *, begins: bool) -> StageSchedule | None:
        """Return what moves from a run of this graph on, by the largest inputs of the iteration so far; None: all of the plan.

        begins: the iteration begins with this run.
        """
        if begins:
            self._before.append(self._largest)
            self._largest, self._stayed = (), self._staying
        sizes = self.sizes_of(graph) or ()
        self._largest = tuple(map(max, self._largest, sizes)) if self._largest and sizes else self._largest or sizes
        found, staying = self._plan.shorter_for(self._largest) if self._largest else None, False
        if found is not None and len(self._before) == _IN_A_ROW and all(self._before):
            latest = self._plan.shorter_for([max(column) for column in zip(self._largest, *self._before, strict=True)])
            if latest is not None and latest.staying:
                found, staying = latest, True
        kept = found.staying if found is not None and staying else ()
        self._overdue, self._staying = [number for number in self._staying if number not in kept], kept
        if found is None:
            return None
        if (found.sizes, staying) not in self._schedules:
            schedule = StageSchedule.of(self._profile, self._plan, found, staying=staying)
            self._schedules[found.sizes, staying] = schedule
        return self._schedules[found.sizes, staying]

    def overdue(self) -> list[tuple[int, WaitingTier]]:
        """Return the blocks (trace ids) that have stayed on the device where that ends now, and their tiers.

        To be called after `schedule_for`. Without those that come back at once.
        """
        count = len(self._profile.trace.stages) + len(self._plan.recompute)
        ended = [self._plan.moves[number] for number in self._overdue]
        return [(move.block, move.tier) for move in ended if move.prefetch is not None and move.prefetch.start > count]
