"""A plan in force: compares measured iterations with the plan's promises, corrects its starts, replaces it by a better plan.

`cursor` follows it, `drift` measures how far off the promises are, `schedule` computes earlier starts, `background` makes the
new plans. This file decides when each of them acts.

[Note: Planning again]
When the latest iterations drift from what the plan predicts (see `teraio.following.drift`), a trace with the measured times is
made, and a plan for it in the background; training goes on by the old plan. At the end of an iteration the new plan takes
over if it beats the old one, both replayed on that trace. Otherwise the old plan stays, and promises from now on what its own
replay says. After each attempt twice as many iterations have to pass before the next one. So a machine whose times vary does
not keep a solver busy.

A plan may come from iterations that were all disturbed, or from another start. If, among the first iterations under it, three in
a row are alike and their stages take plainly other times than it says, or if three are plainly faster, planning starts again at
once. This does not count as an attempt, and happens once for the first plan and for what comes of each attempt.

Where stages are timed in some iterations only (see [Note: Sampled times] in `teraio.profiling.recorder`), these are compared. If
the time of whole iterations drifts, and planning may start, stages are timed in all iterations until there are enough.

A plan that the user gave is never replaced, nor any plan with the option replan=False; the log then
reports the drift.
When one rank of a machine plans again, all that run the same iteration do, each with a trace of its own. The slowest one makes
the plan and decides whether it beats the old one. All follow what it has decided from the same iteration on, see
`RankPlan` in `teraio.planning.background`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import planner
from planner.errors import InfeasiblePlanError, TeraioError
from planner.schema import Lengths
from teraio.following.drift import Drift, Expectation, Observation, drift_of, iterations_drift, remeasured, stages_plainly_off
from teraio.following.observer import IterationObserver
from teraio.following.schedule import Corrections, StageSchedule, ThinnedPlans, planned_starts
from teraio.planning import BackgroundPlanner, save
from teraio.profiling import Iteration, Profile

logger = logging.getLogger("teraio")

# Drift is computed from the medians of this many iterations. An odd number: no median lies between the times before and after
# a change.
_WINDOW = 9
_FIRST_WAIT = 10  # iterations under a plan before planning may start again for the first time
_CLEARLY_SHORTER = 0.9  # of the shortest inputs, or of their bytes, for which something is known
_FIRST_LOOK = 3  # iterations under a new plan that show whether its stage times are plainly wrong
# Share by which another plan must be better: a change costs one iteration, which begins with blocks in the wrong tiers.
_WORTHWHILE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """A plan that is followed, and what follows from it. The profile's trace has the times that were measured last."""

    profile: Profile
    plan: planner.Plan
    expected: Expectation
    schedule: StageSchedule
    corrections: Corrections
    thinned: ThinnedPlans

    @classmethod
    def of(cls, profile: Profile, plan: planner.Plan, replayed: planner.Timeline) -> _Followed:
        schedule = StageSchedule.of(profile, plan)
        return cls(
            profile=profile,
            plan=plan,
            expected=Expectation.of(profile.trace, replayed),
            schedule=schedule,
            corrections=Corrections(plan.moves, schedule.reruns.count),
            thinned=ThinnedPlans(profile, plan),
        )


class PlanInForce:
    """A plan for `profile`, followed from the next region on, and then its successors, see [Note: Planning again].

    keep: takes each successor, with the trace that it is for.
    All calls are for the training thread. They wait for the replay of four plans at most; `stop` also waits for a solver to end.
    Raises UnsupportedError, InfeasiblePlanError if the plan cannot be followed.
    """

    def __init__(
        self,
        observer: IterationObserver,
        background: BackgroundPlanner,
        profile: Profile,
        plan: planner.Plan,
        *,
        keep: Callable[[planner.Trace, planner.Plan], None] = lambda trace, plan: None,
    ) -> None:
        self._keep = keep
        self._recorder, self._cursor = observer.recorder, observer.plan
        self._background, self._options, self._machine = background, background.options, background.machine
        self._adaptive = self._options.replan and self._options.plan is None
        self._observations: deque[Observation] = deque(maxlen=_WINDOW)
        self._of_shorter: deque[Observation] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._moved_bytes: dict[str, int] = {}
        self._busy_seconds: dict[str, float] = {}
        self._wait = _FIRST_WAIT
        self._since = 0
        self._look_early = True
        self._why = ""
        self._enforce(_Followed.of(profile, plan, planner.simulate(profile.trace, plan)))
        self._cursor.follow(self._now.schedule, {number: b for b, number in profile.ids.items() if not b.dead})

    def stop(self) -> None:
        """Follow no plan any more. Waits until a solver that was at work has ended."""
        self._background.cancel()
        self._recorder.sampled = False
        self._cursor.follow(None, {})

    def _enforce(self, now: _Followed) -> None:
        self._now = now
        self._cursor.thinned = now.thinned
        self._observations.clear()
        self._of_shorter.clear()
        self._seconds.clear()
        self._recorder.sampled = False
        self._unsettled = self._recorder.iteration_number

    def covers(self, iteration: Iteration) -> bool:
        """Whether it is known what to follow for inputs as short as those of an iteration, or nothing can be done about it."""
        return not self._adaptive or self._background.busy or self._now.thinned.covers(iteration, _CLEARLY_SHORTER)

    def cover(self, lengths: Lengths) -> None:
        """Find out in the background, with what is known of shorter inputs by now, what is followed for them."""
        now, self._why = self._now, ""
        logger.info("inputs were shorter than those that were profiled: what need not move for them is found out")
        trace = now.profile.trace.model_copy(update={"lengths": lengths})
        self._background.start(trace, now.plan.budgets, known=now.plan)

    @property
    def trace(self) -> planner.Trace:
        """The trace of the plan in force, with the times that were measured last."""
        return self._now.profile.trace

    @property
    def plan(self) -> planner.Plan:
        """The plan in force."""
        return self._now.plan

    @property
    def predicted_seconds(self) -> float:
        """Seconds that an iteration should take by the plan in force."""
        return self._now.expected.iteration_seconds

    @property
    def drift(self) -> Drift | None:
        """Drift of the latest iterations from the plan in force; None if there is nothing to compare yet. For any thread."""
        now, observations = self._now, tuple(self._observations)
        return drift_of(now.expected, observations) if observations else None

    # -- at the end of an iteration

    def iteration_ended(self, iteration: Iteration, *, as_planned: bool) -> bool:
        """Take in an iteration that has ended. Return whether another plan has taken over.

        as_planned: the iteration ran the graphs that the plan is for, and nothing was compiled in it.
        """
        observation = self._observe(iteration)
        self._since += 1
        try:
            made = self._background.take()
        except TeraioError as error:
            self._since = 0
            logger.warning("no new plan could be made, the old one stays in force: %s", error)
            return False
        if made is not None:
            return self._decide(*made)
        if self._adaptive and self._background.wanted(self._now.profile.trace, self._now.plan.budgets):
            self._wait *= 2
            self._plan_again("another rank of this machine plans again", self._observations)
        if as_planned and iteration.timed:
            self._cursor.adopt(self._now.profile.iteration, self._now.profile.ids, iteration)
        if not as_planned:
            self._unsettled = iteration.number + 1  # the next one begins in another state than the plan's
        elif iteration.woken:  # it began without what the plan has on the device, and ended as the plan says
            self._unsettled = max(self._unsettled, iteration.number)
        if iteration.number <= self._unsettled:  # blocks were not where the plan has them, or were others
            return False
        if not self._now.thinned.is_whole(iteration):
            self._look_at_shorter(iteration, observation)
            return False
        self._seconds.append(iteration.seconds)
        if iteration.timed:
            self._observations.append(observation)
            if not self._background.busy:
                self._look_for_drift()
            if self._adaptive:  # a plan that the user gave stays as it is, starts included
                self._correct(iteration, observation)
        self._recorder.sampled = not self._wants_times()
        return False

    def _wants_times(self) -> bool:
        """Return whether stages are to be timed in the next iterations: if the plan is new, or if drift is to be looked at."""
        if len(self._observations) < _WINDOW:
            return True
        due = not self._background.busy and self._since + _WINDOW >= self._wait
        return due and iterations_drift(self._now.expected, self._seconds)

    def _observe(self, iteration: Iteration) -> Observation:
        moved_bytes, busy_seconds = self._machine.moved_bytes(), self._machine.busy_seconds()
        if iteration.timed and iteration.signature == self._now.profile.iteration.signature:
            iteration.correct([stage.duration_seconds for stage in self._now.profile.trace.stages])
        observation = Observation(
            iteration_seconds=iteration.seconds,
            waited_seconds=iteration.waited_seconds,
            stage_seconds=tuple(stage.seconds for stage in iteration.stages),
            rerun_seconds=sum(each.seconds for each in iteration.reruns),
            collective_seconds=tuple(stage.collective_seconds for stage in iteration.stages),
            moved_bytes={link: value - self._moved_bytes.get(link, 0) for link, value in moved_bytes.items()},
            busy_seconds={link: value - self._busy_seconds.get(link, 0.0) for link, value in busy_seconds.items()},
            host_seconds={i: s.host_seconds for i, s in enumerate(iteration.stages) if s.on_host and s.host_seconds is not None},
        )
        self._moved_bytes, self._busy_seconds = moved_bytes, busy_seconds
        return observation

    def _correct(self, iteration: Iteration, observation: Observation) -> None:
        now = self._now
        reruns = now.schedule.reruns
        if now.corrections.note(reruns.late(iteration), observation.waited_seconds, now.expected):
            again = {each.position: each.seconds for each in iteration.reruns if each.position is not None}
            starts = now.corrections.starts(reruns.spread(observation.stage_seconds, again))
            self._cursor.change(replace(now.schedule, fetch_at=starts.fetch_at), due=starts.due)

    # -- planning again

    def _look_for_drift(self) -> None:
        if self._since >= self._wait and len(self._observations) == _WINDOW:
            if drift_of(self._now.expected, self._observations).found:
                self._wait *= 2
                self._on_drift(self._observations)
                self._look_early = True
        elif self._adaptive and self._look_early and _FIRST_LOOK <= len(self._observations) < _WINDOW:
            latest = tuple(self._observations)[-_FIRST_LOOK:]
            if stages_plainly_off(self._now.expected, latest):
                self._on_drift(latest)

    def _look_at_shorter(self, iteration: Iteration, observation: Observation) -> None:
        """Look for drift in iterations of shorter inputs, where there are few of those that the plan is for."""
        shares = self._now.thinned.shares(iteration) if iteration.timed else None
        if shares is None or self._background.busy:
            return
        self._of_shorter.append(observation.at_whole_length(shares, self._now.expected))
        rare = len(self._observations) < _WINDOW == len(self._of_shorter)
        if rare and self._since >= self._wait and drift_of(self._now.expected, self._of_shorter).plain:
            self._wait *= 2
            self._on_drift(self._of_shorter)

    def _on_drift(self, observations: Sequence[Observation]) -> None:
        """Start to plan with what these iterations show. If the plan is to stay, only tell."""
        drift = drift_of(self._now.expected, observations)
        why = f"the last {len(observations)} iterations differ from what the plan predicts"
        if self._adaptive:
            self._plan_again(f"{why} ({drift})", observations)
        else:
            self._since = 0
            logger.info("%s: %s; the plan stays as it is", why, drift)

    def _plan_again(self, why: str, observations: Sequence[Observation]) -> None:
        now, trace = self._now, self._now.profile.trace
        # A machine whose times vary does not keep a solver busy: whoever calls has doubled the wait, but for an early look.
        self._since, self._look_early, self._why = 0, False, why
        if observations:
            trace = remeasured(trace, now.expected, observations)
        self._background.start(trace, now.plan.budgets, lambda new: self._better(trace, new))

    def _old_plan_for(self, trace: planner.Trace) -> planner.Plan:
        return self._now.plan.model_copy(update={"trace_fingerprint": trace.fingerprint})

    def _better(self, trace: planner.Trace, new: planner.Plan) -> planner.Plan:
        """Return the new plan if it beats the one in force, both replayed on `trace`; else that one, with new promises."""
        # Both on the trace with the measured times: the old plan's own promise was for other times.
        promised = planner.simulate(trace, new)
        old = self._old_plan_for(trace)
        kept = _replay(trace, old)
        if kept is None or promised.iteration_seconds < kept.iteration_seconds * (1 - _WORTHWHILE):
            return new
        return _promise(old, new, trace, kept)

    def _decide(self, trace: planner.Trace, plan: planner.Plan) -> bool:
        """Follow the plan that was chosen, on this rank or for all of them. Return whether it is another one than before."""
        now, self._since = self._now, 0
        try:
            promised = planner.simulate(trace, plan)
        except TeraioError as error:
            logger.warning("no new plan could be made, the old one stays in force: %s", error)
            return False
        after = _Followed.of(replace(now.profile, trace=trace), plan, promised)
        another = _decisions(plan) != _decisions(now.plan)
        if self._why:
            self._tell(promised, _replay(trace, self._old_plan_for(trace)), another=another)
        if another:
            self._cursor.change(after.schedule, due=planned_starts(after.plan.moves, after.schedule.reruns.count).due)
            self._enforce(after)
        else:
            self._enforce(replace(after, schedule=now.schedule, corrections=now.corrections))
        save(trace, self._options.trace_out)
        save(plan, self._options.plan_out)
        self._keep(trace, plan)
        return another

    def _tell(self, promised: planner.Timeline, old: planner.Timeline | None, *, another: bool) -> None:
        """Log, in one line, why a plan was made again and which plan is followed."""
        before = "does not come to an end" if old is None else f"{old.iteration_seconds:.3f} s"
        found = (
            f"the new plan takes {promised.iteration_seconds:.3f} s an iteration, the old one {before}: the new one is followed"
            if another
            else "no plan was found that is clearly faster than the old one, which is followed "
            f"({promised.iteration_seconds:.3f} s an iteration)"
        )
        logger.info("planned again, as %s: with the measured times %s", self._why, found)


def _decisions(plan: planner.Plan) -> tuple[object, ...]:
    """Return what a plan decides, without what it was made for and what it promises."""
    return plan.moves, plan.initial, plan.updates, plan.recompute


def _replay(trace: planner.Trace, plan: planner.Plan) -> planner.Timeline | None:
    """Replay the plan with other times. Return None if it cannot be carried out with these."""
    try:
        return planner.simulate(trace, plan)
    except InfeasiblePlanError:
        return None


def _promise(old: planner.Plan, new: planner.Plan, trace: planner.Trace, replayed: planner.Timeline) -> planner.Plan:
    """Return the old plan with the promises of its replay. The lower bound is the new plan's: it holds for any plan."""
    predicted = old.replayed.model_copy(
        update={
            "iteration_seconds": replayed.iteration_seconds,
            "ideal_seconds": trace.ideal_seconds,
            "lower_bound_seconds": new.replayed.lower_bound_seconds,
            "stall_seconds": replayed.stall_seconds,
            "recompute_seconds": sum(trace.recompute[each.group].duration_seconds for each in old.recompute),
        }
    )
    return old.model_copy(update={"predicted": predicted})
