"""Follows a plan: where the iteration is in it, and what leaves, comes back and runs again there.

[Note: Positions]
An iteration is a sequence of regions (compiled graphs and optimizer steps) with user code before each. A position is the number
of a stage, counted from the start of the iteration. The user code before a region counts as one stage of phase "user".
A region that the plan does not expect (an evaluation pass, a recompiled graph) runs without the plan. At the next region that
the plan expects, the plan applies again: the run is in step with the plan. A graph is expected with inputs of any size: its
stages, and the blocks that they make, are the same ones, and all that a plan says of them are hints.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from runtime.execution import graph_of
from runtime.paging import Block, Pager
from teraio.following.schedule import StageSchedule, ThinnedPlans
from teraio.profiling import Iteration


class PlanCursor:
    """Finds the regions of an iteration in a plan, and tells the pager what to offload, to drop and to prefetch after each stage.

    schedule: of the plan that is followed, None for no plan. thinned: what moves with shorter inputs, see
    [Note: Thinned plans].
    in_step: whether it expects the region that runs now, see [Note: Positions]. position: of the stage that runs now, or runs
    next. rerun_position: of the re-run that runs now. deviations: how many regions were not where the plan expects them.
    All calls are for the training thread; none waits.
    """

    def __init__(self, pager: Pager) -> None:
        self.schedule: StageSchedule | None = None
        self.thinned: ThinnedPlans | None = None
        self.in_step = False
        self.position = 0
        self.rerun_position: int | None = None
        self.deviations = self._deviations_before = 0
        self._pager = pager
        self._by_id: dict[int, Block] = {}
        self._next_region = 0
        self._stage_count = 0  # of the region that runs now
        self._moving: StageSchedule | None = None  # says what moves now

    # -- plans

    def follow(self, schedule: StageSchedule | None, blocks: dict[int, Block]) -> None:
        """Apply a plan from the next region on; None for no plan. blocks: the persistent blocks by their trace id."""
        self.schedule, self._moving, self._by_id, self._next_region = schedule, schedule, dict(blocks), 0
        for trace_id, block in blocks.items():
            block.trace_id = trace_id

    def change(self, schedule: StageSchedule, due: Sequence[int]) -> None:
        """Apply another plan for the same blocks, between two iterations. due: trace ids of blocks to prefetch now."""
        self.schedule, self._moving, self._next_region = schedule, schedule, 0
        for block in [self._by_id[i] for i in due if i in self._by_id]:
            self._pager.prefetch(block)

    # -- blocks of the plan

    def knows(self, block: Block) -> bool:
        """Whether the plan moves this block by its trace id."""
        return self._by_id.get(block.trace_id) is block

    def replace(self, before: Block, after: Block) -> None:
        """Transfer the planned moves of `before`, which is gone, to `after`, which has replaced it."""
        if self.knows(before) and before.size_bytes == after.size_bytes:
            after.trace_id = before.trace_id
            self._by_id[after.trace_id] = after

    def adopt(self, planned: Iteration, ids: Mapping[Block, int], latest: Iteration) -> None:
        """Transfer the planned moves of parameters and buffers that are gone to the blocks that `latest` has in their places.

        planned: the iteration that the plan is for, with the trace ids of its blocks; `latest` ran the same stages.
        """
        gone = {number for number, block in self._by_id.items() if block.kind in ("parameter", "buffer") and block.dead}
        if not gone:
            return
        for before, after in zip(planned.stages, latest.stages, strict=True):
            for old, new in zip(before.read, after.read, strict=False):
                same = (old.name, old.kind, old.size_bytes) == (new.name, new.kind, new.size_bytes)
                if same and ids.get(old) in gone and not new.dead:
                    new.trace_id = ids[old]
                    self._by_id[new.trace_id] = new

    # -- regions and stages

    def region_begins(self, identity: Hashable, stage_count: int) -> None:
        """Find the region in the plan, first from here on, then from the beginning, and set whether it is in step."""
        self.rerun_position = None
        self.in_step = False
        self._stage_count = stage_count
        if self.schedule is None:
            return
        regions, count, graph = self.schedule.regions, len(self.schedule.regions), graph_of(identity)
        for index in (*range(self._next_region, count), *range(min(self._next_region, count))):
            # An optimizer that was given more parameters keeps its identity, but has more stages.
            if regions[index][0] == graph and self.schedule.counts[index] == stage_count + 1:
                self.in_step = True
                self.deviations += index != self._next_region
                self._next_region = index + 1
                thinned = self.thinned and self.thinned.schedule_for(identity, begins=not index)
                moved, self._moving = self._moving, thinned or self.schedule
                self.position = regions[index][1] + 1
                if self._moving is not moved:  # what was asked for so far was what inputs of other sizes need
                    self._prefetch(self.position - 1)
                self._leave(self.position - 1)
                return
        self.deviations += 1

    @property
    def updates_on_host(self) -> tuple[int, ...]:
        """Numbers of the stages that the plan updates on the host, in the order of these updates.

        They count from the start of the region that has just begun. Empty if no plan applies.
        """
        if not self.in_step or self.schedule is None:
            return ()
        numbers = (position - self.position for position in self.schedule.on_host)
        return tuple(number for number in numbers if 0 <= number < self._stage_count)

    @property
    def kept_stages(self) -> Collection[int]:
        """Numbers of the stages of this region that run again later."""
        return self.schedule.kept[self._next_region - 1] if self.in_step and self.schedule is not None else ()

    def stage_ended(self, made: Sequence[Block], first: int) -> None:
        """Offload and drop what the plan says after the stage at this position, and go on to the next one. For runs in step.

        made: the new blocks, which are recognised by their ordinals in the region. first: ordinal of the first of them.
        """
        if made and self.schedule is not None:
            ids = self.schedule.made_ids[self._next_region - 1][first : first + len(made)]
            for block, trace_id in zip(made, ids, strict=False):
                if trace_id >= 0:
                    block.trace_id = trace_id
                    self._by_id[trace_id] = block
        self._leave(self.position)
        self.position += 1

    @property
    def reruns_due(self) -> bool:
        """Whether stages run again at this position."""
        return self.in_step and self.schedule is not None and self.position in self.schedule.reruns.made

    def reruns(self) -> Iterator[tuple[Sequence[Block], Sequence[Block]]]:
        """Go through the re-runs at this position: the blocks that each has to make, and what to prefetch meanwhile."""
        while self.reruns_due and self.schedule is not None:
            made = (self._by_id.get(i) for i in self.schedule.reruns.made[self.position])
            self.rerun_position = self.position
            yield [block for block in made if block is not None], self.to_prefetch(self.position)
            self.rerun_position = None
            self._leave(self.position)
            self.position += 1

    def region_ended(self) -> None:
        """Prefetch what the plan says for the user code that follows."""
        if self.in_step and self.schedule is not None and self._next_region < len(self.schedule.regions):
            self._prefetch(self.schedule.regions[self._next_region][1])
        self.in_step = False

    # -- iterations

    @property
    def ran_as_planned(self) -> bool:
        """Whether the iteration that ends ran what the plan expects: then blocks were used as in the one before."""
        complete = self.schedule is not None and self._next_region == len(self.schedule.regions)
        return complete and self.deviations == self._deviations_before

    def iteration_ends(self) -> None:
        """Go back to the begin of the plan, and prefetch what it says for the user code there."""
        self._deviations_before = self.deviations
        self._next_region = 0
        if self.schedule is not None:
            self._prefetch(self.schedule.regions[0][1])

    # -- one position

    def to_prefetch(self, position: int) -> list[Block]:
        """Return what is to be prefetched at a position, where a plan is followed."""
        if self._moving is None:
            return []
        planned, by_id = self._moving.fetch_at[position], self._by_id
        return [by_id[i] for i in planned if i in by_id] if planned else []

    def _prefetch(self, position: int) -> None:
        for block in self.to_prefetch(position):
            self._pager.prefetch(block)

    def _leave(self, position: int) -> None:
        if self._moving is None:
            return
        for trace_id in self._moving.reruns.dropped_after.get(position, ()):
            dropped = self._by_id.get(trace_id)
            if dropped is not None:
                self._pager.drop(dropped)
        planned, by_id = self._moving.leave_after[position], self._by_id
        if planned and (leaving := [(block, tier) for i, tier in planned if (block := by_id.get(i)) is not None]):
            self._pager.offload_all(leaving)
