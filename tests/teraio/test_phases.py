"""The phases of a run in virtual time: what ends each of them, and which one comes next."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner import Plan, PlanError, SolverError, Trace
from runtime.execution import StageRun
from teraio import phases
from teraio.machine import ResolvedBudgets
from teraio.options import parse_options
from teraio.phases import DemandPhase, Findings, FitsPhase, Phase, PlannedPhase, PlanningPhase, ProfilePhase, RunContext
from teraio.planning import BackgroundPlanner
from teraio.profiling import Iteration, IterationBorder
from teraio.watching import PeakWatch

from .in_process import InstantJobs
from .virtual import BLOCK_BYTES, STAGES, VirtualTraining, hardware, plan_for


@pytest.fixture(autouse=True)
def more_iterations_where_times_disagree(monkeypatch: pytest.MonkeyPatch, no_more_iterations_on_a_busy_machine: None) -> None:
    """As outside of tests."""
    monkeypatch.setattr(phases, "_LONGEST", 2)


class Memory:
    """What the device has allocated, and the most of it."""

    allocated_bytes = STAGES * BLOCK_BYTES
    peak_bytes = 0

    def reset_peak(self) -> None:
        pass


class Rig:
    """A run without a compiler: its context, its phase, and iterations one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, given: Plan | None = None, moved: bool = True, **options: Any) -> None:
        self.training = VirtualTraining(monkeypatch)
        self.jobs = InstantJobs()
        self.memory = Memory()
        self.trims = 0
        mover = self.training.mover
        machine: Any = SimpleNamespace(
            host_bytes=None,
            budgets=ResolvedBudgets(),
            hardware=lambda: hardware(dict.fromkeys(mover.seconds, float(BLOCK_BYTES))),
            moved_bytes=mover.moved_bytes,
            busy_seconds=mover.busy_seconds,
            trim=self._trim,
            allocator=None,
        )
        checked, subgroups = parse_options({"profile_iterations": 2, **options}), SimpleNamespace(used_bytes=5)
        self.context = RunContext(
            options=checked,
            machine=machine,
            pager=self.training.pager,
            observer=self.training.observer,
            border=IterationBorder(),
            background=BackgroundPlanner(checked, machine, self.training.pager, start_job=self.jobs),
            subgroups=subgroups,  # type: ignore[arg-type]
            given=given,
            peaks=PeakWatch(self.memory, STAGES * BLOCK_BYTES),
            findings=Findings(),
        )
        if moved:
            self.training.pager.offload(self.training.weights[0])
        self.phase: Phase = ProfilePhase(self.context)

    def _trim(self) -> None:
        self.trims += 1

    def run_at(self, *seconds: float) -> None:
        """Run an iteration for each: so long is each of its stages."""
        for each in seconds:
            self.training.stage_seconds = [each] * STAGES
            self.run()

    def run(
        self, count: int = 1, *, compiled: bool = False, evaluated: bool = False, updated: bool = False, **fields: Any
    ) -> Phase:
        """Iterations; `evaluated`: with a region that the plan has not got; `updated`: an update alone; `fields`: changed."""
        for _ in range(count):
            if evaluated:
                self.evaluate()
            iteration = self._update() if updated else self.training.iteration()
            self.phase = self.phase.iteration_ended(replace(iteration, **fields), compiled=compiled)
        return self.phase

    def evaluate(self) -> None:
        self.training.observer.region_begins("evaluation", 0)
        self.training.observer.region_ended()

    def _update(self) -> Iteration:
        """What the last step has updated is sent, and an optimizer steps again."""
        recorder = self.training.observer
        for goes_on in (True, False):
            recorder.region_begins("broadcast" if goes_on else "optimizer", 1, step_goes_on=goes_on)
            mark, phase = recorder.mark(), "forward" if goes_on else "optimizer"
            recorder.stage_ended(StageRun(name=phase, phase=phase), mark, mark)  # type: ignore[arg-type]
            recorder.region_ended()
        return recorder.iteration_ends()

    def a_plan(self) -> Plan:
        return plan_for(self.training.profile().trace, (6, 6))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.INFO]


# -- profile


def test_equal_iterations_in_a_row_make_a_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One more than asked for; those in which something was compiled, or that ran other graphs, do not count."""
    rig = Rig(monkeypatch, moved=False, trace_out=tmp_path / "trace.json")
    assert isinstance(rig.run(2), ProfilePhase) and rig.phase.name == "profile" and rig.phase.managed
    assert isinstance(rig.run(compiled=True), ProfilePhase)
    assert isinstance(rig.run(2), ProfilePhase)
    assert isinstance(rig.run(evaluated=True), ProfilePhase)
    assert isinstance(rig.run(2), ProfilePhase)
    assert isinstance(rig.run(4, updated=True), ProfilePhase)
    assert "only an optimizer stepped" in str(rig.phase.waiting_for)
    for fields, why in (
        ({"regions": []}, "no compiled graph"),
        ({"truncated": True}, "too long"),
        ({"timed": False}, "not timed"),
    ):
        assert isinstance(rig.run(**fields), ProfilePhase) and why in str(rig.phase.waiting_for)
    assert isinstance(rig.run(2), ProfilePhase) and rig.context.findings.profile is None
    assert isinstance(rig.run(), FitsPhase)
    found = rig.context.findings
    assert found.profile is not None and found.profile.trace.subgroup_bytes == 5
    assert found.trace_path == tmp_path / "trace.json" and found.trace_path.exists()


def profiled(monkeypatch: pytest.MonkeyPatch, *factors: float) -> list[float]:
    """Stage times of the trace that comes of iterations whose stages take so many times as long, by position.

    Raises AssertionError unless it comes after the last of them.
    """
    rig = Rig(monkeypatch, profile_iterations=3)
    rig.jobs.answers.append(SolverError("no solver"))
    rig.run()  # its times do not count
    for factor in factors:
        assert rig.phase.name == "profile" and rig.context.findings.profile is None
        rig.run_at(factor)
    assert rig.context.findings.profile is not None
    return [stage.duration_seconds for stage in rig.context.findings.profile.trace.stages]


def test_one_disturbed_iteration_changes_no_stage_time(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = profiled(monkeypatch, 1.0, 1.0, 1.0)
    assert undisturbed[1:] == [1.0] * STAGES
    for factors in ((4.0, 1.0, 1.0), (1.0, 4.0, 1.0), (1.0, 1.0, 4.0)):
        assert profiled(monkeypatch, *factors) == undisturbed


def test_iterations_that_disagree_are_followed_by_more(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Until two agree, and no more than twice as many as asked for. Before the last one, `waiting_for` says why."""
    undisturbed = profiled(monkeypatch, 1.0, 1.0, 1.0)
    with caplog.at_level(logging.INFO, logger="teraio"):
        assert profiled(monkeypatch, 4.0, 1.0, 8.0, 1.0) == undisturbed
        assert profiled(monkeypatch, 9.0, 16.0, 30.0, 4.0, 1.0, 1.1)[1:] == pytest.approx([1.05] * STAGES)
        assert not any("poor" in message for message in messages(caplog))
        assert profiled(monkeypatch, 4.0, 16.0, 8.0, 30.0, 2.0, 1.0) == undisturbed
    assert "stages took very different times in 6 profiled iterations: the first plan may be poor" in messages(caplog)
    rig = Rig(monkeypatch, profile_iterations=3)
    rig.run_at(1.0, 1.0, 4.0, 16.0)
    assert rig.phase.waiting_for == (
        "4 iterations in a row that run the same graphs (4 so far), since stages took very different times in them"
    )


class Turns:
    """Iterations whose kinds take turns: a kind has so many evaluations before its pass."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def run(self, kinds: Iterable[int]) -> list[tuple[str, int]]:
        """Return the phase and the period after each step."""
        rig, found = self.rig, []
        for evaluations in kinds:
            for _ in range(evaluations):
                rig.evaluate()
            rig.training.regions()
            if rig.context.border.tell():
                rig.phase = rig.phase.iteration_ended(rig.training.observer.iteration_ends(), compiled=False)
            found.append((rig.phase.name, rig.context.border.period))
        return found


@pytest.mark.parametrize("kinds", [(1, 0), (5, 0, 0), (1, 0, 0, 1, 1, 0, 1, 0, 2, 0, 0, 1, 2, 0, 1, 2)])
def test_iterations_that_repeat_after_several_are_planned_together(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[int, ...]
) -> None:
    """As in PPO: a rollout, and several updates by it."""
    rig, period = Rig(monkeypatch, profile_iterations=3), len(kinds)
    rig.jobs.answers = [None]
    found = Turns(rig).run(kinds * 12)
    assert found.index(("profile", period)) == 2 * period + 4 - 1
    assert found.index(("planning", period)) == 2 * period + 4 + 4 * period - 1
    trace = rig.jobs.asked[0]
    assert [stage.phase for stage in trace.stages].count("forward") == period * STAGES
    assert trace.ideal_seconds == pytest.approx(period * STAGES)


def test_what_repeats_no_more_counts_one_by_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(Rig(monkeypatch, profile_iterations=3))
    turns.rig.jobs.answers = [None]
    assert turns.run([1, 0] * 4)[-1] == ("profile", 2)
    found = turns.run([1, 0, 2, 0, 3, 0, 4, 0, 4])
    assert found[3] == ("profile", 1)
    waiting = turns.rig.phase.waiting_for
    assert waiting is not None and "did not repeat after up to 16 iterations" in waiting
    assert turns.run([0] * 4)[-1] == ("planning", 1)


def test_time_outside_of_compiled_graphs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Told if graph breaks may be the cause."""
    for reason in ("", "Failed to trace builtin operator\n  Explanation: ..."):
        monkeypatch.setitem(torch._dynamo.utils.counters, "graph_break", Counter([reason] if reason else []))
        monkeypatch.setitem(torch._dynamo.utils.counters, "unimplemented", Counter())
        rig = Rig(monkeypatch)
        rig.jobs.answers.append(SolverError("no solver"))
        for _ in range(3):
            rig.training.mover.pass_seconds(24.0)
            rig.run()
        assert rig.phase.name == "planning"
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith(
        "75 % of an iteration's time is outside of compiled graphs, where nothing moves (graph breaks: Failed to"
    )


# -- fits


def test_when_everything_fits_stages_run_unmanaged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(monkeypatch, moved=False)
    with caplog.at_level(logging.DEBUG, logger="teraio"):
        fits = rig.run(3)
        assert fits.name == "fits" and not fits.managed and fits.measured_seconds is None
        assert rig.run(2) is fits and rig.trims == 2 and fits.measured_seconds == pytest.approx(8.0)
        rig.phase = fits.graphs_changed()
        assert isinstance(rig.phase, ProfilePhase) and isinstance(rig.run(3), FitsPhase)
    (told,) = messages(caplog)
    assert told.startswith("everything fits (peak ") and told.endswith(
        f", budget {STAGES * BLOCK_BYTES} bytes): nothing has to move"
    )
    assert len(caplog.records) == 2, "not again at level info"


def test_what_outgrows_the_budget_is_profiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, moved=False)
    fits = rig.run(3)
    rig.memory.peak_bytes = STAGES * BLOCK_BYTES
    assert rig.run() is fits
    rig.memory.peak_bytes = 2 * STAGES * BLOCK_BYTES
    assert isinstance(rig.run(), ProfilePhase)


# -- planning


def test_a_plan_is_followed_from_the_end_of_the_iteration_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rig = Rig(monkeypatch, plan_out=tmp_path / "plan.json")
    rig.jobs.answers = [rig.a_plan()]
    planning = rig.run(3)
    assert planning.name == "planning" and planning.managed and planning.in_force is None
    assert rig.context.findings.floor == (BLOCK_BYTES, "forward/0")
    rig.jobs.started[0].done = False
    assert rig.run(2) is planning and planning.graphs_changed() is planning
    rig.jobs.started[0].done = True
    with caplog.at_level(logging.INFO, logger="teraio"):
        planned = rig.run()
    assert isinstance(planned, PlannedPhase) and planned.name == "planned" and planned.managed
    assert planned.in_force.predicted_seconds == pytest.approx(8.0) and planned.measured_seconds is None
    assert rig.training.observer.plan.schedule is not None
    assert rig.context.findings.plan_path == tmp_path / "plan.json" and rig.context.findings.plan_path.exists()
    assert messages(caplog) == [
        f"following a plan with 1 moves an iteration (storage: {BLOCK_BYTES} bytes): predicted 8.000 s an iteration, "
        "8.000 s with unlimited memory"
    ]


def test_without_a_plan_blocks_go_on_moving_on_demand(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(monkeypatch)
    rig.jobs.answers = [SolverError("out of luck")]
    assert isinstance(rig.run(3), PlanningPhase)
    demand = rig.run()
    assert isinstance(demand, DemandPhase) and demand.name == "demand" and demand.managed
    assert rig.run(5, compiled=True) is demand and demand.graphs_changed() is demand and len(rig.jobs.asked) == 1
    assert messages(caplog) == ["no plan could be made, blocks go on moving on demand: out of luck"]


def test_a_record_that_contradicts_itself_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(monkeypatch)
    monkeypatch.setattr(phases.profiling, "build_profile", lambda *args, **kwargs: Trace.model_validate({}))
    demand = rig.run(3)
    assert isinstance(demand, DemandPhase) and "contradicts itself" in demand.waiting_for
    (message,) = messages(caplog)
    assert message.startswith("no plan could be made, blocks go on moving on demand: what was recorded contradicts itself")


# -- a plan that the user gave


def test_a_given_plan_needs_no_solver_and_one_for_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rig(monkeypatch).a_plan()
    rig = Rig(monkeypatch, given=made.model_copy(update={"trace_fingerprint": "of another run"}), plan=__file__)
    planned = rig.run(3)
    assert isinstance(planned, PlannedPhase) and rig.jobs.asked == []
    assert planned.in_force.trace is rig.context.findings.profile.trace  # type: ignore[union-attr]

    rig = Rig(monkeypatch, given=made.model_copy(update={"moves": made.moves[:1] * 2}), plan=__file__)
    with pytest.raises(PlanError, match=f"{__file__}: this plan was made for another program, shape or budget: "):
        rig.run(3)


# -- planned


def test_iterations_that_run_other_graphs_end_the_plan(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(monkeypatch)
    rig.jobs.answers = [rig.a_plan()]
    planned = rig.run(4)
    assert rig.run(2, evaluated=True) is planned and rig.run() is planned and rig.run(2, evaluated=True) is planned
    assert planned.graphs_changed() is planned
    assert rig.run(4, updated=True) is planned, "more passes are to come"
    with caplog.at_level(logging.INFO, logger="teraio"):
        assert isinstance(rig.run(evaluated=True), ProfilePhase)
    assert rig.training.observer.plan.schedule is None and rig.phase.in_force is None
    assert messages(caplog) == ["the last 3 iterations were not those that were planned: profiling again"]
