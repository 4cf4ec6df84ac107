"""From the first iteration to the planned ones: profile on demand, plan in the background, run by the plan.

[Note: Phases]
profile  -> fits      everything was on the device all the time: stages run unmanaged from now on
profile  -> planning  blocks had to move: the solver runs while training goes on on demand
planning -> planned   at the end of the iteration in which the plan arrives
planning -> demand    no plan can be made
planned  -> profile   several iterations in a row ran other graphs than planned
fits     -> profile   a new graph was compiled
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

import planner
from planner.errors import BudgetError, InfeasiblePlanError, PlanError, TeraioError
from runtime.executor import run_managed, run_plain
from runtime.pager import Pager
from runtime.program import Program
from runtime.workspace import WorkspaceMeter
from teraio.machine import Machine
from teraio.optimizer import OptimizerSteps
from teraio.options import Options
from teraio.planning import PlanningJob
from teraio.profiler import Profile, build_profile
from teraio.stages.compile import StageCompiler
from teraio.status import RunPhase, Status
from teraio.timeline import Iteration, Timeline, lay_out_plan

logger = logging.getLogger("teraio")


class Lifecycle:
    """One budget, one timeline: everything that models compiled with the same options share."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options = options
        self._machine = Machine(options, device)
        self._pager = Pager(mover=self._machine.mover, budget_bytes=self._machine.budget_bytes)
        self._timeline = Timeline(self._pager)
        self._meter = WorkspaceMeter(self._machine.memory)
        self.stage_compiler = StageCompiler(codegen=options.codegen)
        self._steps = OptimizerSteps(
            self._pager, self._timeline, active=lambda: self._phase != "fits", step_done=self._step_done
        )
        self._phase: RunPhase = "profile"
        self._stages = 0
        self._finished = 0
        self._border: int | None = None
        self._other_steps = 0
        self._recorded: list[Iteration] = []
        self._recent: deque[float] = deque(maxlen=8)
        self._strangers = 0
        self._compiled_now = True
        self._job: PlanningJob | None = None
        self._profile: Profile | None = None
        self._plan: planner.Plan | None = None
        self._floor: tuple[int, str] | None = None
        self._trace_path: Path | None = None
        self._plan_path: Path | None = None

    # -- compiled graphs

    def callable(self, program: Program) -> Callable[[list[Any]], list[Any]]:
        """The function that AOTAutograd calls for `program` (boxed)."""

        def call(arguments: list[Any]) -> list[Any]:
            if self._phase == "fits":
                return run_plain(program, arguments)
            sized = program if program.resize is None else program.resize(program, arguments)
            return run_managed(sized, arguments, self._pager, self._timeline, self._meter)

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
        small_bytes = sum(program.small_bytes for program in programs) + self._pager.fixed_bytes
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
        self._machine.ensure_spill_room(sum(program.kept_bytes for program in programs) - budget)

    # -- iterations

    def _step_done(self, optimizer: Optimizer) -> None:
        """An iteration ends with the step of the first optimizer seen; others are part of it."""
        if self._border is None or (id(optimizer) != self._border and self._other_steps > 4):
            self._border = id(optimizer)
        if id(optimizer) != self._border:
            self._other_steps += 1
            return
        self._other_steps = 0
        self._iteration_done(self._timeline.iteration_ends())

    def _iteration_done(self, iteration: Iteration) -> None:
        self._finished += 1
        self._recent.append(iteration.seconds)
        if self._phase == "profile":
            self._note_profiled(iteration)
        elif self._phase == "planning":
            self._take_plan_if_ready()
        elif self._phase == "planned":
            self._note_strangers(iteration)
        elif self._phase == "fits":
            self._machine.trim()
        self._compiled_now = False

    def _note_profiled(self, iteration: Iteration) -> None:
        complete = all(region.complete for region in iteration.regions)
        if self._compiled_now or not complete or not iteration.regions:
            self._recorded.clear()
            return
        if self._recorded and self._recorded[-1].signature != iteration.signature:
            self._recorded.clear()
        self._recorded.append(iteration)
        # The iteration before the last tells which blocks outlive it, so one more is recorded than is asked for.
        if len(self._recorded) > self._options.profile_iterations:
            self._finish_profile()

    def _finish_profile(self) -> None:
        self._profile = build_profile(
            self._recorded[1:],
            name=Path(sys.argv[0]).stem or "training",
            created_by=f"teraio, torch {torch.__version__}",
            hardware=self._machine.hardware(),
            optimizer_state_bytes=self._pager.fixed_bytes,
            survivors=self._recorded[-2].survivors,
        )
        self._recorded = []
        if self._options.trace_out is not None:
            self._profile.trace.save(self._options.trace_out)
            self._trace_path = self._options.trace_out
        if self._pager.evictions == 0:
            self._enter("fits")
            limit = "no limit" if self._pager.budget_bytes is None else f"{self._pager.budget_bytes:,} bytes"
            logger.info("everything fits (%s bytes, %s): nothing has to move", f"{self._pager.peak_bytes:,}", limit)
        else:
            self._begin_planning(self._profile)

    def _begin_planning(self, profile: Profile) -> None:
        smallest, stage = planner.floor(profile.trace)
        self._floor = (smallest, profile.trace.stages[stage].name)
        if self._options.plan is not None:
            self._follow(profile, self._given_plan(profile.trace))
            return
        self._enter("planning")
        self._job = PlanningJob(
            profile.trace, self._budgets(), time_limit_seconds=self._options.solver_time_limit
        )

    def _budgets(self) -> planner.Budgets:
        return planner.Budgets(
            device_bytes=self._pager.budget_bytes or 0, storage_bytes=self._options.storage_budget
        )

    def _given_plan(self, trace: planner.Trace) -> planner.Plan:
        """The plan file that the user gave, if it can be carried out here. Raises PlanError if not."""
        path = self._options.plan
        plan = planner.Plan.load(path) if path is not None else None
        if plan is None:
            raise PlanError("no plan file was given")
        plan = plan.model_copy(update={"trace_fingerprint": trace.fingerprint, "budgets": self._budgets()})
        try:
            planner.simulate(trace, plan)
        except InfeasiblePlanError as error:
            raise PlanError(
                f"{path}: this plan was made for another program, shape or budget: {error}; make a new one from a "
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
        self._plan = plan
        if self._options.plan_out is not None:
            plan.save(self._options.plan_out)
            self._plan_path = self._options.plan_out
        sizes = [block.size_bytes for block in profile.trace.blocks]
        hints = lay_out_plan(plan, profile.iteration, profile.ids, sizes)
        self._timeline.follow(hints, {number: block for block, number in profile.ids.items() if not block.dead})
        self._enter("planned")
        if plan.predicted is not None:
            logger.info(
                "following a plan with %d moves: predicted %.3f s an iteration, %.3f s with unlimited memory",
                len(plan.moves), plan.predicted.iteration_seconds, plan.predicted.ideal_seconds,
            )  # fmt: skip

    def _note_strangers(self, iteration: Iteration) -> None:
        profiled = self._profile.iteration.signature if self._profile is not None else ()
        self._strangers = 0 if iteration.signature == profiled else self._strangers + 1
        if self._strangers > self._options.profile_iterations:
            logger.info("the last %d iterations were not those that were planned: profiling again", self._strangers)
            self._start_profile()

    def _start_profile(self) -> None:
        self._strangers = 0
        self._recorded = []
        self._timeline.follow(None, {})
        self._enter("profile")

    def _enter(self, phase: RunPhase) -> None:
        self._phase = phase
        self._recent.clear()

    # -- from outside

    @property
    def unused(self) -> bool:
        """True as long as nothing has run."""
        return self._finished == 0 and not self._pager.blocks

    def wait_for_plan(self, timeout_seconds: float | None) -> bool:
        """Block until no planning is under way, or the time is over."""
        job = self._job
        return True if job is None else job.wait(timeout_seconds)

    def status(self) -> Status:
        """A snapshot. Never blocks."""
        predicted = self._plan.predicted if self._plan is not None and self._phase == "planned" else None
        return Status(
            phase=self._phase,
            iterations=self._finished,
            device_budget_bytes=self._pager.budget_bytes,
            device_peak_bytes=self._pager.peak_bytes,
            moved_bytes=self._machine.moved_bytes(),
            predicted_iteration_seconds=predicted.iteration_seconds if predicted is not None else None,
            measured_iteration_seconds=statistics.median(self._recent) if self._recent else None,
            ideal_iteration_seconds=self._profile.trace.ideal_seconds if self._profile is not None else None,
            floor_bytes=self._floor[0] if self._floor is not None else None,
            deviations=self._timeline.deviations,
            trace_path=str(self._trace_path) if self._trace_path is not None else None,
            plan_path=str(self._plan_path) if self._plan_path is not None else None,
            spill_directories=self._machine.spill_directories(),
            stages=self._stages,
            distinct_stages=self.stage_compiler.distinct_stages,
        )

    def close(self) -> None:
        """Bring everything back, unhook, remove files. Blocks."""
        self._steps.close()
        self._phase = "fits"  # compiled functions that are still called run unmanaged
        if self._job is not None:
            self._job.cancel()
        try:
            self._pager.bring_back_all()
        finally:
            self._machine.close()
