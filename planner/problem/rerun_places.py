"""Where recompute groups run again: as late as they can, so that what they make takes room for the shortest time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from planner.schema import Recompute, RecomputeGroup, Trace

__all__ = ["RerunPlaces"]


class RerunPlaces:
    """The places of the recompute groups of a trace.

    `usable`: the groups (ids) that can run again at their first use in the backward pass.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.alone: dict[int, int] = {}
        """The place of each group if no other one runs again, by id."""
        for group in trace.recompute:
            place = self._first_use(group)
            if place is not None and self._unchanged(group, place):
                self.alone[group.id] = place

    @property
    def usable(self) -> Collection[int]:
        """Return the ids of the groups that can run again, ascending."""
        return self.alone.keys()

    def of(self, groups: Collection[int]) -> tuple[Recompute, ...]:
        """Return the groups (ids) with their places, in the order in which they run.

        A group runs at the first use of its blocks in the backward pass: by a backward stage, or by a group of `groups` that
        reads them. Groups that cannot run again are left out.
        """
        trace, place = self._trace, dict[int, int]()
        wanted: dict[int, int] = {}  # by block, the first place of a group that reads it
        for group in sorted((trace.recompute[number] for number in set(groups)), key=lambda group: -group.stage):
            if group.id not in self.alone:
                continue
            at = min([self.alone[group.id], *(wanted[block] for block in group.blocks if block in wanted)])
            place[group.id] = at
            for block in group.reads:
                wanted[block] = min(at, wanted.get(block, at))
        return self.in_order(place)

    def in_order(self, places: Mapping[int, int]) -> tuple[Recompute, ...]:
        """Return groups (ids) with given places. Those with one place run in the order of their stages."""
        ordered = sorted(places, key=lambda number: (places[number], self._trace.recompute[number].stage))
        return tuple(Recompute(group=number, at=places[number]) for number in ordered)

    def options(self, number: int) -> tuple[int, ...]:
        """Return the backward stages that use a block of a group (id) after an idle time: places that may pay, ascending."""
        group, found = self._trace.recompute[number], set()
        for block in (self._trace.blocks[number] for number in group.blocks):
            for after, before in pairwise(block.uses):
                if before > after + 1 and self._trace.stages[before].phase == "backward" and self._unchanged(group, before):
                    found.add(before)
        return tuple(sorted(found))

    def together(self) -> Iterator[tuple[Recompute, ...]]:
        """Yield, for each backward stage, all groups that can run again there and make what is used from there on."""
        for stage in self._trace.stages:
            if stage.phase == "backward":
                groups = (self._trace.recompute[number] for number in self.alone)
                found = [each.id for each in groups if self._used_from(each, stage.id) and self._unchanged(each, stage.id)]
                if found:
                    yield self.in_order(dict.fromkeys(found, stage.id))

    def _used_from(self, group: RecomputeGroup, stage: int) -> bool:
        return any(self._trace.blocks[block].uses[-1] >= stage for block in group.blocks)

    def _first_use(self, group: RecomputeGroup) -> int | None:
        uses = [use for number in group.blocks for use in self._trace.blocks[number].uses if use > group.stage]
        return min((use for use in uses if self._trace.stages[use].phase == "backward"), default=None)

    def _unchanged(self, group: RecomputeGroup, place: int) -> bool:
        blocks = (self._trace.blocks[number] for number in (*group.reads, *group.blocks))
        return not any(group.stage < write < place for block in blocks for write in block.writes)
