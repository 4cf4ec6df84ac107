"""One training run: runs compiled programs and optimizer steps under a budget, and is in one phase at a time.

What a phase does and when the next one begins: [Note: Phases] in `teraio.phases`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import planner
from planner.errors import BudgetError
from runtime.execution import Program, WorkspaceMeter, run_managed, run_plain
from runtime.paging import Block, Pager
from runtime.system import uninterrupted
from teraio.machine import Machine
from teraio.optimizer import HostRates, OptimizerSteps, SubgroupSizes
from teraio.options import Options
from teraio.phases import ClosedPhase, Findings, Phase, ProfilePhase, RunContext
from teraio.planning import BackgroundPlanner, PlanningJob, StartJob
from teraio.profiling import Iteration, IterationRecorder, LargestSizes, PeakWatch
from teraio.stages import CutPolicy, StageCompiler
from teraio.status import Status

OpenMachine = Callable[[Options, torch.device], Machine]


class _Ended(NamedTuple):
    """An iteration that has ended. compiled: a graph was compiled in it, or later iterations will run other stages."""

    iteration: Iteration
    compiled: bool


class _IterationBorder:
    """Finds where iterations end: with the step of the first optimizer seen. Steps of others are part of the iteration."""

    _PATIENCE = 4
    """Steps of other optimizers in a row after which the first optimizer counts as no longer used."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._others = 0

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Return whether the step that `optimizer` has just done ends an iteration."""
        if self._first is None or (id(optimizer) != self._first and self._others > self._PATIENCE):
            self._first = id(optimizer)
        self._others = 0 if id(optimizer) == self._first else self._others + 1
        return id(optimizer) == self._first


class TrainingRun:
    """Everything that models compiled with the same options share: one machine, one pager with its budget, one recorder.

    open_machine, start_job, new_pager: make the parts; tests and benchmarks give others. cut_policy: where graphs are cut into
    stages. subgroup_bytes: size of optimizer subgroups; default: that of the given plan, else what was measured decides.
    Raises PlanError if the plan file is damaged, UnsupportedError, StorageError, StorageFullError.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        *,
        open_machine: OpenMachine = Machine,
        start_job: StartJob = PlanningJob,
        new_pager: Callable[..., Pager] = Pager,
        cut_policy: CutPolicy | None = None,
        subgroup_bytes: int | None = None,
    ) -> None:
        given = planner.Plan.load(options.plan) if options.plan is not None else None
        self._machine = machine = open_machine(options, device)
        self._pager = new_pager(
            mover=machine.mover,
            budget_bytes=machine.budget_bytes,
            device=machine.device,
            busy_seconds=machine.busy_seconds,
        )
        self._recorder = IterationRecorder(self._pager)
        self._meter = WorkspaceMeter(machine.memory, runs=machine.measured_runs, first_is_special=machine.device.asynchronous)
        self.stage_compiler = StageCompiler(codegen=options.codegen, policy=cut_policy)
        if subgroup_bytes is None and given is not None:
            subgroup_bytes = given.subgroup_bytes  # the plan is for subgroups of this size
        subgroups = SubgroupSizes(machine.hardware, given_bytes=subgroup_bytes)
        self._steps = self._optimizer_steps(options, subgroups)
        self._background = BackgroundPlanner(options, machine, self._pager, start_job=start_job)
        self._findings = Findings()
        self._context = RunContext(
            options=options,
            machine=machine,
            pager=self._pager,
            recorder=self._recorder,
            background=self._background,
            subgroups=subgroups,
            given=given,
            peaks=_peak_watch(machine),
            findings=self._findings,
        )
        self._phase: Phase = ProfilePhase(self._context)
        self._border = _IterationBorder()
        self._sizes = LargestSizes()
        self._stages = 0
        self._finished = 0
        self._compiled_now = True
        self._ended: _Ended | None = None
        self._late_seconds = 0.0
        self._kept_bytes = 0

    def _optimizer_steps(self, options: Options, subgroups: SubgroupSizes) -> OptimizerSteps:
        return OptimizerSteps(
            self._pager,
            self._recorder,
            active=lambda: self._phase.managed,
            step_done=self._step_done,
            automatic=options.optimizer == "auto",
            ensure_room=self._ensure_room,
            overlap=options.overlap_step,
            rates=self._host_rates(options),
            sizes=subgroups,
        )

    def _host_rates(self, options: Options) -> HostRates | None:
        if self._machine.host_bytes is None or not options.host_updates:
            return None

        def scratch(size_bytes: int) -> AbstractContextManager[int | None]:
            self._pager.drop_void_copies("host")  # blocks that move on demand fill the host tier first
            self._machine.device.mark().wait()  # the device may still read from there
            return self._machine.host_scratch(size_bytes)

        return HostRates(scratch, shared=not self._machine.device.asynchronous)

    # -- compiled graphs

    def callable(self, program: Program) -> Callable[[list[Any]], list[Any]]:
        """Return the function that AOTAutograd calls for `program` (boxed)."""

        def call(arguments: list[Any]) -> list[Any]:
            if not self._phase.managed and program.resize is None:
                return run_plain(program, arguments)
            with uninterrupted():
                sized = program
                if program.resize is not None:
                    sized = program.resize(program, arguments)
                    if self._sizes.grow(program.identity, sized):
                        self._phase = self._phase.graphs_changed()
                if self._phase.managed:
                    self._steps.between_regions()
                    overlap = self._steps.overlap
                    interleaved = overlap.interleaved(program, arguments) if overlap is not None else None
                    return run_managed(sized, arguments, self._pager, self._recorder, self._meter, interleaved)
            return run_plain(program, arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        self._stages += len(program.stages)
        self._compiled_now = True
        self._phase = self._phase.graphs_changed()
        return call

    def check(self, programs: Sequence[Program]) -> None:
        """Check that the budget suffices for each stage, and reserve room in the spill files for what the programs keep.

        Raises BudgetError with the smallest budget and the stage that needs it, StorageFullError.
        """
        small_bytes = sum(program.small_bytes for program in programs) + self._pager.unmoved_bytes
        floor = self._findings.floor
        for program in programs:
            for stage in program.stages:
                needed = stage.input_bytes + stage.output_bytes + stage.workspace_bytes + small_bytes
                if floor is None or needed > floor[0]:
                    floor = (needed, stage.name)
        self._findings.floor = floor
        budget = self._machine.budget_bytes
        if budget is None or floor is None:
            return
        smallest, name = floor
        if smallest > budget:
            raise BudgetError(smallest_bytes=smallest, budget_bytes=budget, stage=name)
        self._kept_bytes = max(self._kept_bytes, sum(program.kept_bytes for program in programs))
        self._ensure_room(0)

    def _ensure_room(self, state_bytes: int) -> None:
        """Reserve room in the spill files for what programs keep and for `state_bytes` of states. Raises StorageFullError."""
        if self._pager.budget_bytes is not None:
            self._machine.ensure_room(self._kept_bytes + state_bytes - self._pager.budget_bytes)

    # -- iterations

    def _step_done(self, optimizer: Optimizer) -> None:
        """Take in a step of an optimizer, which may end an iteration."""
        if not self._border.ends_with(optimizer):
            return
        watching = self._steps.overlap is not None and not self._steps.overlap.settled
        ended: _Ended | None = _Ended(self._recorder.iteration_ends(), self._compiled_now or watching)
        self._compiled_now = False
        if self._machine.device.asynchronous:  # its times are not known yet; those of the iteration before are, mostly
            ended, self._ended = self._ended, ended
        if ended is not None:
            ended.iteration.read_times()
            self._finished += 1
            self._late_seconds = ended.iteration.waited_seconds
            self._phase = self._phase.iteration_ended(ended.iteration, compiled=ended.compiled)

    # -- from outside

    @property
    def unused(self) -> bool:
        """True as long as nothing has run."""
        return self._finished == 0 and not self._pager.blocks

    def manage_optimizer(self, optimizer: Optimizer) -> None:
        """Manage its steps and states, whatever the option optimizer says. Waits while states are copied."""
        with uninterrupted():
            self._steps.manage(optimizer)

    def wait_for_plan(self, timeout_seconds: float | None) -> bool:
        """Wait until no plan is being made, or until the time is over. Return whether none is. For any thread."""
        return self._background.wait(timeout_seconds)

    def status(self) -> Status:
        """Return a snapshot. Never waits. For any thread."""
        phase, found = self._phase, self._findings
        follower = phase.follower
        drift = follower.drift if follower is not None else None
        trace = found.profile.trace if found.profile is not None else None
        if follower is not None:
            trace = follower.trace
        return Status(
            phase=phase.name,
            iterations=self._finished,
            device_budget_bytes=self._pager.budget_bytes,
            device_peak_bytes=self._pager.peak_bytes,
            moved_bytes=self._machine.moved_bytes(),
            busy_seconds=self._machine.busy_seconds(),
            exposed_seconds={} if self._machine.device.asynchronous else dict(self._pager.exposed_seconds),
            predicted_iteration_seconds=follower.predicted_seconds if follower is not None else None,
            measured_iteration_seconds=phase.measured_seconds,
            ideal_iteration_seconds=trace.ideal_seconds if trace is not None else None,
            floor_bytes=found.floor[0] if found.floor is not None else None,
            deviations=self._recorder.deviations,
            drift=drift.iteration if drift is not None else None,
            late_seconds=self._late_seconds,
            replans=found.replans,
            trace_path=str(found.trace_path) if found.trace_path is not None else None,
            plan_path=str(found.plan_path) if found.plan_path is not None else None,
            spill_directories=self._machine.spill_directories(),
            stages=self._stages,
            distinct_stages=self.stage_compiler.distinct_stages,
        )

    @contextlib.contextmanager
    def on_device(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Keep those of `tensors` that are blocks on the device within the `with` block. Raises BudgetError."""
        with contextlib.ExitStack() as held:
            with uninterrupted(), self._machine.device.region():
                self._pager.enter_region()  # forgets blocks whose storage got other memory meanwhile
                blocks = list(dict.fromkeys(b for t in tensors if (b := self._pager.known_block(t)) is not None))
                try:
                    self._pager.acquire(blocks, 0, "tensors that user code asked for")
                    held.callback(self._let_go, blocks)
                finally:
                    self._pager.leave_region()
            yield

    def _let_go(self, blocks: Sequence[Block]) -> None:
        with uninterrupted():
            self._pager.retire(blocks, blocks)

    def close(self) -> None:
        """Bring every block back to the device, remove hooks and files. Waits until that is done; a signal waits as well."""
        with uninterrupted():
            self._close()

    def _close(self) -> None:
        self._steps.close()
        ending, self._phase = self._phase, ClosedPhase(self._context)
        ending.end()
        self._machine.lift_limit()
        try:
            with self._machine.device.region():
                self._pager.bring_back_all()
        finally:
            self._machine.close()


def _peak_watch(machine: Machine) -> PeakWatch | None:
    """Return a watch over the peaks of memory. None if there is no budget, or if memory is not measured in every run."""
    if machine.measured_runs is not None or machine.memory is None or machine.budget_bytes is None:
        return None
    return PeakWatch(machine.memory, machine.budget_bytes)
