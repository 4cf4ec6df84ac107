"""What the executor, optimizers' steps and libraries ask and tell at each stage of a training iteration.

Everything at one stage comes together here: the stage is recorded, the plan says what leaves and what comes back, and the pager
hears when each block is used next. Whom it evicts without a plan depends on that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from runtime.device import Mark
from runtime.execution import LateBlocks, StageRerun, StageRun
from runtime.paging import Block, Pager
from runtime.system import annotate
from teraio.following.cursor import PlanCursor
from teraio.following.schedule import StageSchedule
from teraio.profiling import Iteration, IterationRecorder

_NextUses = Callable[[], Mapping[Block, int]]  # see `Observer.stage_ended`
_NOT_AGAIN = "it is a collective, which all ranks have to launch as often"


class IterationObserver:
    """The `Observer` of a training run. All calls are for the training thread.

    recorder: keeps what has run. plan: where the iteration is in the plan that is followed, and what the plan says there.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.recorder = IterationRecorder(pager)
        self.mark = self.recorder.mark
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

    def stage_reached(self) -> Sequence[Block]:
        return self.plan.to_prefetch(self.plan.position) if self.plan.in_step else ()

    def stage_ended(self, run: StageRun, begin: Mark, end: Mark, next_uses: _NextUses = dict) -> None:
        region = self.recorder.region
        position, first = region.first + len(region.stages), len(region.made)
        run.late = self._late()
        self.recorder.stage_ended(run, begin, end)
        if run.made and (before := self.recorder.previous_region) is not None:
            known = before.made[first : first + len(run.made)]
            self._pager.record_uses({block: same.uses for block, same in zip(run.made, known, strict=False)})
        self._pager.advance_clock(zip((*run.read, *run.made), self._until_next_uses(run, next_uses, position), strict=False))
        if self.plan.in_step:
            self.plan.stage_ended(run.made, first)

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
                workspace_bytes=workspace_bytes,
                elements=elements,
                read=read,
                made=made,
                written=written,
                never_again=_NOT_AGAIN if collective else "",
                collective_seconds=end.seconds_since(begin) if collective and not self._pager.device.asynchronous else 0.0,
            ),
            begin,
            end,
        )
        return made

    def kept_stages(self) -> Collection[int]:
        return self.plan.kept_stages

    def reruns_due(self) -> Iterable[tuple[Sequence[Block], Sequence[Block]]]:
        return self.plan.reruns() if self.plan.reruns_due else ()

    def stage_ran_again(self, rerun: StageRerun, begin: Mark, end: Mark) -> None:
        rerun.position, rerun.late = self.plan.rerun_position, self._late()
        self.recorder.stage_ran_again(rerun, begin, end)

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
            self._pager.record_uses(uses)
            done.held = frozenset([block for block in uses if block.storage() is not None])
        self._pager.iteration = self.recorder.iteration_number
        self.plan.iteration_ends()
        return done

    def replace(self, before: Block, after: Block) -> None:
        """Transfer the recorded uses and the planned moves of `before`, which is gone, to `after`, which has replaced it."""
        self._pager.record_uses({after: before.uses})
        self.plan.replace(before, after)

    # -- when blocks are used next

    def _until_next_uses(self, run: StageRun, next_uses: _NextUses, position: int) -> Sequence[int]:
        """Return the number of stages until the next use of each block that a stage has read, then of each that it has made."""
        # Under a plan they are kept from one iteration to the next: finding them takes the host some time.
        plan = self.plan
        if not plan.in_step or plan.schedule is not self._next_uses_under:
            self._next_uses.clear()
            self._next_uses_under = plan.schedule
        if not plan.in_step:
            return self._find_next_uses(run, next_uses, position)
        until = self._next_uses.get(plan.position)
        if until is None:
            until = self._find_next_uses(run, next_uses, position)
            if self.recorder.previous is not None:
                self._next_uses[plan.position] = until
        return until

    def _find_next_uses(self, run: StageRun, next_uses: _NextUses, position: int) -> list[int]:
        """Return what `_until_next_uses` does: from the region, and after that from the previous iteration."""
        recorder = self.recorder
        # Without one, blocks are taken to be used in reverse order, as by a backward pass: as many stages after the end of the
        # region as the stage is before it.
        mirrored = 2 * (recorder.stage_count - len(recorder.region.stages) + 2)
        count = recorder.previous.stage_count if recorder.previous is not None else 0
        until, again = [], next_uses()
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
