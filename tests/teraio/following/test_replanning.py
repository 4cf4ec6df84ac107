"""A plan in force, in virtual time: late prefetches become punctual, drift leads to a better plan, noise to nothing."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import Plan, SolverError, Trace
from planner.schema import Lengths, Polynomial
from runtime.device import CpuDevice, WallMark
from runtime.execution import SizedGraph
from teraio.following import PlanInForce
from teraio.options import Options, parse_options
from teraio.planning import BackgroundPlanner

from ..in_process import InstantJobs
from ..virtual import BLOCK_BYTES, COUNT, IN, STAGES, VirtualTraining, plan_for


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> VirtualTraining:
    return VirtualTraining(monkeypatch)


class Following:
    """A virtual training under a plan made by hand, in force. replans: how often another plan has taken over."""

    def __init__(
        self, training: VirtualTraining, *fetched: tuple[int, int], lengths: Lengths | None = None, **options: Any
    ) -> None:
        self.training = training
        profile = training.profile()
        self.profile = profile if lengths is None else replace(profile, trace=profile.trace.rebuilt(lengths=lengths))
        self.plan = plan_for(self.profile.trace, *fetched)
        self.jobs = InstantJobs()
        given: Options = parse_options(options)
        machine: Any = training.mover
        self.background = BackgroundPlanner(given, machine, training.pager, start_job=self.jobs)
        self.in_force = PlanInForce(training.observer, self.background, self.profile, self.plan)
        self.replans = 0
        self.waited: list[float] = []

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            iteration = self.training.iteration()
            iteration.read_times()
            self.waited.append(round(iteration.waited_seconds, 6))
            self.replans += self.in_force.iteration_ended(iteration, as_planned=True)

    def run_at(self, *seconds: float) -> None:
        """Run an iteration for each: so long is each of its stages."""
        for each in seconds:
            self.training.stage_seconds = [each] * STAGES
            self.run()

    def asked_for(self, block: int) -> list[int]:
        schedule = self.training.observer.plan.schedule
        assert schedule is not None
        return [position for position, ids in enumerate(schedule.fetch_at) if block in ids]

    @property
    def predicted(self) -> float:
        return self.in_force.predicted_seconds

    @property
    def drift(self) -> Any:
        return self.in_force.drift


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What teraio has logged. pytest captures PyTorch's structured trace as well."""
    return [record.message for record in caplog.records if record.name == "teraio"]


def test_a_weight_that_gets_other_memory_moves_by_the_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Following(VirtualTraining(monkeypatch, budget_blocks=STAGES + 1), (6, 6))
    running.run(3)
    running.training.replace(6)
    running.run(2)  # in the first one it is new
    before = running.training.mover.moved[IN]
    running.run(3)
    assert running.training.mover.moved[IN] == before + 3 * BLOCK_BYTES
    assert running.training.weights[6].trace_id == 6


# -- corrections


@pytest.mark.parametrize(
    ("weight", "planned", "seconds", "waits_first", "waits_last", "corrected"),
    [
        (6, 6, 2.5, 1.5, 0.0, 4),  # 0.75 s take it one stage ahead, then it is 0.5 s late: another stage
        (1, 1, 2.5, 1.5, 0.0, 7),  # early in the iteration: to be in time, it has to be asked for in the one before
        (2, 2, 2.5, 1.5, 0.0, 8),
        (0, 0, 2.0, 2.0, 1.0, 8),  # asked for when it is needed: 1 s of waiting is planned and stays
    ],
)
def test_a_late_prefetch_becomes_punctual(
    training: VirtualTraining, weight: int, planned: int, seconds: float, waits_first: float, waits_last: float, corrected: int
) -> None:
    running = Following(training, (weight, planned))
    training.mover.seconds[IN] = seconds
    running.run(9)
    assert running.waited[1:3] == [waits_first] * 2 and running.waited[-3:] == [waits_last] * 3
    assert sorted(running.waited[1:], reverse=True) == running.waited[1:], "no longer, either, when the start moves back"
    assert running.asked_for(weight) == [corrected]


@pytest.mark.parametrize("options", [{"replan": False}, {"plan": __file__}])
def test_a_plan_that_is_to_stay_stays(
    training: VirtualTraining, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    running = Following(training, (6, 6), **options)
    training.mover.seconds[IN] = 2.5
    with caplog.at_level(logging.INFO, logger="teraio"):
        running.run(80)
    assert set(running.waited[1:]) == {1.5} and running.asked_for(6) == [6] and running.jobs.asked == []
    assert running.drift.iteration == pytest.approx(1.5 / 8)
    message = (
        "the last 9 iterations differ from what the plan predicts: iteration +19%, stages +0%, "
        "storage->device +150%; the plan stays as it is"
    )
    assert said(caplog) == [message] * 3, "after 10, 20 and 40 iterations"


# -- planning again


def test_drift_leads_to_a_better_plan(training: VirtualTraining, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Two weights that are not needed away come back late; the solver leaves them where they are."""
    out = {"trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"}
    running = Following(training, (2, 2), (3, 3), **out)
    running.jobs.answers = [None]
    training.mover.seconds[IN] = 9.0  # no correction makes up for that
    with caplog.at_level(logging.INFO, logger="teraio"):
        running.run(12)
    (asked,) = running.jobs.asked
    assert running.replans == 1 and asked.ideal_seconds == pytest.approx(8.0)
    assert {link.name: link.bytes_per_second for link in asked.hardware.links}[IN] == pytest.approx(32 / 9.0)
    running.run(40)
    assert running.waited[-30:] == [0.0] * 30 and running.predicted == pytest.approx(8.0) and not running.drift.found
    (told,) = said(caplog)
    assert told.startswith("planned again, as the last 9 iterations differ") and "storage->device +800%)" in told
    assert "): with the measured times the new plan takes 8.000 s an iteration, the old one " in told
    assert told.endswith(" s: the new one is followed")
    trace, plan = Trace.load(out["trace_out"]), Plan.load(out["plan_out"])
    assert trace == asked and plan.trace_fingerprint == trace.fingerprint and plan.moves == ()


def test_what_shorter_inputs_follow_is_found_out_without_another_plan(
    training: VirtualTraining, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Although another plan would be faster than this one, which was made by hand."""
    running = Following(training, (2, 2), (3, 3), plan_out=tmp_path / "plan.json")
    running.run(2)
    running.jobs.answers = [None]
    with caplog.at_level(logging.INFO, logger="teraio"):
        running.in_force.cover(Lengths(lowest=(1,), highest=(10,)))
        running.run(9)
    assert running.replans == 0 and running.in_force.plan.moves == running.plan.moves
    assert running.in_force.trace.lengths is not None and Plan.load(tmp_path / "plan.json").shorter
    assert said(caplog) == ["inputs were shorter than those that were profiled: what need not move for them is found out"]


def test_a_plan_that_is_no_better_is_not_taken(training: VirtualTraining, tmp_path: Path) -> None:
    """The old plan stays, but promises what it can keep, so that nothing drifts any more."""
    running = Following(training, (6, 6), plan_out=tmp_path / "plan.json")
    running.jobs.answers = [running.plan]
    running.run_at(*[2.0] * 12)
    assert len(running.jobs.asked) == 1 and running.replans == 0 and running.predicted == pytest.approx(16.0)
    running.run(60)
    assert not running.drift.found and len(running.jobs.asked) == 1 and running.asked_for(6) == [6]
    kept = Plan.load(tmp_path / "plan.json")
    assert kept.trace_fingerprint == running.jobs.asked[0].fingerprint
    assert kept.replayed.iteration_seconds == kept.replayed.ideal_seconds == pytest.approx(16.0)


def test_a_solver_that_fails_changes_nothing(training: VirtualTraining, caplog: pytest.LogCaptureFixture) -> None:
    running = Following(training, (6, 6))
    running.jobs.answers = [SolverError("out of luck")] * 4
    before = running.in_force.trace
    running.run_at(*[2.0] * 80)
    assert running.replans == 0 and running.in_force.trace is before and running.asked_for(6) == [6]
    assert said(caplog)[0] == "no new plan could be made, the old one stays in force: out of luck"
    assert len(running.jobs.asked) == 4, "at once, and after 10, 20 and 40 iterations more"


def test_stopping_ends_the_solver(training: VirtualTraining) -> None:
    running = Following(training, (6, 6))
    running.jobs.answers = [None]
    while not running.background.busy:
        running.run_at(2.0)
    (job,) = running.jobs.started
    job.done = False
    running.run(3)
    assert not running.background.wait(0.0) and running.replans == 0
    running.in_force.stop()
    assert job.cancelled and running.background.wait(0.0) and not running.background.busy
    assert training.observer.plan.schedule is None
    training.iteration()


# -- how soon


@pytest.mark.parametrize("factor", [2.5, 0.4])
def test_a_first_plan_from_plainly_wrong_times_is_replaced_at_once(training: VirtualTraining, factor: float) -> None:
    """All that was profiled was disturbed, or nothing is as it was. Later plans are given more time."""
    running = Following(training, (6, 6))
    running.jobs.answers = [None, None]
    running.run_at(*[factor] * 4)
    assert [trace.ideal_seconds for trace in running.jobs.asked] == pytest.approx([8 * factor])
    running.run()
    assert running.replans == (factor < 1) and running.predicted == pytest.approx(8 * factor)
    running.run_at(*[3 * factor] * 9)
    assert len(running.jobs.asked) == 1
    running.run()
    assert len(running.jobs.asked) == 2 and running.jobs.asked[1].ideal_seconds == pytest.approx(24 * factor)


@pytest.mark.parametrize("seconds", [[3.0] * 40, [3.0, 3.6, 4.2] * 14])
def test_times_that_were_measured_in_a_disturbance_do_not_stay(training: VirtualTraining, seconds: list[float]) -> None:
    """Planned again from them; what follows is plainly faster, and need not be alike."""
    running = Following(training, (6, 6))
    running.jobs.answers = [None] * 4
    running.run(9)
    disturbed = iter(seconds)
    while not running.jobs.asked:
        running.run_at(next(disturbed))
    running.run()
    assert len(running.jobs.asked) == 1 and running.predicted > 2 * 8
    running.run_at(1.0, 1.3, 1.0, 1.3, 1.0)
    assert len(running.jobs.asked) == 2 and running.predicted < 1.4 * 8


@pytest.mark.parametrize(
    "seconds",
    [
        [1.0, 1.0, 9.0, 1.0, 9.0, 9.0, 1.0, 1.0, 1.0],  # not even two of the first ones
        [1.0, 9.0, 5.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0],  # nor three that are disturbed differently
        [1.0, 1.0, 1.0, 50.0] * 10,
    ],
)
def test_disturbed_iterations_do_not_lead_to_planning(training: VirtualTraining, seconds: list[float]) -> None:
    running = Following(training, (6, 6))
    running.run_at(*seconds)
    assert running.jobs.asked == [] and running.asked_for(6) == [6]


def test_later_on_three_iterations_are_not_enough(training: VirtualTraining) -> None:
    running = Following(training, (6, 6))
    running.run(30)
    running.run_at(*[3.0] * 4)
    assert running.jobs.asked == []
    running.jobs.answers = [None]
    running.run()
    assert len(running.jobs.asked) == 1, "the median of nine iterations has changed"


PROPORTIONAL = [Polynomial(id=stage, coefficients=(0.0, 0.1)) for stage in range(1, COUNT)]


@pytest.mark.parametrize(
    ("slower", "lengths", "asked"),
    [
        (2.0, (8, 6), [16.0]),
        (1.2, (8, 6), []),  # as far off as a fit may be
        (2.0, (4,), []),  # so short that it says little
    ],
)
def test_times_are_compared_with_those_at_the_size_at_hand(
    training: VirtualTraining, slower: float, lengths: tuple[int, ...], asked: list[float]
) -> None:
    """Where inputs as large as those that the plan is for hardly come. Its moves are those of the largest inputs, too."""
    training.graph = SizedGraph("graph", (10,))
    known = Lengths(lowest=(1,), highest=(10,), stage_seconds=tuple(PROPORTIONAL))
    running = Following(training, (6, 6), lengths=known)
    running.jobs.answers = [None]
    running.run(2)
    for length in itertools.islice(itertools.cycle(lengths), 16):
        training.graph = SizedGraph("graph", (length,))
        running.run_at(slower * length / 10)
    assert [trace.ideal_seconds for trace in running.jobs.asked] == pytest.approx(asked)


def test_iterations_that_ran_or_began_otherwise_are_not_compared(training: VirtualTraining) -> None:
    """The first one under a plan begins so, and the first one after one that did not run by it."""
    running = Following(training, (6, 6))
    training.stage_seconds = [9.0] * STAGES
    for _ in range(30):
        running.in_force.iteration_ended(training.iteration(), as_planned=False)
    running.run()
    assert running.drift is None and running.jobs.asked == []
    running.run_at(1.0)
    assert running.drift.iteration == pytest.approx(0.0)
    running.in_force.iteration_ended(training.iteration(), as_planned=False)
    running.run_at(9.0)
    assert running.drift.iteration == pytest.approx(0.0)
    running.run()
    assert running.drift.iteration == pytest.approx(4.0), "of 1 and 9 times"


def test_iterations_that_are_looked_at_later(training: VirtualTraining) -> None:
    """On an asynchronous device: the one before the plan has ended when the plan is followed already."""
    training.stage_seconds = [9.0] * STAGES
    before = training.iteration()
    training.stage_seconds = [1.0] * STAGES
    running = Following(training, (6, 6))
    before.number = training.observer.recorder.iteration_number - 1
    running.in_force.iteration_ended(before, as_planned=True)
    running.run()
    assert running.drift is None
    running.run()
    assert running.drift.iteration == pytest.approx(0.0)


# -- on a device whose times cost something


class Marks:
    """How many points of the device's work were asked for in each iteration, on an asynchronous device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        mark = CpuDevice.mark

        def counted(device: CpuDevice) -> WallMark:
            self.count += 1
            return mark(device)

        monkeypatch.setattr(CpuDevice, "asynchronous", True)
        monkeypatch.setattr(CpuDevice, "mark", counted)

    def of(self, running: Following, count: int) -> list[int]:
        """Run iterations."""
        found = []
        for _ in range(count):
            before = self.count
            running.run()
            found.append(self.count - before)
        return found


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Marks:
    return Marks(monkeypatch)


ALL, FEW = 2 * STAGES + 3, 2
"""Marks of an iteration: begin and end of each stage, of the user code and of the iteration; or the last ones only."""


def test_stages_are_timed_in_few_iterations(training: VirtualTraining, marks: Marks) -> None:
    """In all before there is a plan, and until the first ones under the plan have been compared with it."""
    running = Following(training, (6, 6))
    first = marks.of(running, 40)
    assert set(first[:11]) == {ALL}, "one that is not compared, nine that are, and one that had begun by then"
    assert set(first[11:]) == {ALL, FEW} and first[11:].count(ALL) == 4
    assert running.jobs.asked == [] and not running.drift.found
    running.in_force.stop()
    training.iteration()
    before = marks.count
    training.iteration()
    assert marks.count - before == ALL, "no plan is followed"
