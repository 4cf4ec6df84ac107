"""From the first iteration to the planned ones: profile on demand, plan in the background, run by the plan.

[Note: Phases]
profile  -> fits      everything was on the device all the time: stages run unmanaged from now on
profile  -> planning  blocks had to move: the solver runs while training goes on on demand
planning -> planned   at the end of the iteration in which the plan arrives
planning -> demand    no plan can be made
planned  -> planned   another plan takes over, see [Note: Planning again]
planned  -> profile   several iterations in a row ran other graphs than planned
fits     -> profile   a new graph was compiled, sizes grew, or an iteration took more than the budget
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import planner
from planner.errors import BudgetError, InfeasiblePlanError, PlanError, TeraioError
from runtime.execution import Program, WorkspaceMeter, run_managed, run_plain
from runtime.paging import Pager
from teraio.machine import Machine
from teraio.optimizer import HostRates, OptimizerSteps, SubgroupSizes
from teraio.options import Options
from teraio.planning import PlanFollower, PlanningJob, save
from teraio.profiling import Iteration, IterationRecorder, LargestSizes, PeakWatch, Profile, build_profile, states_that_stay
from teraio.stages import StageCompiler
from teraio.status import RunPhase, Status

logger = logging.getLogger("teraio")


class _Ended(NamedTuple):
    """An iteration that has ended; `compiled`: a graph was compiled in it, or later ones will run other stages."""

    iteration: Iteration
    compiled: bool


class TrainingRun:
    """One budget, one timeline: everything that models compiled with the same options share."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._given = planner.Plan.load(options.plan) if options.plan is not None else None
        self._options = options
        self._machine = Machine(options, device)
        self._pager = Pager(
            mover=self._machine.mover,
            budget_bytes=self._machine.budget_bytes,
            device=self._machine.device,
            busy_seconds=self._machine.busy_seconds,
        )
        self._timeline = IterationRecorder(self._pager)
        self._meter = WorkspaceMeter(
            self._machine.memory,
            runs=self._machine.measured_runs,
            first_is_special=self._machine.device.asynchronous,
        )
        self.stage_compiler = StageCompiler(codegen=options.codegen)
        # A plan is for the subgroups of the run that it was made from.
        given_bytes = self._given.subgroup_bytes if self._given is not None else None
        self._subgroups = SubgroupSizes(self._machine.hardware, given_bytes=given_bytes)
        self._steps = OptimizerSteps(
            self._pager,
            self._timeline,
            active=lambda: self._phase != "fits",
            step_done=self._step_done,
            automatic=options.optimizer == "auto",
            ensure_room=self._ensure_room,
            overlap=options.overlap_step,
            rates=self._host_rates(),
            sizes=self._subgroups,
        )
        self._phase: RunPhase = "profile"
        self._sizes = LargestSizes()
        self._closed = False
        self._stages = 0
        self._finished = 0
        self._border: int | None = None
        self._other_steps = 0
        self._recorded: list[Iteration] = []
        self._recent: deque[float] = deque(maxlen=8)
        self._strangers = 0
        self._compiled_now = True
        self._ended: _Ended | None = None
        self._job: PlanningJob | None = None
        self._profile: Profile | None = None
        self._follower = PlanFollower(options, self._machine, self._timeline)
        self._late_seconds = 0.0
        self._floor: tuple[int, str] | None = None
        self._kept_bytes = 0
        self._peaks: PeakWatch | None = None
        memory, budget = self._machine.memory, self._machine.budget_bytes
        if self._machine.measured_runs is None and memory is not None and budget is not None:
            self._peaks = PeakWatch(memory, budget)
        self._trace_path: Path | None = None
        self._plan_path: Path | None = None

    def _host_rates(self) -> HostRates | None:
        if self._machine.host_bytes is None or not self._options.host_updates:
            return None

        def scratch(size_bytes: int) -> AbstractContextManager[int | None]:
            self._pager.drop_void_copies("host")  # on demand, blocks fill the host tier first
            self._machine.device.mark().wait()  # what the device has been asked to read from there
            return self._machine.host_scratch(size_bytes)

        return HostRates(scratch, shared=not self._machine.device.asynchronous)

    # -- compiled graphs

    def callable(self, program: Program) -> Callable[[list[Any]], list[Any]]:
        """The function that AOTAutograd calls for `program` (boxed)."""

        def call(arguments: list[Any]) -> list[Any]:
            sized = program
            if program.resize is not None:
                sized = program.resize(program, arguments)
                if self._sizes.grow(program.identity, sized) and self._phase == "fits" and not self._closed:
                    self._start_profile()
            if self._phase == "fits":
                return run_plain(program, arguments)
            self._steps.between_regions()
            overlap = self._steps.overlap
            interleaved = overlap.interleaved(program, arguments) if overlap is not None else None
            return run_managed(sized, arguments, self._pager, self._timeline, self._meter, interleaved)

        call._boxed_call = True  # type: ignore[attr-defined]
        self._stages += len(program.stages)
        self._compiled_now = True
        if self._phase == "fits":
            self._start_profile()
        return call

    def check(self, programs: Sequence[Program]) -> None:
        """Refuse a budget that no schedule can satisfy, and make sure of the room in the spill files.

        Raises BudgetError with the smallest budget and the stage that sets it, StorageFullError.
        """
        small_bytes = sum(program.small_bytes for program in programs) + self._pager.unmoved_bytes
        for program in programs:
            for stage in program.stages:
                needed = stage.input_bytes + stage.output_bytes + stage.workspace_bytes + small_bytes
                if self._floor is None or needed > self._floor[0]:
                    self._floor = (needed, stage.name)
        budget = self._machine.budget_bytes
        if budget is None or self._floor is None:
            return
        smallest, name = self._floor
        if smallest > budget:
            raise BudgetError(smallest_bytes=smallest, budget_bytes=budget, stage=name)
        self._kept_bytes = max(self._kept_bytes, sum(program.kept_bytes for program in programs))
        self._ensure_room(0)

    def _ensure_room(self, state_bytes: int) -> None:
        """In the spill files, for what programs keep and so many bytes of states. Raises StorageFullError."""
        if self._pager.budget_bytes is not None:
            self._machine.ensure_room(self._kept_bytes + state_bytes - self._pager.budget_bytes)

    # -- iterations

    def _step_done(self, optimizer: Optimizer) -> None:
        """An iteration ends with the step of the first optimizer seen; others are part of it."""
        if self._border is None or (id(optimizer) != self._border and self._other_steps > 4):
            self._border = id(optimizer)
        if id(optimizer) != self._border:
            self._other_steps += 1
            return
        self._other_steps = 0
        watching = self._steps.overlap is not None and not self._steps.overlap.settled
        ended: _Ended | None = _Ended(self._timeline.iteration_ends(), self._compiled_now or watching)
        self._compiled_now = False
        if self._machine.device.asynchronous:  # its times are not known yet; those of the one before mostly are
            ended, self._ended = self._ended, ended
        if ended is not None:
            ended.iteration.read_times()
            self._iteration_done(ended.iteration, compiled=ended.compiled)

    def _iteration_done(self, iteration: Iteration, *, compiled: bool) -> None:
        self._finished += 1
        self._recent.append(iteration.seconds)
        self._late_seconds = iteration.waited_seconds
        if self._phase == "profile":
            self._note_profiled(iteration, compiled=compiled)
        elif self._phase == "planning":
            self._take_plan_if_ready()
        elif self._phase == "planned":
            self._note_planned(iteration, compiled=compiled)
        elif self._phase == "fits":
            self._machine.trim()
            if self._peaks is not None and self._peaks.outgrown(self._managed_bytes()):
                logger.info("an iteration took more memory than the budget, which those before fitted in: profiling again")
                self._start_profile()

    def _note_profiled(self, iteration: Iteration, *, compiled: bool) -> None:
        complete = all(region.complete for region in iteration.regions)
        if compiled or not complete or not iteration.regions:
            self._recorded.clear()
            return
        if self._recorded and self._recorded[-1].signature != iteration.signature:
            self._recorded.clear()
        self._recorded.append(iteration)
        # The iteration before the last tells which blocks outlive it, so one more is recorded than is asked for.
        if len(self._recorded) > self._options.profile_iterations:
            self._finish_profile()

    def _finish_profile(self) -> None:
        profile = build_profile(
            self._recorded[1:],
            name=Path(sys.argv[0]).stem or "training",
            created_by=f"teraio, torch {torch.__version__}",
            hardware=self._machine.hardware(),
            fixed_bytes=self._pager.unmoved_bytes,
            survivors=self._recorded[-2].survivors,
        )
        trace = profile.trace.model_copy(update={"subgroup_bytes": self._subgroups.used_bytes})
        self._profile = dataclasses.replace(profile, trace=trace)
        self._recorded = []
        self._trace_path = save(trace, self._options.trace_out)
        if self._pager.evictions == 0:
            self._enter("fits")
            limit = "no limit" if self._pager.budget_bytes is None else f"{self._pager.budget_bytes:,} bytes"
            logger.info("everything fits (%s bytes, %s): nothing has to move", f"{self._pager.peak_bytes:,}", limit)
        else:
            self._begin_planning(self._profile)

    def _begin_planning(self, profile: Profile) -> None:
        smallest, stage = planner.floor(profile.trace)
        self._floor = (smallest, profile.trace.stages[stage].name)
        if self._given is not None:
            self._follow(profile, self._fitted(self._given, profile.trace))
            return
        self._enter("planning")
        self._job = PlanningJob(profile.trace, self._budgets(), time_limit_seconds=self._options.solver_time_limit)

    def _budgets(self) -> planner.Budgets:
        """What a plan may use: no more of the lower tiers than the states leave that stay there, which no trace has."""
        taken = states_that_stay(self._pager.blocks, self._profile.ids if self._profile is not None else {})
        host, storage = self._machine.host_bytes, self._options.storage_budget
        return planner.Budgets(
            device_bytes=self._pager.budget_bytes or 0,
            host_bytes=None if host is None else max(host - taken["host"], 0),
            storage_bytes=None if storage is None else max(storage - taken["storage"], 0),
        )

    def _fitted(self, plan: planner.Plan, trace: planner.Trace) -> planner.Plan:
        """The plan that the user gave, if it can be carried out here. Raises PlanError if not."""
        plan = plan.model_copy(update={"trace_fingerprint": trace.fingerprint, "budgets": self._budgets()})
        try:
            planner.simulate(trace, plan)
        except InfeasiblePlanError as error:
            raise PlanError(
                f"{self._options.plan}: this plan was made for another program, shape or budget: {error}; make a new one from a "
                "trace of this run (option trace_out), or leave out the option plan"
            ) from error
        return plan

    def _take_plan_if_ready(self) -> None:
        if self._job is None or self._profile is None or not self._job.done:
            return
        try:
            plan = self._job.result()
        except TeraioError as error:
            self._enter("demand")
            logger.warning("no plan could be made, blocks go on moving on demand: %s", error)
        else:
            self._follow(self._profile, plan)
        self._job = None

    def _follow(self, profile: Profile, plan: planner.Plan) -> None:
        self._plan_path = save(plan, self._options.plan_out)
        self._follower.follow(profile, plan)
        self._enter("planned")
        if plan.predicted is not None:
            logger.info(
                "following a plan with %d moves: predicted %.3f s an iteration, %.3f s with unlimited memory",
                len(plan.moves),
                plan.predicted.iteration_seconds,
                plan.predicted.ideal_seconds,
            )

    def _note_planned(self, iteration: Iteration, *, compiled: bool) -> None:
        profiled = self._profile.iteration.signature if self._profile is not None else ()
        as_planned = iteration.signature == profiled
        if self._follower.iteration_ended(iteration, as_planned=as_planned and not compiled):
            self._recent.clear()
        self._strangers = 0 if as_planned else self._strangers + 1
        if self._strangers > self._options.profile_iterations:
            logger.info("the last %d iterations were not those that were planned: profiling again", self._strangers)
            self._start_profile()

    def _start_profile(self) -> None:
        self._strangers = 0
        self._recorded = []
        self._follower.stop()
        self._enter("profile")

    def _enter(self, phase: RunPhase) -> None:
        self._phase = phase
        self._recent.clear()
        if phase == "fits" and self._peaks is not None:
            self._peaks.begin(self._managed_bytes())

    def _managed_bytes(self) -> int:
        self._pager.forget_dead()
        return self._pager.used_bytes + self._pager.unmoved_bytes

    # -- from outside

    @property
    def unused(self) -> bool:
        """True as long as nothing has run."""
        return self._finished == 0 and not self._pager.blocks

    def manage_optimizer(self, optimizer: Optimizer) -> None:
        """Manage its steps and states, whatever the option optimizer says. Blocks while states are copied."""
        self._steps.manage(optimizer)

    def wait_for_plan(self, timeout_seconds: float | None) -> bool:
        """Block until no planning is under way, or the time is over."""
        job = self._job or self._follower
        return job.wait(timeout_seconds)

    def status(self) -> Status:
        """A snapshot. Never blocks."""
        drift, trace = self._follower.drift, self._follower.trace
        if trace is None and self._profile is not None:
            trace = self._profile.trace
        return Status(
            phase=self._phase,
            iterations=self._finished,
            device_budget_bytes=self._pager.budget_bytes,
            device_peak_bytes=self._pager.peak_bytes,
            moved_bytes=self._machine.moved_bytes(),
            busy_seconds=self._machine.busy_seconds(),
            exposed_seconds={} if self._machine.device.asynchronous else dict(self._pager.exposed_seconds),
            predicted_iteration_seconds=self._follower.predicted_seconds,
            measured_iteration_seconds=statistics.median(self._recent) if self._recent else None,
            ideal_iteration_seconds=trace.ideal_seconds if trace is not None else None,
            floor_bytes=self._floor[0] if self._floor is not None else None,
            deviations=self._timeline.deviations,
            drift=drift.iteration if drift is not None else None,
            late_seconds=self._late_seconds,
            replans=self._follower.replans,
            trace_path=str(self._trace_path) if self._trace_path is not None else None,
            plan_path=str(self._plan_path) if self._plan_path is not None else None,
            spill_directories=self._machine.spill_directories(),
            stages=self._stages,
            distinct_stages=self.stage_compiler.distinct_stages,
        )

    @contextlib.contextmanager
    def on_device(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within, those of `tensors` that are blocks are on the device, within the budget. Raises BudgetError."""
        with contextlib.ExitStack() as held:
            with self._machine.device.region():
                self._pager.enter_region()  # forgets blocks whose storage got other memory meanwhile
                blocks = list(dict.fromkeys(b for t in tensors if (b := self._pager.known_block(t)) is not None))
                try:
                    self._pager.acquire(blocks, 0, "tensors that user code asked for")
                    held.callback(self._pager.retire, blocks, blocks)
                finally:
                    self._pager.leave_region()
            yield

    def close(self) -> None:
        """Bring everything back, unhook, remove files. Blocks."""
        self._steps.close()
        self._closed, self._phase = True, "fits"  # compiled functions that are still called run unmanaged
        if self._job is not None:
            self._job.cancel()
        self._follower.stop()
        self._machine.lift_limit()
        try:
            with self._machine.device.region():
                self._pager.bring_back_all()
        finally:
            self._machine.close()
