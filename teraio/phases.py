"""The phases of a training run: what each one does at the end of an iteration, and which phase comes next.

[Note: Phases]
phase     stages run  blocks move   next phase
profile   managed     on demand     planned   when an iteration has run as in an earlier start, see [Note: Warm starts]
                                    fits      when nothing had to move
                                    planning  when blocks had to move; the solver starts
                                    planned   likewise, if the user gave a plan
planning  managed     on demand     planned   at the end of the iteration in which the plan is ready
                                    demand    when no plan can be made
planned   managed     by the plan   planned   when a better plan takes over, see [Note: Planning again]
                                    planning  when inputs were larger than planned; the plan is followed meanwhile
                                    profile   when several iterations in a row ran other graphs than planned
demand    managed     on demand     none
fits      unmanaged   never         profile   when a graph is compiled or runs with larger sizes than ever, or when an
                                              iteration took more than the budget
closed    unmanaged   never         none; reported as "fits"

A phase ends at the end of an iteration. Only "fits" also ends at once, when a graph is compiled or its sizes grow.
Iterations in which an optimizer steps and no graph runs are not profiled, and do not end a plan: more passes are to come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ValidationError

import planner
from planner.errors import TeraioError
from planner.schema import Tiled
from runtime.execution import Program
from runtime.paging import Pager
from runtime.system import QuietCollector
from teraio import profiling
from teraio.following import IterationObserver, PlanInForce
from teraio.machine import Machine
from teraio.optimizer import SubgroupSizes, graph_break_reasons
from teraio.options import Options
from teraio.planning import BackgroundPlanner, WarmStart, fit_given_plan, save
from teraio.profiling import Iteration, Profile
from teraio.watching import PeakWatch, RunPhase

logger = logging.getLogger("teraio")

_RECENT = 8  # iterations whose median time is reported
# So many times the iterations that the options ask for are profiled at most, if stages take very different times in them.
_LONGEST = 2
_OF_VARYING_SIZES = 3  # so many times the iterations are profiled where inputs vary in size, to see a large one
_MOST_SAMPLES = 8  # lengths of inputs from which it is learned how sizes and times depend on them
_CLEARLY_LARGER = 1.05  # so many times the bytes of the blocks that a plan is for are worth another plan
_OUTSIDE_SECONDS = 0.1  # seconds of an iteration outside of compiled graphs that are worth a warning


@dataclass(slots=True)
class Findings:
    """What the run has found out so far; it stays when a phase ends.

    floor: the smallest budget in bytes that would do, and the stage that sets it. replans: plans that replaced another plan.
    """

    profile: Profile | None = None
    floor: tuple[int, str] | None = None
    trace_path: Path | None = None
    plan_path: Path | None = None
    replans: int = 0
    said_that_it_fits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What the phases of a run share.

    given: the plan that the user gave. peaks: None if peaks of memory cannot be watched. tiled: what runs in tiles in the
    iteration of a trace. warm: plans of earlier starts; None if there can be none.
    """

    options: Options
    machine: Machine
    pager: Pager
    observer: IterationObserver
    border: profiling.IterationBorder
    background: BackgroundPlanner
    subgroups: SubgroupSizes
    given: planner.Plan | None
    peaks: PeakWatch | None
    findings: Findings
    tiled: Callable[[planner.Trace], tuple[Tiled, ...]] = lambda trace: ()
    warm: WarmStart | None = None

    def managed_bytes(self) -> int:
        """Return the device bytes that teraio knows of."""
        self.pager.forget_dead()
        return self.pager.account.used_bytes + self.pager.account.unmoved_bytes


class Phase:
    """A phase of a run, see [Note: Phases]. Entered when it is made; `end` is called if the run closes in it.

    name: what `Status` reports. managed: whether stages run managed. in_force: the plan that is followed, if there is one.
    """

    name: ClassVar[RunPhase]
    managed: ClassVar[bool] = True
    in_force: PlanInForce | None = None

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._recent_seconds: deque[float] = deque(maxlen=_RECENT)

    @property
    def measured_seconds(self) -> float | None:
        """Median time of the latest iterations of this phase; None before the first."""
        return statistics.median(self._recent_seconds) if self._recent_seconds else None

    @property
    def waiting_for(self) -> str | None:
        """Why there is no plan yet, in plain text; None if there is one, or if none is needed."""
        return None

    def iteration_ended(self, iteration: Iteration, *, compiled: bool) -> Phase:
        """Take in an iteration and return the phase from now on.

        compiled: a graph was compiled in the iteration, or the iterations to come will run other stages.
        """
        self._recent_seconds.append(iteration.seconds)
        return self._next(iteration, compiled=compiled)

    def _next(self, iteration: Iteration, *, compiled: bool) -> Phase:
        return self

    def graph_begins(self, program: Program) -> None:
        """A graph is about to run managed."""

    def graphs_changed(self) -> Phase:
        """Return the phase from now on, after a graph was compiled or before one runs with larger sizes than ever."""
        return self

    def end(self) -> None:
        """Stop what the phase has started. Waits until it has stopped."""


class ProfilePhase(Phase):
    """Records iterations until enough equal ones have ended, and makes a trace of them."""

    name = "profile"

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._recorded: list[Iteration] = []
        self._repetition = profiling.Repetition(run.border)
        self._problem: str | None = None

    @property
    def _sizes_vary(self) -> bool:
        """Whether the inputs had other sizes in some of the iterations: the graphs are the same ones."""
        return len({each.signature for each in self._recorded}) > 1

    @property
    def _wanted(self) -> int:
        """How many iterations are profiled. The one before the first of them tells which blocks outlive it."""
        return self._run.options.profile_iterations * (_OF_VARYING_SIZES if self._sizes_vary else 1)

    @property
    def waiting_for(self) -> str:
        so_far = f"{self._wanted + 1} iterations in a row that run the same graphs ({len(self._recorded)} so far)"
        if self._sizes_vary:
            return f"{so_far}, with inputs of other sizes: the plan will be for the largest"
        if len(self._recorded) > self._wanted:
            return f"{so_far}, since stages took very different times in them"
        return so_far if self._problem is None else f"{so_far}; the last ones did not count, since {self._problem}"

    def graph_begins(self, program: Program) -> None:
        run = self._run
        if run.warm is not None and run.observer.recorder.iteration_begins:
            kept_bytes = run.warm.iteration_begins(program)
            if run.subgroups.used_bytes is None:
                run.subgroups.used_bytes = kept_bytes

    def _next(self, iteration: Iteration, *, compiled: bool) -> Phase:
        kept = self._run.warm.plan_for(iteration) if self._run.warm is not None else None
        if kept is not None:
            _note(self._run, kept[0])
            _note_floor(self._run, kept[0].trace)
            return PlannedPhase(self._run, *kept, kept=True)
        self._problem = self._problem_of(iteration, compiled)
        same = not self._recorded or self._recorded[-1].structure == iteration.structure
        repeats = self._problem is not None or same
        self._problem = self._repetition.look(iteration, compiled=compiled, repeats=repeats) or self._problem
        if self._problem is not None:
            self._recorded.clear()
            return self
        if not same:
            self._problem = f"other graphs ran in them, and they did not repeat after up to {profiling.LONGEST_PERIOD} iterations"
            self._recorded.clear()  # a trace is of one iteration: those that it is made of must have run the same graphs
        varied = self._sizes_vary
        self._recorded.append(iteration)
        if self._sizes_vary and not varied:
            logger.info("inputs vary in size: %d iterations are profiled, and one plan will be followed for all", self._wanted)
        measured, evictions = self._recorded[1:], self._run.pager.account.evictions
        if len(measured) < self._wanted:
            return self
        # Where everything fits, times do not matter, and those of other sizes do not compare.
        if evictions and not self._sizes_vary and not profiling.times_agree(measured):
            if len(measured) < _LONGEST * self._wanted:
                return self
            logger.info("stages took very different times in %d profiled iterations: the first plan may be poor", len(measured))
        recorded, self._recorded = self._recorded, []
        try:
            profile = _profile_of(self._run, recorded)
        except ValidationError as error:
            return _without_plan(self._run, f"what was recorded contradicts itself, please report this: {error}")
        return self._decide(profile)

    def _problem_of(self, iteration: Iteration, compiled: bool) -> str | None:
        """Return why an iteration cannot be used; None if it can."""
        if not iteration.regions:
            return "no compiled graph ran in the last one"
        if iteration.truncated:
            return "the last one was too long to be recorded"
        if not iteration.complete:
            return "a stage of the last one failed"
        if iteration.is_update_alone:
            return "only an optimizer stepped in the last one"
        if not iteration.timed:
            return "the stages of the last one were not timed"
        return "graphs are still being compiled, or updates are about to move into the backward pass" if compiled else None

    def _decide(self, profile: Profile) -> Phase:
        run = self._run
        _note(run, profile)
        if run.pager.account.evictions == 0:  # nothing had to leave, so unmanaged stages fit as well, and cost nothing
            return FitsPhase(run)
        _note_floor(run, profile.trace)
        _tell_of_time_outside(profile.trace)
        if run.given is None:
            return PlanningPhase(run, profile)
        plan = fit_given_plan(run.given, profile.trace, run.background.budgets(profile), run.options.plan)
        return PlannedPhase(run, profile, plan)


def _profile_of(run: RunContext, recorded: Sequence[Iteration], known: Sequence[Profile] = ()) -> Profile:
    """Return the profile of the iterations with the largest inputs, of a row that ran the same graphs. Not of the first one.

    Its trace says how sizes and times depend on the length of inputs, as far as these iterations and known profiles tell.
    """
    numbers: dict[object, list[int]] = {}
    for number in sorted(range(1, len(recorded)), key=lambda number: (recorded[number].made_bytes, number)):
        numbers.setdefault(recorded[number].signature, []).append(number)
    *shorter, largest = numbers.values()
    samples = list(known)[1 - _MOST_SAMPLES :]
    for each in shorter[:: -(-len(shorter) // _MOST_SAMPLES) or 1]:
        with contextlib.suppress(ValidationError):  # what contradicts itself tells nothing
            samples.append(_profiled(run, recorded, each))
    return profiling.with_lengths([*samples, _profiled(run, recorded, largest)])


def _profiled(run: RunContext, recorded: Sequence[Iteration], numbers: Sequence[int]) -> Profile:
    """Return the profile of those of the iterations that have these numbers; their inputs had the same sizes."""
    profile = profiling.build_profile(
        [recorded[number] for number in numbers],
        name=Path(sys.argv[0]).stem or "training",
        created_by=f"teraio, torch {torch.__version__}",
        hardware=run.machine.hardware(),
        fixed_bytes=run.pager.account.unmoved_bytes,
        survivors=recorded[numbers[-1] - 1].survivors,
        no_reruns=why_no_reruns(run.options),
    )
    trace = profile.trace.model_copy(update={"subgroup_bytes": run.subgroups.used_bytes, "tiled": run.tiled(profile.trace)})
    return dataclasses.replace(profile, trace=trace)


def _note(run: RunContext, profile: Profile) -> None:
    """Note what is known from now on, and write the trace if the user wants it."""
    run.findings.profile = profile
    run.findings.trace_path = save(profile.trace, run.options.trace_out)


def _note_floor(run: RunContext, trace: planner.Trace) -> None:
    smallest, stage = planner.floor(trace)
    run.findings.floor = (smallest, trace.stages[stage].name)


def why_no_reruns(options: Options) -> str:
    """Return why no stage may run again in the backward pass, in plain words; "" if some may."""
    if options.recompute == "off":
        return "the option recompute is 'off'"
    return "the option overlap_step updates parameters in the backward pass" if options.overlap_step else ""


def _tell_of_time_outside(trace: planner.Trace) -> None:
    """Warn if most of the time goes to code that was not compiled because of graph breaks."""
    outside = sum(stage.duration_seconds for stage in trace.stages if stage.phase == "user")
    reasons = graph_break_reasons()
    if reasons and outside > max(_OUTSIDE_SECONDS, trace.ideal_seconds / 2):
        share = outside / trace.ideal_seconds
        logger.warning(
            "%.0f %% of an iteration's time is outside of compiled graphs, where nothing moves%s. Set TORCH_LOGS=graph_breaks "
            "to see what was not compiled",
            100 * share,
            reasons,
        )


class PlanningPhase(Phase):
    """Waits for a plan while blocks move on demand, or by a plan for smaller inputs."""

    name = "planning"
    waiting_for = "the plan, which is being made in the background"

    def __init__(self, run: RunContext, profile: Profile, smaller: PlannedPhase | None = None) -> None:
        """smaller: the phase that goes on until the plan is there, and after that if none can be made."""
        super().__init__(run)
        self._profile = profile
        self._smaller = smaller
        self.in_force = None if smaller is None else smaller.in_force
        run.background.start(profile.trace, run.background.budgets(profile))

    def _next(self, iteration: Iteration, *, compiled: bool) -> Phase:
        try:
            made = self._run.background.take()
        except TeraioError as error:
            return _without_plan(self._run, str(error)) if self._smaller is None else self._smaller
        if made is None:
            return self
        if self._smaller is not None:
            self._smaller.end()
        return PlannedPhase(self._run, self._profile, made[1])

    def end(self) -> None:
        self._run.background.cancel()
        if self._smaller is not None:
            self._smaller.end()


class DemandPhase(Phase):
    """Moves blocks on demand, as no plan can be made."""

    name = "demand"

    def __init__(self, run: RunContext, problem: str) -> None:
        super().__init__(run)
        self._problem = problem

    @property
    def waiting_for(self) -> str:
        return f"nothing: no plan could be made ({self._problem})"


def _without_plan(run: RunContext, problem: str) -> DemandPhase:
    logger.warning("no plan could be made, blocks go on moving on demand: %s", problem)
    return DemandPhase(run, problem)


class PlannedPhase(Phase):
    """Follows a plan, and the plans that replace it, until iterations run other graphs, or the same with larger inputs."""

    name = "planned"

    def __init__(self, run: RunContext, profile: Profile, plan: planner.Plan, *, kept: bool = False) -> None:
        """kept: the plan was made by an earlier start."""
        super().__init__(run)
        run.findings.plan_path = save(plan, run.options.plan_out)
        if not kept:
            self._keep(profile.trace, plan)
        self.in_force: PlanInForce = PlanInForce(run.observer, run.background, profile, plan, keep=self._keep)
        self._planned = profile.iteration.structure
        self._samples = list(profile.samples)
        self._largest_bytes = profile.made_bytes
        self._before: Iteration | None = None
        self._unplanned = 0
        run.pager.plan_begins()
        self._collector = QuietCollector()
        self._collector.begin()  # what is there now was made for the iterations to come
        moved: Counter[str] = Counter()  # by tier: sizes of the blocks that wait there, added up over the moves of an iteration
        for move in plan.moves:
            moved[move.tier] += profile.trace.blocks[move.block].size_bytes
        logger.info(
            "following a plan with %d moves%s an iteration (%s): predicted %.3f s an iteration, %.3f s with unlimited memory",
            len(plan.moves),
            f" and {len(plan.recompute)} stages that run again" if plan.recompute else "",
            ", ".join(f"{tier}: {size:,} bytes" for tier, size in moved.items()) or "nothing moves",
            self.in_force.predicted_seconds,
            profile.trace.ideal_seconds,
        )

    def _next(self, iteration: Iteration, *, compiled: bool) -> Phase:
        as_planned = iteration.structure == self._planned and not iteration.truncated
        before, self._before = self._before, iteration if as_planned else None
        if self.in_force.iteration_ended(iteration, as_planned=as_planned and not compiled):
            self._run.findings.replans += 1
            self._recent_seconds.clear()
        # Where an optimizer steps alone, more passes are to come: that does not end a plan.
        self._unplanned = 0 if as_planned else self._unplanned + (not iteration.is_update_alone)
        if as_planned and before is not None and not compiled and iteration.timed and iteration.complete:
            # Its inputs were clearly larger than those that the plan is for, so that blocks left on demand.
            if self._run.options.plan is None and iteration.made_bytes > self._largest_bytes * _CLEARLY_LARGER:
                return self._plan_for([before, iteration])
            if not self.in_force.covers(iteration):
                self._cover([before, iteration])
        if self._unplanned <= self._run.options.profile_iterations:
            return self
        logger.info("the last %d iterations were not those that were planned: profiling again", self._unplanned)
        self.end()
        return ProfilePhase(self._run)

    def _cover(self, recorded: Sequence[Iteration]) -> None:
        """Learn from the last of these iterations what to follow for inputs as short as its own."""
        if not self._samples:
            return  # an earlier start made the plan, or they tell nothing
        with contextlib.suppress(ValidationError):  # what contradicts itself tells nothing
            self._samples = [_profile_of(self._run, recorded).samples[-1], *self._samples[1 - _MOST_SAMPLES :]]
            lengths = profiling.with_lengths(self._samples).trace.lengths
            if lengths is None:
                self._samples.clear()  # more of them would tell no more
            else:
                self.in_force.cover(lengths)

    def _plan_for(self, recorded: Sequence[Iteration]) -> Phase:
        """Begin to plan for the last of these iterations, and follow the plan for smaller inputs meanwhile."""
        self._largest_bytes = recorded[-1].made_bytes
        try:
            profile = _profile_of(self._run, recorded, self._samples)
        except ValidationError as error:
            logger.warning("an iteration with larger inputs contradicts itself, please report this: %s", error)
            return self
        logger.info("inputs were larger than those that the plan is for: planning for %s", f"{self._largest_bytes:,} bytes")
        _note(self._run, profile)
        _note_floor(self._run, profile.trace)
        return PlanningPhase(self._run, profile, self)

    def _keep(self, trace: planner.Trace, plan: planner.Plan) -> None:
        if self._run.warm is not None:
            self._run.warm.keep(trace, plan)

    def end(self) -> None:
        self.in_force.stop()
        self._collector.end()  # the model may be another one from now on


class FitsPhase(Phase):
    """Runs stages unmanaged, and watches whether iterations come to need more than the budget."""

    name = "fits"
    managed = False

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        if run.peaks is not None:
            run.peaks.begin(run.managed_bytes())
        run.pager.device.give_back_memory()  # stages run in the user's stream now: what is cached for their own serves nobody
        limit = "no limit" if run.pager.account.budget_bytes is None else f"budget {run.pager.account.budget_bytes:,} bytes"
        level = logging.DEBUG if run.findings.said_that_it_fits else logging.INFO
        logger.log(level, "everything fits (peak %s bytes, %s): nothing has to move", f"{run.pager.account.peak_bytes:,}", limit)
        run.findings.said_that_it_fits = True

    def _next(self, iteration: Iteration, *, compiled: bool) -> Phase:
        run = self._run
        run.machine.trim()
        if run.peaks is None or not run.peaks.outgrown(run.managed_bytes()):
            return self
        logger.info("an iteration took more memory than the budget, unlike those before it: profiling again")
        return ProfilePhase(run)

    def graphs_changed(self) -> Phase:
        return ProfilePhase(self._run)


class ClosedPhase(Phase):
    """The run has ended: compiled functions that are still called run unmanaged."""

    name = "fits"
    managed = False
