"""What is followed for shorter inputs, see [Note: Thinned plans] in `planner.policies.shorter`."""

from __future__ import annotations

from collections.abc import Hashable

import planner
from runtime.execution import SizedGraph
from teraio.following.schedule import StageSchedule
from teraio.profiling import Profile, first_sized


class ThinnedPlans:
    """The plans for shorter inputs that belong to a plan. All calls are for the training thread; none waits."""

    def __init__(self, profile: Profile, plan: planner.Plan) -> None:
        self._profile = profile
        self._plan = plan
        self._graph = first_sized(profile.iteration)
        self._schedules: dict[int, StageSchedule] = {}  # by length
        self._longest = 0

    def length_of(self, graph: Hashable) -> int | None:
        """Return the length of the inputs of a graph, if it is the one by which lengths are told."""
        lengths = self._profile.trace.lengths
        if lengths is None or self._graph is None or not isinstance(graph, SizedGraph) or graph.graph != self._graph.graph:
            return None
        return graph.sizes[lengths.place] if lengths.place < len(graph.sizes) else None

    def schedule_for(self, graph: Hashable, *, begins: bool) -> StageSchedule | None:
        """Return what moves from a run of this graph on, by the longest inputs of the iteration so far; None: all of the plan.

        begins: the iteration begins with this run.
        """
        self._longest = max(self.length_of(graph) or 0, 0 if begins else self._longest)
        fitting = [each for each in self._plan.shorter if each.length >= self._longest] if self._longest else []
        if not fitting:
            return None
        shortest = fitting[-1]
        if shortest.length not in self._schedules:
            thinned = self._plan.thinned(shortest.left_out, self._profile.trace)
            self._schedules[shortest.length] = StageSchedule.of(self._profile, thinned)
        return self._schedules[shortest.length]
