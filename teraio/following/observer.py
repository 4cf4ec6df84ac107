"""What the executor, optimizers' steps and libraries ask and tell at each stage of a training iteration.

Everything at one stage comes together here: the stage is recorded, the plan says what leaves and what comes back, and the pager
hears when each block is used next. Whom it evicts without a plan depends on that.

[Note: Positions]
An iteration is a sequence of regions (compiled graphs and optimizer steps) with user code before each. A position is the number
of a stage, counted from the start of the iteration. The user code before a region counts as one stage of phase "user".
A region that the plan does not expect (an evaluation pass, a recompiled graph) runs without the plan. At the next region that
the plan expects, the plan applies again: the run is in step with the plan. A graph is expected with inputs of any size: its
stages, and the blocks that they make, are the same ones, and all that a plan says of them are hints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from runtime.device import Mark
from runtime.execution import StageRerun, StageRun, graph_of
from runtime.paging import Block, Pager
from runtime.system import annotate
from teraio.following.schedule import StageSchedule, ThinnedPlans
from teraio.profiling import Iteration, IterationRecorder, LateBlocks


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
        self._pager.record(ids={block: trace_id for trace_id, block in blocks.items()})

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
            self._pager.record(ids={after: before.trace_id})
            self._by_id[after.trace_id] = after

    def adopt(self, planned: Iteration, ids: Mapping[Block, int], latest: Iteration) -> None:
        """Transfer the planned moves of parameters and buffers that are gone to the blocks that `latest` has in their places.

        planned: the iteration that the plan is for, with the trace ids of its blocks; `latest` ran the same stages.
        """
        gone = {number for number, block in self._by_id.items() if block.kind in ("parameter", "buffer") and block.dead}
        if not gone:
            return
        adopted: dict[Block, int] = {}
        for before, after in zip(planned.stages, latest.stages, strict=True):
            for old, new in zip(before.read, after.read, strict=False):
                same = (old.name, old.kind, old.size_bytes) == (new.name, new.kind, new.size_bytes)
                if same and ids.get(old) in gone and not new.dead:
                    adopted[new] = ids[old]
        self._by_id.update({number: block for block, number in adopted.items()})
        self._pager.record(ids=adopted)

    def recognise(self, made: Sequence[Block], first: int) -> dict[Block, int]:
        """Return the trace ids of new blocks, by their ordinals in the region. first: ordinal of the first of them."""
        known: dict[Block, int] = {}
        if self.in_step and self.schedule is not None:
            ids = self.schedule.made_ids[self._next_region - 1][first : first + len(made)]
            for block, trace_id in zip(made, ids, strict=False):
                if trace_id >= 0:
                    known[block] = trace_id
                    self._by_id[trace_id] = block
        return known

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

    def stage_ended(self) -> None:
        """Offload and drop what the plan says after the stage at this position, and go on to the next one. For runs in step."""
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


_NOT_AGAIN = "it is a collective, which all ranks have to launch as often"


class IterationObserver:
    """The `Observer` of a training run. All calls are for the training thread.

    recorder: keeps what has run. plan: where the iteration is in the plan that is followed, and what the plan says there.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.recorder = IterationRecorder(pager)
        self.plan = PlanCursor(pager)
        self._next_uses: dict[int, Sequence[int]] = {}  # by position in the plan
        self._next_uses_under: StageSchedule | None = None

    # -- regions and stages, see `Observer`

    def region_begins(
        self, identity: Hashable, stage_count: int, *, is_inference: bool = False, step_goes_on: bool = False
    ) -> None:
        """See `Observer`. step_goes_on: user code has not run yet since the step that ended the iteration before."""
        self.recorder.region_begins(identity, stage_count, is_inference=is_inference, step_goes_on=step_goes_on)
        self._pager.parking.wake()
        self._pager.take_late()  # forget what a failed stage waited for
        self._pager.advance_clock()  # the user code before the region counts as one stage
        self.plan.region_begins(identity, stage_count)

    def mark(self) -> Mark:
        return self.recorder.mark()

    def stage_reached(self) -> Sequence[Block]:
        return self.plan.to_prefetch(self.plan.position) if self.plan.in_step else ()

    def stage_ended(self, run: StageRun) -> None:
        region = self.recorder.region
        position, first = region.first + len(region.stages), len(region.made)
        self.recorder.stage_ended(run, self._late())
        if run.made:
            self._recognise(run.made, first)
        self._pager.advance_clock(zip((*run.read, *run.made), self._until_next_uses(run, position), strict=False))
        if self.plan.in_step:
            self.plan.stage_ended()

    def run_stage(
        self,
        name: str,
        work: Callable[[], Sequence[Block]],
        *,
        phase: str,
        read: Sequence[Block],
        written: Sequence[Block] = (),
        freed: Sequence[Block] = (),
        made_bytes: int = 0,
        workspace_bytes: int = 0,
        elements: int = 0,
        collective: bool = False,
    ) -> Sequence[Block]:
        """Run `work`, which returns the blocks that it makes, as the next stage. For stages that are of no compiled graph.

        read: all blocks that it needs on the device. written: those of them that it changes. freed: those that may be gone then.
        elements: of parameters that it updates. collective: all ranks have to run it as often.
        Waits for copies of blocks. Raises BudgetError before it begins if it does not fit, StorageError, and what `work` raises.
        """
        self._pager.acquire(read, made_bytes + workspace_bytes, name, then_fetch=self.stage_reached())
        try:
            begin = self.mark()
            with annotate("update" if phase == "optimizer" else "stage", name):
                made = work()
            end = self.mark()
        finally:
            self._pager.retire(read, written, last_used=freed)
        self.stage_ended(
            StageRun(
                name=name,
                phase=phase,
                begin=begin,
                end=end,
                workspace_bytes=workspace_bytes,
                elements=elements,
                read=read,
                made=made,
                written=written,
                never_again=_NOT_AGAIN if collective else "",
                collective_seconds=end.seconds_since(begin) if collective and not self._pager.device.asynchronous else 0.0,
            )
        )
        return made

    def kept_stages(self) -> Collection[int]:
        return self.plan.kept_stages

    def reruns_due(self) -> Iterable[tuple[Sequence[Block], Sequence[Block]]]:
        return self.plan.reruns() if self.plan.reruns_due else ()

    def stage_ran_again(self, rerun: StageRerun) -> None:
        self.recorder.stage_ran_again(rerun, self.plan.rerun_position, self._late())

    def region_ended(self) -> None:
        self.recorder.region_ended()
        self.plan.region_ended()

    def _late(self) -> LateBlocks:
        """Return what has been waited for since the last call, by trace id."""
        late = self._pager.take_late()
        return tuple((b.trace_id, t) for b, t in late if self.plan.knows(b)) if late else ()

    # -- iterations and blocks

    def iteration_ends(self, *, with_last_region: bool = False) -> Iteration:
        """End the iteration, begin the next one, and return what was recorded.

        with_last_region: it has ended with the last region already, and the user code since then belongs to the next one.
        On an asynchronous device the times are not known yet, see `Iteration.read_times`.
        """
        done = self.recorder.iteration_ends(with_last_region=with_last_region)
        if done.timed or not self.plan.ran_as_planned:  # else its uses are those of the one before
            uses = done.uses()
            self._pager.record(uses=uses)
            done.held = frozenset([block for block in uses if block.storage() is not None])
        self._pager.iteration = self.recorder.iteration_number
        self.plan.iteration_ends()
        return done

    def replace(self, before: Block, after: Block) -> None:
        """Transfer the recorded uses and the planned moves of `before`, which is gone, to `after`, which has replaced it."""
        self._pager.record(uses={after: before.uses})
        self.plan.replace(before, after)

    # -- when blocks are used next

    def _recognise(self, made: Sequence[Block], first: int) -> None:
        """Match new blocks with those of the previous iteration and of the plan's trace. first: ordinal in the region."""
        before = self.recorder.previous_region
        known = before.made[first : first + len(made)] if before is not None else ()
        uses = {block: same.uses for block, same in zip(made, known, strict=False)}
        self._pager.record(uses=uses, ids=self.plan.recognise(made, first))

    def _until_next_uses(self, run: StageRun, position: int) -> Sequence[int]:
        """Return the number of stages until the next use of each block that a stage has read, then of each that it has made."""
        # Under a plan they are kept from one iteration to the next: finding them takes the host some time.
        plan = self.plan
        if not plan.in_step or plan.schedule is not self._next_uses_under:
            self._next_uses.clear()
            self._next_uses_under = plan.schedule
        if not plan.in_step:
            return self._find_next_uses(run, position)
        until = self._next_uses.get(plan.position)
        if until is None:
            until = self._find_next_uses(run, position)
            if self.recorder.previous is not None:
                self._next_uses[plan.position] = until
        return until

    def _find_next_uses(self, run: StageRun, position: int) -> list[int]:
        """Return what `_until_next_uses` does: from the region, and after that from the previous iteration."""
        recorder = self.recorder
        # Without one, blocks are taken to be used in reverse order, as by a backward pass: as many stages after the end of the
        # region as the stage is before it.
        mirrored = 2 * (recorder.stage_count - len(recorder.region.stages) + 2)
        count = recorder.previous.stage_count if recorder.previous is not None else 0
        until, again = [], run.next_uses()
        for block in (*run.read, *run.made):
            within = again.get(block)
            if within is not None:
                until.append(within)
            elif block.uses and count:
                index = bisect_right(block.uses, position)
                until.append((block.uses[index] if index < len(block.uses) else block.uses[0] + count) - position)
            else:
                until.append(mirrored)
        return until
