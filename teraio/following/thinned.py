"""What is followed for shorter inputs, see [Note: Thinned plans] in `planner.policies.shorter`."""

from __future__ import annotations

from collections.abc import Hashable

import planner
from planner.schema import dominates
from runtime.execution import SizedGraph
from teraio.following.schedule import StageSchedule
from teraio.profiling import Iteration, Profile, first_sized

_TELLING = 0.5  # of the time of a planned iteration: shorter ones say little of that


class ThinnedPlans:
    """The plans for shorter inputs that belong to a plan. All calls are for the training thread; none waits."""

    def __init__(self, profile: Profile, plan: planner.Plan) -> None:
        self._profile = profile
        self._plan = plan
        self._graph = first_sized(profile.iteration)
        self._schedules: dict[tuple[int, ...], StageSchedule] = {}  # by sizes
        self._largest: tuple[int, ...] = ()

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
        """Return whether all inputs of an iteration, which ran the graphs of the plan, are of the sizes that the plan is for."""
        lengths = self._profile.trace.lengths
        if lengths is None:
            return iteration.signature == self._profile.iteration.signature
        return {self.sizes_of(region.identity) for region in iteration.regions} <= {None, lengths.highest}

    def shares(self, iteration: Iteration) -> tuple[float, ...] | None:
        """Return what share of its time with the inputs that the plan is for each stage takes with those of an iteration.

        None if its inputs were of several sizes, or of sizes for which it is not known, or so much shorter that they say little.
        """
        trace, found = self._profile.trace, {self.sizes_of(region.identity) for region in iteration.regions} - {None}
        lengths, sizes = trace.lengths, next(iter(found), None)
        if lengths is None or sizes is None or len(found) > 1:
            return None
        if iteration.structure != self._profile.iteration.structure or not dominates(sizes, lengths.lowest):
            return None
        known = lengths.stage_shares(sizes)
        shares = tuple(known.get(stage.id, 1.0) for stage in trace.stages)
        here = sum(share * stage.duration_seconds for share, stage in zip(shares, trace.stages, strict=True))
        return shares if min(shares) > 0 and _TELLING * trace.ideal_seconds <= here else None

    def schedule_for(self, graph: Hashable, *, begins: bool) -> StageSchedule | None:
        """Return what moves from a run of this graph on, by the largest inputs of the iteration so far; None: all of the plan.

        begins: the iteration begins with this run.
        """
        before, sizes = () if begins else self._largest, self.sizes_of(graph) or ()
        self._largest = tuple(map(max, before, sizes)) if before and sizes else before or sizes
        found = self._plan.shorter_for(self._largest) if self._largest else None
        if found is None:
            return None
        if found.sizes not in self._schedules:
            followed = self._plan.followed(found, self._profile.trace)
            self._schedules[found.sizes] = StageSchedule.of(self._profile, followed)
        return self._schedules[found.sizes]
