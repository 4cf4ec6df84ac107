"""Records what an iteration does and when, stage by stage. Knows nothing of plans.

[Note: Truncated records]
User code may run any number of regions before an optimizer steps: an evaluation over a whole data set, text that is generated
word by word, or a loop without such a step. What is recorded of one iteration has a limit, so that memory does not grow with
their number. A region beyond the limit runs as any other, but leaves no record, and no plan is made for the iteration. A long row
of inference regions is no obstacle to a plan: the whole row is left out, counts as user code, and runs on demand.

[Note: Sampled times]
On an asynchronous device the time of a stage costs two timed events, which the host makes, queues and reads. So while a plan is
followed, stages are timed in every eighth iteration only, and in those for which the plan in force asks. The iteration as
a whole is always timed, by marks between regions.
"""

from __future__ import annotations

from collections.abc import Hashable

from runtime.device import Mark
from runtime.execution import StageRerun, StageRun, graph_of
from runtime.paging import Pager
from teraio.profiling.iteration import Iteration, Region

_MOST_STAGES = 10_000  # stages that are recorded of one iteration
# Inference regions in a row that are recorded. Those of a training step, such as a teacher's, are fewer.
_MOST_INFERENCE_REGIONS = 64
_TIMED_EVERY = 8  # of so many iterations whose times are sampled, the stages of one are timed, see [Note: Sampled times]


class IterationRecorder:
    """Records iterations. All calls are for the training thread; none waits.

    sampled: whether it is enough to time the stages of some iterations, see [Note: Sampled times]. previous: the iteration that
    ended last. region: the one that runs now, or ran last. stage_count: number of its stages, without user code. previous_region:
    the one in its place in the previous iteration, if that ran the same graph or optimizer. Whatever the sizes were: stages use
    the same blocks at all sizes.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._device = pager.device
        self.sampled = False
        self.previous: Iteration | None = None
        self.region = Region(identity=None, first=0)
        self.previous_region: Region | None = None
        self.stage_count = 0
        self._iteration = Iteration(number=0)
        self._recording = False
        self._inference_regions = 0
        self._survivors_due = False
        self._user_code_began = self._began = self._last_end = self._device.mark()
        self._waited_at_user_code = self._waited_at_begin = self._host_waited()
        self._before_inference = self._user_code_began, self._waited_at_user_code
        self._parked: Mark | None = None
        self._retries = self._device.retries

    def _host_waited(self) -> float:
        """Seconds so far in which the host waited and the device was idle. 0 for an asynchronous device."""
        return 0.0 if self._device.asynchronous else self._pager.account.waited_seconds

    @property
    def iteration_number(self) -> int:
        """Number of the current iteration."""
        return self._iteration.number

    @property
    def iteration_begins(self) -> bool:
        """Whether no region of the current iteration has begun."""
        return not self._iteration.regions

    @property
    def gradients_left(self) -> bool:
        """Whether a gradient that a region of the current iteration has made is still there."""
        made = (block for region in self._iteration.regions for block in region.made)
        return any(block.kind == "gradient" and not block.dead for block in made)

    # -- stages

    def mark(self) -> Mark:
        """See `Observer.mark`. An iteration whose stages are not timed has one mark for all of them."""
        return self._device.mark() if self._iteration.timed else self._began

    def region_begins(self, identity: Hashable, stage_count: int, *, is_inference: bool, step_goes_on: bool) -> None:
        """See `Observer`. step_goes_on: user code has not run yet since the step that ended the iteration before."""
        self._note_inference(is_inference)
        region = Region(identity=identity, first=self._iteration.stage_count, step_goes_on=step_goes_on)
        waited = self._host_waited() - self._waited_at_user_code  # while the previous region ended
        user = StageRun(name="user", phase="user", seconds=-waited)
        self._last_end = self.mark()
        region.stages.append(user)
        self.stage_count = stage_count
        parked = self.woken()
        self.region, self._recording, self.previous_region = region, self._has_room(region), None
        if not self._recording:
            return
        place = len(self._iteration.regions)
        if self.previous is not None and place < len(self.previous.regions):
            before = self.previous.regions[place]
            self.previous_region = before if graph_of(before.identity) == graph_of(identity) else None
        if self._iteration.timed:
            self._iteration.untimed.append((user, self._user_code_began, parked or self._last_end))
        self._iteration.regions.append(region)
        # User code may free what an iteration leaves, such as gradients: what is there when a region begins after it survives.
        if self._survivors_due and not step_goes_on and self.previous is not None:
            self.previous.survivors, self._survivors_due = self.previous.alive(), False

    def parked(self) -> None:
        """The device is empty from now until the next region begins: this time counts neither for user code nor the iteration."""
        self._parked = self._parked or self._device.mark()

    def woken(self) -> Mark | None:
        """A region begins, or an unmanaged pass. Return since when the device was parked; None if it was not."""
        parked, self._parked = self._parked, None
        if parked is not None:
            self._iteration.away.append((parked, self._device.mark()))
            self._iteration.woken = True
        return parked

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
        fits = region.first + self.stage_count < _MOST_STAGES
        self._iteration.truncated |= not fits
        return fits

    def stage_ended(self, run: StageRun, begin: Mark, end: Mark) -> None:
        """Record a stage."""
        run.retried = self._has_retried()
        self._measure(run, begin, end)
        self.region.stages.append(run)
        self.region.made.extend(run.made)

    def _has_retried(self) -> bool:
        """Return whether the allocator had to take memory away since the last call. False where stages are not timed."""
        if not self._iteration.timed:
            return False
        before, self._retries = self._retries, self._device.retries
        return self._retries > before

    def stage_ran_again(self, rerun: StageRerun, begin: Mark, end: Mark) -> None:
        """Record a re-run: it has no place among the stages."""
        if self._recording:
            self._iteration.reruns.append(rerun)
        self._measure(rerun, begin, end)

    def updated_on_host(self, number: int, seconds: float) -> None:
        """Record that stage `number` of the current optimizer step was an update on the host that took `seconds`."""
        record = self.region.stages[number + 1]
        record.host_seconds, record.on_host = seconds, True

    def updated_later(self, number: int, begin: Mark, end: Mark) -> None:
        """Record that the update of stage `number`, which was planned for the host, ran on the device after the other stages."""
        self._measure(self.region.stages[number + 1], begin, end)

    def _measure(self, record: StageRun | StageRerun, begin: Mark, end: Mark) -> None:
        """Note when a stage ran. On an asynchronous device, the gaps between stages are what the iteration has waited for."""
        if not self._recording or not self._iteration.timed:
            return
        self._iteration.untimed.append((record, begin, end))
        if self._device.asynchronous:
            self._iteration.gaps.append((self._last_end, begin))
            self._last_end = end

    def region_ended(self) -> None:
        """See `Observer`. User code begins."""
        self._user_code_began = self._device.mark()
        self._waited_at_user_code = self._host_waited()
        self.region.complete = len(self.region.stages) == self.stage_count + 1

    # -- iterations

    def iteration_ends(self, *, with_last_region: bool) -> Iteration:
        """End the iteration, begin the next one, and return what was recorded. See `IterationObserver.iteration_ends`."""
        done = self._iteration
        now = self._user_code_began if with_last_region else self._device.mark()
        done.untimed.append((done, self._began, now))
        if self._parked is not None and not with_last_region:
            done.away.append((self._parked, now))
            self._parked = now
        self._began = self._user_code_began = now
        if not self._device.asynchronous:
            done.read_times()
        waited = self._waited_at_user_code if with_last_region else self._host_waited()
        done.waited_seconds, self._waited_at_begin, self._waited_at_user_code = waited - self._waited_at_begin, waited, waited
        self.previous, self._survivors_due, self._inference_regions = done, True, 0
        number = done.number + 1
        timed = not self._device.asynchronous or not self.sampled or number % _TIMED_EVERY == 0
        self._iteration = Iteration(number=number, timed=timed)
        if timed:
            self._retries = self._device.retries  # those of iterations without times are not its stages'
        return done
