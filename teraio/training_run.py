"""One training run: runs compiled programs and optimizer steps under a budget, and is in one phase at a time.

What a phase does and when the next one begins: [Note: Phases] in `teraio.phases`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

import planner
from planner.errors import BudgetError, UnsupportedError
from runtime.execution import OperatorRunner, Program, Reruns, WorkspaceMeter, run_managed, run_plain
from runtime.paging import UNNAMED, Block, Pager
from runtime.system import interruptible, uninterrupted
from teraio.distributed import LibraryCalls
from teraio.following import IterationObserver
from teraio.graph_needs import GraphNeeds
from teraio.machine import Machine, Shared, open_machine
from teraio.optimizer import AddedGradients, AutogradReads, HostRates, OptimizerSteps, SubgroupSizes, host_threads
from teraio.options import Options
from teraio.phases import ClosedPhase, Findings, Phase, ProfilePhase, RunContext
from teraio.planning import BackgroundPlanner, PlanCache, PlanningJob, StartJob, WarmStart
from teraio.profiling import Iteration, IterationBorder
from teraio.ranks import RankGroup
from teraio.stages import Codegen, CutPolicy, SpeedOf, StageCompiler, clip_under_budget, speed_of
from teraio.watching import History, IterationStats, LargestSizes, PeakWatch, Status

logger = logging.getLogger("teraio")


_AT_WORK = threading.RLock()
"""One for the process: what PyTorch traces with is not safe for threads, and models share budgets and drives."""

OpenMachine = Callable[[Options, torch.device, Shared, RankGroup | None], Machine]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compile or run a graph within the block. Raises UnsupportedError if another thread does so at this moment. Never waits."""
    if not _AT_WORK.acquire(blocking=False):
        raise UnsupportedError(
            f"thread {threading.current_thread().name!r} compiles or runs a model while another thread does: teraio trains in "
            "one thread at a time; train one model after the other, or in processes of their own"
        )
    try:
        yield
    finally:
        _AT_WORK.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a training run is made of. Tests, benchmarks and captures give other parts.

    open_machine, start_job: make what the run has one of. first_phase: makes the phase in which it begins.
    cut_policy: where graphs are cut into stages. speed_of: how fast a device is, for these cuts. codegen: compiles stages, in
    place of the option. host_rates: rates of updates on the host, in place of measured ones. subgroup_bytes: size of optimizer
    subgroups; None: that of the given plan, else what was measured decides. graphs_for_bytes: the device budget for which graphs
    are compiled; None: that of the machine.
    """

    open_machine: OpenMachine = open_machine
    start_job: StartJob = PlanningJob
    first_phase: Callable[[RunContext], Phase] = ProfilePhase
    cut_policy: CutPolicy | None = None
    speed_of: SpeedOf = speed_of
    codegen: Codegen | None = None
    host_rates: HostRates | None = None
    subgroup_bytes: int | None = None
    graphs_for_bytes: int | None = None


class TrainingRun:
    """Everything that models compiled with the same options share: one machine, one pager with its budget, one observer.

    shared: by all runs of the process. ranks: those of this machine that train together, None if there is one.
    operators: runs those that user code calls outside of graphs, under the budget. steps: of optimizers. needs: what its graphs
    need. background: makes its plans.
    number: of this run in the process. on_iteration: is called with each iteration that has ended, in the training thread.
    Raises PlanError if the plan file is damaged, OptionsError, UnsupportedError, StorageError, StorageFullError, RankError.
    """

    def __init__(
        self, options: Options, device: torch.device, parts: RunParts, shared: Shared, ranks: RankGroup | None = None
    ) -> None:
        self.device = device
        self._ranks, self._agreed = ranks, ranks is None
        given = planner.Plan.load(options.plan) if options.plan is not None else None
        self._machine = machine = parts.open_machine(options, device, shared, ranks)
        self._pager = Pager(
            mover=machine.mover,
            budget_bytes=machine.budgets.device,
            device=machine.device,
            busy_seconds=machine.busy_seconds,
        )
        self.operators = OperatorRunner(self._pager, device)
        self._observer = IterationObserver(self._pager)
        self._meter = WorkspaceMeter(
            machine.memory,
            runs=machine.measured_runs,
            first_is_special=machine.device.asynchronous,
            iteration=lambda: self._pager.iteration,
            moves=lambda: self._pager.account.moves,
        )
        tiles_above_bytes, most_bytes = _limits(options, parts.graphs_for_bytes or machine.budgets.device)
        self.stage_compiler = StageCompiler(
            codegen=parts.codegen or options.codegen,
            mode=options.mode,
            policy=parts.cut_policy,
            fuses=options.codegen != "eager",
            speed_of=parts.speed_of,
            tiles_above_bytes=tiles_above_bytes,
            most_bytes=most_bytes,
        )
        # A plan that is given is for subgroups of its size.
        given_bytes = given.subgroup_bytes if parts.subgroup_bytes is None and given is not None else parts.subgroup_bytes
        subgroups = SubgroupSizes(machine.hardware, used_bytes=given_bytes)
        self._findings = Findings()
        self.needs = GraphNeeds(self._pager, machine, self._findings, has_in_graph=self.has_in_graph)
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._calls = LibraryCalls(
            self._pager,
            self._observer,
            active=self._is_managed,
            explained=self.needs.with_all_that_is_known,
        )
        self.steps = OptimizerSteps(
            self._calls,
            step_done=self._step_done,
            automatic=options.optimizer == "auto",
            ensure_room=self.needs.ensure_room,
            overlap=options.overlap_step,
            rates=parts.host_rates or self._host_rates(options),
            sizes=subgroups,
        )
        self._gradients: list[AddedGradients | AutogradReads] = [AddedGradients(self._pager, self._observer)]
        if self._pager.drives_are_out_of_reach:
            self._gradients.append(AutogradReads(self._pager, self._observer))
            clip_under_budget(self.operators)
        self.background = BackgroundPlanner(options, machine, self._pager, start_job=parts.start_job, ranks=ranks)
        self._border = IterationBorder()
        # Peaks can be watched where there is a budget, and where memory is measured in every run.
        watched = machine.memory if machine.measured_runs is None else None
        budget = machine.budgets.device
        peaks = PeakWatch(watched, budget) if watched is not None and budget is not None else None
        is_kept = given is None and options.plan_cache != "off" and self.is_limited
        self._context = RunContext(
            options=options,
            machine=machine,
            pager=self._pager,
            observer=self._observer,
            border=self._border,
            background=self.background,
            subgroups=subgroups,
            given=given,
            peaks=peaks,
            findings=self._findings,
            tiled=self.stage_compiler.tiled,
            warm=WarmStart(PlanCache(options, device), self.background) if is_kept else None,
        )
        self._phase: Phase = parts.first_phase(self._context)
        self._parked = False
        self.number = 0
        self.on_iteration: Callable[[IterationStats], None] = lambda stats: None
        self._history = History(machine, self._pager)
        self._sizes = LargestSizes()
        self._stages = 0
        self._compiled_now = True
        self._ended: tuple[Iteration, bool] | None = None  # see `_iteration_ended`
        self._replaced = False

    def _host_rates(self, options: Options) -> HostRates | None:
        if self._machine.host_bytes is None or not options.host_updates:
            return None

        def scratch(size_bytes: int) -> AbstractContextManager[int | None]:
            self._pager.drop_void_copies("host")  # blocks that move on demand fill the host tier first
            return self._machine.host_scratch(size_bytes)

        threads = host_threads(options.local_ranks)
        return HostRates(scratch, shared=not self._machine.device.asynchronous, threads=threads)

    # -- compiled graphs

    def callable(self, program: Program) -> Callable[[list[Any]], list[Any]]:
        """Return the function that AOTAutograd calls for `program` (boxed)."""

        def call(arguments: list[Any]) -> list[Any]:
            if self._replaced and program.phase == "forward":
                raise UnsupportedError(
                    "this model was compiled again with other options, which ended the run that this call belongs to; call "
                    "what was compiled last, or call torch._dynamo.reset() and compile the model again"
                )
            if self._phase.managed or self._parked or program.resize is not None:
                with one_thread(), uninterrupted():
                    sized = self._note_call(program, arguments)
                    if self._is_managed():
                        return self._run_managed(sized, arguments)
            else:
                self._note_pass(program)
            return run_plain(program, arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        self._stages += len(program.stages)
        self._compiled_now = self.steps.buckets_due = True
        self._phase = self._phase.graphs_changed()
        return call

    def _note_call(self, program: Program, arguments: list[Any]) -> Program:
        """A graph is about to run. Returns its program for the sizes of these arguments."""
        self._note_pass(program)
        sized = program
        if program.resize is not None:
            sized = program.resize(program, arguments)
            if self._sizes.grow(program.identity, sized):
                self._phase = self._phase.graphs_changed()
        self._phase.graph_begins(sized)
        return sized

    def _run_managed(self, program: Program, arguments: list[Any]) -> list[Any]:
        self.steps.between_regions()
        if program.phase == "forward":
            inputs = zip(arguments, program.slot_kinds, strict=False)
            self.steps.sharded.note(value for value, kind in inputs if kind == "parameter")
        found = (each.interleaved(program, arguments) for each in (self.steps.overlap, *self._gradients) if each is not None)
        interleaved = [each for each in found if each is not None]
        try:
            return run_managed(program, arguments, self._pager, self._observer, self._meter, interleaved)
        except BudgetError as error:
            raise self.needs.with_all_that_is_known(error, program) from None

    def check(self, programs: Sequence[Program], *, for_larger: bool) -> None:
        """See `GraphNeeds.check`."""
        self.steps.count_buckets()
        self.needs.check(programs, for_larger=for_larger, may_be_cut_again=self._ranks is None)

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Compile within the block. The first time, all ranks of the machine wait here until each has done so, or all fail.

        Raises RankError if another rank fails, or does not come in time.
        """
        if self._ranks is None or self._agreed:
            yield
            return
        from torch._dynamo.exc import RestartAnalysis  # takes seconds to import, and has been by Dynamo

        with self._ranks.failing_together(RestartAnalysis):
            yield
        self._ranks.gather("compiling the first graph")
        self._agreed = True

    # -- steps of optimizers

    @property
    def is_limited(self) -> bool:
        """Whether it has a budget."""
        return self._machine.budgets.device is not None

    def has_in_graph(self, parameter: torch.Tensor) -> bool:
        """Whether a compiled graph has this parameter: its memory is a block, or was one (`parameter.data = other`)."""
        block = self._pager.known_block(parameter)
        named = block is not None and block.name is not UNNAMED and not block.name.startswith("optimizer/")
        return named or parameter in self._parameters

    def note_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are parameters of a graph that is compiled."""
        for parameter in parameters:
            self._parameters[parameter] = None

    # -- iterations

    def step_done(self) -> None:
        """An iteration has ended, says the user. From now on no other one does."""
        with uninterrupted():
            if self._border.tell():
                self._iteration_ended(self._observer.iteration_ends())

    def _step_done(self, optimizer: Optimizer) -> None:
        """Take in a step of an optimizer, which may end an iteration."""
        if self._border.ends_with(optimizer):
            self._iteration_ended(self._observer.iteration_ends())

    def _note_pass(self, program: Program) -> None:
        """A graph is about to run. Where no optimizer steps, that may end an iteration."""
        if program.phase == "backward":
            self._border.backward_begins()
        elif torch._C._current_graph_task_id() < 0:  # else: computed again inside backward
            if self._border.ends_before(
                program.identity, inference=program.is_inference, gradients_left=lambda: self._observer.recorder.gradients_left
            ):
                self._iteration_ended(self._observer.iteration_ends(with_last_region=True))

    def _iteration_ended(self, iteration: Iteration) -> None:
        watching = self.steps.overlap is not None and not self.steps.overlap.watch.settled
        # The latter: a graph was compiled in it, or later iterations will run other stages.
        ended: tuple[Iteration, bool] | None = iteration, self._compiled_now or watching
        self._compiled_now = False
        if self._machine.device.asynchronous:  # its times are not known yet; those of the iteration before are, mostly
            ended, self._ended = self._ended, ended
        if ended is not None:
            iteration, compiled = ended
            iteration.read_times()
            in_force = self._phase.in_force
            predicted = in_force.predicted_seconds if in_force is not None else None
            stats = self._history.note(iteration, self._phase.name, predicted, run=self.number)
            self._phase = self._phase.iteration_ended(iteration, compiled=compiled)
            with interruptible():
                self.on_iteration(stats)

    # -- from outside

    @property
    def unused(self) -> bool:
        """True as long as nothing has run."""
        return self._history.finished == 0 and not self._pager.blocks

    def count_managed(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return how many of these tensors it manages."""
        return sum(self._pager.known_block(tensor) is not None for tensor in tensors)

    def status(self) -> Status:
        """Return a snapshot. Never waits. For any thread."""
        phase, found, history, reserved_bytes = self._phase, self._findings, self._history, self._machine.reserved_bytes()
        in_force = phase.in_force
        drift = in_force.drift if in_force is not None else None
        traced = in_force or found.profile
        trace = traced.trace if traced is not None else None
        return Status(
            phase=phase.name,
            waiting_for=(None if history.finished else self._border.waiting_for) or phase.waiting_for,
            iterations=history.finished,
            device_budget_bytes=self._pager.account.budget_bytes,
            device_peak_bytes=self._pager.account.peak_bytes,
            movable_bytes=self._pager.size_bytes(movable=True),
            immovable_bytes=self._pager.size_bytes(movable=False),
            moved_bytes=self._machine.moved_bytes(),
            busy_seconds=self._machine.busy_seconds(),
            exposed_seconds={} if self._machine.device.asynchronous else dict(self._pager.account.exposed_seconds),
            predicted_iteration_seconds=in_force.predicted_seconds if in_force is not None else None,
            measured_iteration_seconds=phase.measured_seconds,
            ideal_iteration_seconds=trace.ideal_seconds if trace is not None else None,
            floor_bytes=found.floor[0] if found.floor is not None else None,
            deviations=self._observer.plan.deviations,
            drift=drift.iteration if drift is not None else None,
            late_seconds=history.waited_seconds,
            recomputed_stages=len(history.reruns),
            recomputed_bytes=sum(rerun.made_bytes for rerun in history.reruns),
            recompute_seconds=history.recompute_seconds,
            reserved_bytes=reserved_bytes,
            allocator_retries=self._machine.device.retries if reserved_bytes is not None else None,
            replans=found.replans,
            trace_path=str(found.trace_path) if found.trace_path is not None else None,
            plan_path=str(found.plan_path) if found.plan_path is not None else None,
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

    # -- parked

    def park(self) -> int:
        """Let everything leave the device that can, until the next region. Return the bytes that have left. See `teraio.park`."""
        with one_thread(), uninterrupted():
            self._observer.recorder.parked()
            with self._machine.device.region():
                self._find_gradients()
                self._pager.enter_region()
                self._parked = True
                try:
                    return self._pager.parking.park()
                finally:
                    self._pager.leave_region()

    def _find_gradients(self) -> None:
        """Make blocks of gradients that no managed stage has made: where everything fits, none has."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and self._pager.known_block(gradient) is None:
                known = self._pager.known_block(parameter)
                self._pager.make_movable(gradient)
                name = f"{'a parameter' if known is None else known.name}.grad"
                self._pager.block_of(gradient, name=name, kind="gradient", user_visible=True)

    def _is_managed(self) -> bool:
        """Return whether regions run managed. Those that do not find everything on the device, also after it was parked."""
        if self._parked:
            self._parked = False
            if not self._phase.managed:
                self._observer.recorder.woken()
                with uninterrupted(), self._machine.device.region():
                    self._pager.closing.bring_back()  # what runs unmanaged asks for nothing
                    self._pager.leave_region()  # nobody tells the pager what unmanaged passes write
        return self._phase.managed

    def staying_bytes(self) -> dict[str, int]:
        """Return how much of its blocks is on the device, by the reason why. For any thread."""
        return self._pager.parking.staying_bytes()

    @property
    def pytorch_bytes(self) -> int:
        """Bytes that PyTorch holds of the device, for all runs; on the CPU also those of blocks that have left."""
        if (reserved_bytes := self._machine.reserved_bytes()) is not None:
            return reserved_bytes
        return 0 if self._machine.memory is None else self._machine.memory.allocated_bytes

    @property
    def counted_bytes(self) -> int:
        """Bytes of `pytorch_bytes` that are those of its blocks."""
        if self._machine.reserved_bytes() is not None:
            return sum(self.staying_bytes().values())
        return self._pager.size_bytes(movable=True) + self._pager.size_bytes(movable=False)

    def close(self, *, replaced: bool = False) -> None:
        """Bring blocks back to the device, remove hooks and files. Waits until that is done; a signal waits as well.

        On a GPU all come back if the device has room for all; otherwise, and on the CPU, as many as the budget holds. The others
        stay in their tiers, see `Closing.leave_behind`.

        replaced: another run takes over; this one refuses forward passes from now on.
        """
        with uninterrupted():
            self._replaced = replaced
            self.steps.close()
            self._calls.close()
            ending, self._phase = self._phase, ClosedPhase(self._context)
            ending.end()
            try:
                with self._machine.device.region():
                    self._recompute_dropped()
                has_room = self._pager.closing.away_bytes() <= self._machine.free_bytes()
                if has_room:
                    self._machine.lift_limit()
                with self._machine.device.region():
                    self._pager.closing.bring_back(within_budget=not has_room)
            finally:
                try:
                    left_bytes = self._pager.closing.leave_behind()
                finally:
                    self._machine.close()
            if left_bytes:
                logger.info(
                    "%s bytes did not fit the device and stay where they are, as long as their tensors live", f"{left_bytes:,}"
                )

    def _recompute_dropped(self) -> None:
        """Recompute what a backward pass that is still due will read: it runs unmanaged."""
        reruns = Reruns(self._pager, self._observer, self._meter)
        for block in self._pager.blocks:
            try:
                reruns.make_anew([block])
            except UnsupportedError as error:
                logger.warning("a backward pass that is due will fail: %s", error)


_OF_THE_BUDGET = 7 / 8  # that a stage may take: the rest is for what is too small to move


def _limits(options: Options, budget_bytes: int | None) -> tuple[int | None, int | None]:
    """Return above which bytes what has many rows runs in tiles, and other stages are cut; None where that is not wanted."""
    if isinstance(options.tiles, int):
        return options.tiles, options.tiles
    if options.tiles == "off" or budget_bytes is None:
        return None, None
    return budget_bytes // 2, int(_OF_THE_BUDGET * budget_bytes)
