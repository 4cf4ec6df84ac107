"""Records iterations, and predicts when each block is used next.

[Note: Truncated records]
User code may run any number of regions before an optimizer steps: an evaluation over a whole data set, text that is generated
word by word, or a loop without such a step. What is recorded of one iteration has a limit, so that memory does not grow with
their number. A region beyond the limit runs as any other, but leaves no record, and no plan is made for the iteration. A long row
of inference regions is no obstacle to a plan: the whole row is left out, counts as user code, and runs on demand.

[Note: Sampled times]
On an asynchronous device the time of a stage costs two timed events, which the host makes, queues and reads. So while a plan is
followed, stages are timed in every eighth iteration only, and in those for which the follower of the plan asks. The iteration as
a whole is always timed, by marks between regions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from runtime.device import Mark
from runtime.execution import StageRerun, StageRun
from runtime.paging import Block, Pager
from teraio.profiling.iteration import Iteration, Region, RerunRecord, StageRecord
from teraio.profiling.plan_cursor import PlanCursor
from teraio.profiling.schedule_by_stage import StageSchedule

_MOST_STAGES = 10_000
"""Stages that are recorded of one iteration."""
_MOST_INFERENCE_REGIONS = 64
"""Inference regions in a row that are recorded. Those of a training step, such as a teacher's, are fewer."""
_TIMED_EVERY = 8
"""Of so many iterations under a plan, the stages of one are timed, see [Note: Sampled times]."""


class IterationRecorder:
    """An `Observer` that records iterations and, where there is a plan, leads a `PlanCursor` through it.

    times_wanted: whether the stages of the next iterations are timed although a plan is followed, see [Note: Sampled times].
    All calls are for the training thread.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._plan = PlanCursor(pager)
        self._next_uses: dict[int, Sequence[int]] = {}  # by position in the plan
        self._previous: Iteration | None = None
        self._iteration = Iteration(number=0)
        self._region = Region(identity=None, first=0)
        self._stage_count = 0
        self._recording = False
        self._inference_regions = 0
        self._survivors_due = False
        self._device = pager.device
        self._user_code_began = self._began = self._last_end = self._device.mark()
        self._waited_at_user_code = self._waited_at_begin = self._host_waited()
        self._before_inference = self._user_code_began, self._waited_at_user_code
        self.times_wanted = True

    def _host_waited(self) -> float:
        """Seconds so far in which the host waited and the device was idle. 0 for an asynchronous device."""
        return 0.0 if self._device.asynchronous else self._pager.waited_seconds

    @property
    def position(self) -> int:
        """Position of the stage that runs now, or runs next."""
        return self._plan.position

    @property
    def iteration_number(self) -> int:
        """Number of the current iteration."""
        return self._iteration.number

    @property
    def iteration_begins(self) -> bool:
        """Whether no region of the current iteration has begun."""
        return not self._iteration.regions

    @property
    def in_step(self) -> bool:
        """Whether the plan expects the region that runs now, see [Note: Positions]."""
        return self._plan.in_step

    @property
    def deviations(self) -> int:
        """How many regions were not where the plan expects them."""
        return self._plan.deviations

    @property
    def subgroups_on_host(self) -> tuple[int, ...]:
        """Numbers of the stages that the plan updates on the host, in the order of these updates.

        They count from the start of the optimizer step that has just begun. Empty if no plan applies.
        """
        return self._plan.updates_on_host(self._stage_count)

    def updated_on_host(self, number: int, seconds: float) -> None:
        """Record that stage `number` of the current optimizer step was an update on the host that took `seconds`."""
        record = self._region.stages[number + 1]
        record.host_seconds, record.on_host = seconds, True

    def updated_later(self, number: int, begin: Mark, end: Mark) -> None:
        """Record that the update of stage `number`, which was planned for the host, ran on the device after the other stages."""
        self._measure(self._region.stages[number + 1], begin, end)

    def _measure(self, record: StageRecord | RerunRecord, begin: Mark, end: Mark) -> None:
        """Note when a stage ran. On an asynchronous device, the gaps between stages are what the iteration has waited for."""
        if not self._recording or not self._iteration.timed:
            return
        self._iteration.untimed.append((record, begin, end))
        if self._device.asynchronous:
            self._iteration.gaps.append((self._last_end, begin))
            self._last_end = end

    def replace(self, before: Block, after: Block) -> None:
        """Transfer the recorded uses and the planned moves of `before`, which is gone, to `after`, which has replaced it."""
        self._pager.record_uses({after: before.uses})
        self._plan.replace(before, after)

    def follow(self, schedule: StageSchedule | None, blocks: dict[int, Block]) -> None:
        """Apply a plan from the next region on; None for no plan. blocks: the persistent blocks by their trace id."""
        self._next_uses.clear()
        self._plan.follow(schedule, blocks)

    def adopt(self, planned: Iteration, ids: Mapping[Block, int], latest: Iteration) -> None:
        """Let blocks of `latest` move by the plan that took the place of planned ones which are gone (`parameter.data = other`).

        planned: the iteration that the plan is for, with the trace ids of its blocks; `latest` ran the same stages.
        """
        self._plan.adopt(planned, ids, latest)

    def change(self, schedule: StageSchedule, *, due: Sequence[int]) -> None:
        """Apply another plan for the same blocks. To be called between two iterations.

        due: trace ids of the blocks that the new plan prefetches before the coming iteration begins. They are prefetched now.
        """
        self._next_uses.clear()
        self._plan.change(schedule, due)

    # -- calls of the executor and of optimizer steps, see `Observer`

    def mark(self) -> Mark:
        return self._device.mark() if self._iteration.timed else self._began

    def region_begins(
        self, identity: Hashable, stage_count: int, *, is_inference: bool = False, step_goes_on: bool = False
    ) -> None:
        """See `Observer`. step_goes_on: user code has not run yet since the step that ended the iteration before."""
        self._note_inference(is_inference)
        region = Region(identity=identity, first=self._iteration.stage_count, step_goes_on=step_goes_on)
        waited = self._host_waited() - self._waited_at_user_code  # while the previous region ended
        user = StageRecord(name="user", phase="user", seconds=-waited)
        self._last_end = self.mark()
        region.stages.append(user)
        self._pager.take_late()  # forget what a failed stage waited for
        self._stage_count = stage_count
        self._region, self._recording = region, self._has_room(region)
        if self._recording:
            if self._iteration.timed:
                self._iteration.untimed.append((user, self._user_code_began, self._last_end))
            self._iteration.regions.append(region)
            if self._survivors_due and not step_goes_on and self._previous is not None:
                self._previous.survivors, self._survivors_due = _survivors(self._previous), False
        self._pager.advance_clock()
        self._plan.region_begins(identity, stage_count)

    def _note_inference(self, is_inference: bool) -> None:
        """A region begins: leave out a row of inference regions that is too long, see [Note: Truncated records]."""
        if not is_inference:
            if self._inference_regions > _MOST_INFERENCE_REGIONS:  # then all of it was user code
                self._user_code_began, self._waited_at_user_code = self._before_inference
            self._inference_regions = 0
            return
        if not self._inference_regions:
            self._before_inference = self._user_code_began, self._waited_at_user_code
        self._inference_regions += 1
        if self._inference_regions == _MOST_INFERENCE_REGIONS + 1 and not self._iteration.truncated:
            del self._iteration.regions[-_MOST_INFERENCE_REGIONS:]
            self._iteration.left_out.append(len(self._iteration.regions))

    def _has_room(self, region: Region) -> bool:
        """Return whether the region that begins is recorded, see [Note: Truncated records]."""
        if self._inference_regions > _MOST_INFERENCE_REGIONS:
            return False
        fits = region.first + self._stage_count < _MOST_STAGES
        self._iteration.truncated |= not fits
        return fits

    def stage_reached(self) -> Sequence[Block]:
        return self._plan.to_prefetch() if self._plan.in_step else ()

    def stage_ended(self, run: StageRun) -> None:
        region = self._region
        position = region.first + len(region.stages)
        record = StageRecord(
            name=run.name,
            phase=run.phase,
            workspace_bytes=run.workspace_bytes,
            elements=run.elements,
            host_seconds=run.host_seconds,
            collective_seconds=run.collective_seconds,
            read=tuple(run.read),
            made=tuple(run.made),
            written=tuple(run.written),
            never_again=run.never_again,
            late=self._late(),
        )
        self._measure(record, run.begin, run.end)
        region.stages.append(record)
        if run.made:
            self._recognise(run.made, region)
            region.made.extend(run.made)
        self._pager.advance_clock(zip((*run.read, *run.made), self._until_next_uses(run, position), strict=False))
        if self._plan.in_step:
            self._plan.stage_ended()

    def _late(self) -> tuple[tuple[int, float], ...]:
        """Return what has been waited for since the last call, by trace id."""
        late = self._pager.take_late()
        return tuple((b.trace_id, t) for b, t in late if self._plan.knows(b)) if late else ()

    # -- re-runs: they have no place in the record, but one in the plan

    def kept_stages(self) -> Collection[int] | None:
        return self._plan.kept_stages

    def reruns_due(self) -> Iterable[tuple[Sequence[Block], Sequence[Block]]]:
        return self._plan.reruns() if self._plan.reruns_due else ()

    def stage_ran_again(self, rerun: StageRerun) -> None:
        size_bytes = sum(block.size_bytes for block in rerun.made)
        record = RerunRecord(name=rerun.name, position=self._plan.rerun_position, made_bytes=size_bytes, late=self._late())
        if self._recording:
            self._iteration.reruns.append(record)
        self._measure(record, rerun.begin, rerun.end)

    def _recognise(self, made: Sequence[Block], region: Region) -> None:
        """Match new blocks, by their ordinals in the region, with those of the previous iteration and of the plan's trace."""
        index, first = len(self._iteration.regions) - 1, len(region.made)
        previous = self._previous.regions if self._recording and self._previous is not None else []
        uses: dict[Block, tuple[int, ...]] = {}
        if 0 <= index < len(previous) and previous[index].identity == region.identity:
            before = previous[index].made
            uses = {block: before[number].uses for number, block in enumerate(made, first) if number < len(before)}
        self._pager.record_uses(uses, self._plan.recognise(made, first))

    def _until_next_uses(self, run: StageRun, position: int) -> Sequence[int]:
        """Return the number of stages until the next use of each block that a stage has read, then of each that it has made.

        They stay the same from one planned iteration to the next, and are kept.
        """
        plan = self._plan
        if not plan.in_step:
            self._next_uses.clear()
        elif (known := self._next_uses.get(plan.position)) is not None:
            return known
        until = self._find_next_uses(run, position)
        if plan.in_step and self._previous is not None:
            self._next_uses[plan.position] = until
        return until

    def _find_next_uses(self, run: StageRun, position: int) -> list[int]:
        """Return what `_until_next_uses` does.

        It is known within the region; after that, the previous iteration tells. Without one, blocks are taken to be used in
        reverse order, as by a backward pass: as many stages after the end of the region as the stage is before it.
        """
        mirrored = 2 * (self._stage_count - len(self._region.stages) + 2)
        count = self._previous.stage_count if self._previous is not None else 0
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

    def region_ended(self) -> None:
        self._user_code_began = self._device.mark()
        self._waited_at_user_code = self._host_waited()
        self._region.complete = len(self._region.stages) == self._stage_count + 1
        self._plan.region_ended()

    # -- iterations

    @property
    def gradients_left(self) -> bool:
        """Whether a gradient that a region of the current iteration has made is still there."""
        made = (block for region in self._iteration.regions for block in region.made)
        return any(block.kind == "gradient" and not block.dead for block in made)

    def iteration_ends(self, *, with_last_region: bool = False) -> Iteration:
        """End the iteration, begin the next one, and return what was recorded.

        with_last_region: it has ended with the last region already, and the user code since then belongs to the next one.
        On an asynchronous device the times are not known yet, see `Iteration.read_times`.
        """
        done = self._iteration
        now = self._user_code_began if with_last_region else self._device.mark()
        done.untimed.append((done, self._began, now))
        self._began = self._user_code_began = now
        if not self._device.asynchronous:
            done.read_times()
        waited = self._waited_at_user_code if with_last_region else self._host_waited()
        done.waited_seconds, self._waited_at_begin, self._waited_at_user_code = waited - self._waited_at_begin, waited, waited
        if done.timed or not self._plan.ran_as_planned:  # else it says nothing new
            uses = _uses(done)
            self._pager.record_uses(uses)
            done.held = frozenset([block for block in uses if block.storage() is not None])
        self._previous, self._survivors_due, self._inference_regions = done, True, 0
        self._iteration = Iteration(number=done.number + 1, timed=self._is_timed(done.number + 1))
        self._pager.iteration = self._iteration.number
        self._plan.iteration_ends()
        return done

    def _is_timed(self, number: int) -> bool:
        """Return whether the stages of an iteration are timed, see [Note: Sampled times]."""
        always = not self._device.asynchronous or self._plan.schedule is None
        return always or self.times_wanted or number % _TIMED_EVERY == 0


def _uses(iteration: Iteration) -> dict[Block, tuple[int, ...]]:
    """Return the positions at which each block was used."""
    uses: dict[Block, list[int]] = {}
    for position, stage in enumerate(iteration.stages):
        for block in (*stage.read, *stage.made, *stage.written):
            if block not in uses:
                uses[block] = [position]
            elif uses[block][-1] != position:
                uses[block].append(position)
    return {block: tuple(positions) for block, positions in uses.items()}


def _survivors(iteration: Iteration) -> set[tuple[int, int]]:
    """Return (number of the region, ordinal in it) of the blocks that were made in the iteration and are still alive."""
    regions = enumerate(iteration.regions)
    return {(index, number) for index, each in regions for number, b in enumerate(each.made) if b.storage() is not None}
