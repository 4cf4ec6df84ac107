"""A plan in force: what it promises is compared with what happens; its starts are corrected; a better one takes over.

[Note: Planning again]
When the latest iterations drift from what the plan predicts, see `teraio.planning.drift`, a trace with measured times is made and
planned for in the background while training goes on by the old plan. At the end of an iteration the new plan takes over
if it beats the old one, both replayed on that trace; otherwise the old one stays, and promises from now on what its
replay says. After each attempt twice as many iterations have to pass before the next one, so that a machine whose times
vary does not keep a solver busy. A plan that the user gave, or with the option replan=False, is only reported on.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

import planner
from planner.errors import InfeasiblePlanError, TeraioError
from teraio.machine import Machine
from teraio.options import Options
from teraio.planning.corrections import Corrections, planned_starts
from teraio.planning.drift import Drift, Expectation, Observation, drift_of, remeasured
from teraio.planning.job import PlanningJob
from teraio.planning.saving import save
from teraio.planning.structured_trace import record_plan
from teraio.profiling import Iteration, IterationRecorder, Profile, StageSchedule, lay_out_plan

logger = logging.getLogger("teraio")

_WINDOW = 8
"""Drift is that of the median of so many iterations."""
_FIRST_WAIT = 10
"""Iterations under a plan before it may be made again for the first time."""
_WORTHWHILE = 0.01
"""A new plan must be better by this share: to change plans costs an iteration in which copies are not where they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InForce:
    """A plan that is followed. The profile's trace has the times that were measured last."""

    profile: Profile
    plan: planner.Plan
    expected: Expectation
    hints: StageSchedule
    corrections: Corrections

    @classmethod
    def of(cls, profile: Profile, plan: planner.Plan, replayed: planner.Timeline) -> _InForce:
        trace = profile.trace
        return cls(
            profile=profile,
            plan=plan,
            expected=Expectation.of(trace, replayed),
            hints=lay_out_plan(plan, profile.iteration, profile.ids, [block.size_bytes for block in trace.blocks]),
            corrections=Corrections(plan.moves, len(trace.stages)),
        )


class PlanFollower:
    """Follows one plan after the other on `timeline`, see [Note: Planning again].

    replans: how many plans have taken the place of one before. All calls are for the training thread; they block for the
    replay of two plans at most, but for `wait` and `stop`.
    """

    def __init__(self, options: Options, machine: Machine, timeline: IterationRecorder) -> None:
        self._options = options
        self._machine = machine
        self._timeline = timeline
        self._adaptive = options.replan and options.plan is None
        self._now: _InForce | None = None
        self._observations: deque[Observation] = deque(maxlen=_WINDOW)
        self._moved_bytes: dict[str, int] = {}
        self._busy_seconds: dict[str, float] = {}
        self._unsettled = 0
        self._job: PlanningJob | None = None
        self._job_trace: planner.Trace | None = None
        self._wait = _FIRST_WAIT
        self._since = 0
        self.replans = 0

    # -- which plan

    def follow(self, profile: Profile, plan: planner.Plan) -> None:
        """Follow the first plan for a profile, from the next region on. Raises UnsupportedError, InfeasiblePlanError."""
        self._wait, self._since = _FIRST_WAIT, 0
        now = _InForce.of(profile, plan, planner.simulate(profile.trace, plan))
        self._enforce(now)
        self._timeline.follow(now.hints, {number: b for b, number in profile.ids.items() if not b.dead})

    def stop(self) -> None:
        """Follow no plan any more. Blocks until a solver that was at work has gone."""
        if self._job is not None:
            self._job.cancel()
        self._job = self._job_trace = self._now = None
        self._observations.clear()
        self._timeline.follow(None, {})

    def wait(self, timeout_seconds: float | None) -> bool:
        """Block until no new plan is being made, or the time is over; True if none is. For any thread."""
        job = self._job
        return True if job is None else job.wait(timeout_seconds)

    def _enforce(self, now: _InForce) -> None:
        self._now = now
        self._observations.clear()
        self._unsettled = self._timeline.iteration_number
        record_plan(now.plan, now.profile.trace)

    # -- what happens

    @property
    def trace(self) -> planner.Trace | None:
        """Of the plan in force, with the times that were measured last; None without a plan."""
        return self._now.profile.trace if self._now is not None else None

    @property
    def predicted_seconds(self) -> float | None:
        """Seconds that an iteration should take by the plan in force; None without one."""
        return self._now.expected.iteration_seconds if self._now is not None else None

    @property
    def drift(self) -> Drift | None:
        """Of the latest iterations against the plan in force, None while there is nothing to compare. For any thread."""
        now, observations = self._now, tuple(self._observations)
        return drift_of(now.expected, observations) if now is not None and observations else None

    def iteration_ended(self, iteration: Iteration, *, as_planned: bool) -> bool:
        """Take in an iteration that has ended; as_planned: it is the one that the plan is for, and nothing was compiled.

        True if another plan has taken over.
        """
        now, observation = self._now, self._observe(iteration)
        if now is None:
            return False
        self._since += 1
        if self._job is not None and self._job_trace is not None and self._job.done:
            return self._decide(now, self._job, self._job_trace)
        if not as_planned:
            self._unsettled = iteration.number + 1  # begins in another state than the plan's
        if iteration.number <= self._unsettled:
            return False
        self._observations.append(observation)
        if self._job is None and self._since >= self._wait and len(self._observations) == _WINDOW:
            self._look_for_drift(now)
        if self._adaptive:
            self._correct(now, iteration, observation)
        return False

    def _observe(self, iteration: Iteration) -> Observation:
        moved_bytes, busy_seconds = self._machine.moved_bytes(), self._machine.busy_seconds()
        observation = Observation(
            iteration_seconds=iteration.seconds,
            waited_seconds=iteration.waited_seconds,
            stage_seconds=tuple(stage.seconds for stage in iteration.stages),
            moved_bytes={link: value - self._moved_bytes.get(link, 0) for link, value in moved_bytes.items()},
            busy_seconds={link: value - self._busy_seconds.get(link, 0.0) for link, value in busy_seconds.items()},
            host_seconds={i: s.host_seconds for i, s in enumerate(iteration.stages) if s.on_host and s.host_seconds is not None},
        )
        self._moved_bytes, self._busy_seconds = moved_bytes, busy_seconds
        return observation

    def _correct(self, now: _InForce, iteration: Iteration, observation: Observation) -> None:
        late = {(block, place): t for place, stage in enumerate(iteration.stages) for block, t in stage.late}
        if now.corrections.note(late, observation.waited_seconds, now.expected):
            starts = now.corrections.starts(observation.stage_seconds)
            self._timeline.change(replace(now.hints, fetch_at=starts.fetch_at), due=starts.due)

    # -- planning again

    def _look_for_drift(self, now: _InForce) -> None:
        drift = drift_of(now.expected, self._observations)
        if not drift.found:
            return
        self._since, self._wait = 0, 2 * self._wait
        what = "planning again" if self._adaptive else "the plan stays as it is"
        logger.info("the last %d iterations differ from what the plan predicts: %s; %s", _WINDOW, drift, what)
        if self._adaptive:
            self._job_trace = remeasured(now.profile.trace, now.expected, self._observations)
            self._job = PlanningJob(self._job_trace, now.plan.budgets, time_limit_seconds=self._options.solver_time_limit)

    def _decide(self, now: _InForce, job: PlanningJob, trace: planner.Trace) -> bool:
        """The plan in force or the new one. True if it is the new one."""
        self._job, self._job_trace, self._since = None, None, 0
        try:
            new = job.result()
            promised = planner.simulate(trace, new)
        except TeraioError as error:
            logger.warning("no new plan could be made, the old one stays in force: %s", error)
            return False
        profile = replace(now.profile, trace=trace)
        old = now.plan.model_copy(update={"trace_fingerprint": trace.fingerprint})
        kept = _replay(trace, old)
        better = kept is None or promised.iteration_seconds < kept.iteration_seconds * (1 - _WORTHWHILE)
        logger.info(
            "with the measured times the new plan takes %.3f s an iteration, the old one %s: the %s one is followed",
            promised.iteration_seconds,
            "does not come to an end" if kept is None else f"{kept.iteration_seconds:.3f} s",
            "new" if better else "old",
        )
        if kept is None or better:
            after = _InForce.of(profile, new, promised)
            self._timeline.change(after.hints, due=planned_starts(new.moves, len(trace.stages)).due)
            self.replans += 1
        else:
            expected = Expectation.of(trace, kept)
            after = replace(now, profile=profile, plan=_promise(old, new, trace, kept), expected=expected)
        self._enforce(after)
        save(after.profile.trace, self._options.trace_out)
        save(after.plan, self._options.plan_out)
        return better


def _replay(trace: planner.Trace, plan: planner.Plan) -> planner.Timeline | None:
    """None where, at other speeds, the plan does not come to an end any more."""
    try:
        return planner.simulate(trace, plan)
    except InfeasiblePlanError:
        return None


def _promise(old: planner.Plan, new: planner.Plan, trace: planner.Trace, replayed: planner.Timeline) -> planner.Plan:
    """The old plan with what its replay promises; the bound is that of every plan for `trace`."""
    if old.predicted is None or new.predicted is None:
        return old
    predicted = old.predicted.model_copy(
        update={
            "iteration_seconds": replayed.iteration_seconds,
            "ideal_seconds": trace.ideal_seconds,
            "lower_bound_seconds": new.predicted.lower_bound_seconds,
            "stall_seconds": replayed.stall_seconds,
        }
    )
    return old.model_copy(update={"predicted": predicted})
