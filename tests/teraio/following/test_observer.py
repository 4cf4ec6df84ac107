"""Iterations as they are recorded, and a plan applied by position: in step, out of step, and in step again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import pytest

import planner
from planner import Budgets, Plan, Recompute, Trace, plan, with_shorter
from runtime.device import CpuDevice, WallMark
from runtime.execution import SizedGraph, StageRerun
from runtime.paging import Block
from teraio.following import StageSchedule
from teraio.following.schedule import ThinnedPlans
from teraio.profiling import Iteration, Profile, Region, recorder

from ...planner.traces import hand, varying
from ..virtual import STAGES, VirtualTraining, profile_of
from .recorded import BACKWARD, EVALUATION, FIRST, FORWARD, SECOND, STEP, WEIGHT, Training, lay_out, move, schedule_of


def recorded_twice() -> tuple[Training, Iteration]:
    """The second iteration knows the uses of the first."""
    training = Training()
    training.iteration()
    return training, training.iteration()


@pytest.fixture
def planned() -> Training:
    """A training that has recorded two iterations and follows a plan since."""
    training, recorded = recorded_twice()
    training.follow(lay_out(recorded), {WEIGHT: training.weight})
    return training


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> VirtualTraining:
    return VirtualTraining(monkeypatch)


AS_PLANNED = ({"backward 0": ["activation0"]}, ["out activation0", "out weight", "in weight", "out weight", "in weight"])
"""The activation is fetched at 4, the weight at 6 and 8 = 0: both user code, so when the region before has ended."""


# -- recording


def test_positions_count_user_code_as_stages() -> None:
    training, recorded = recorded_twice()
    names = "user forward/0 forward/1 user backward/0 backward/1 user optimizer/0"
    assert [stage.name for stage in recorded.stages] == names.split()
    assert [region.first for region in recorded.regions] == [0, 3, 6]
    assert recorded.signature == ((FORWARD, 3), (BACKWARD, 3), (STEP, 2))
    assert training.weight.uses == (1, 2, 4, 5, 7)
    assert recorded.seconds > 0 and all(stage.seconds >= 0 for stage in recorded.stages)


def test_blocks_are_recognised_by_their_order_and_their_next_use_is_known() -> None:
    training, _ = recorded_twice()
    training.region(FORWARD)
    clock = training.pager.account.clock
    first, second = training.observer.recorder._iteration.regions[0].made
    assert (first.uses, second.uses) == ((1, 5), (2, 4))
    # The clock stands at the end of stage 2; a block made at position p is used 5 - 1 and 4 - 2 stages after it.
    assert (first.next_use, second.next_use) == (clock - 1 + 4, clock + 2)
    assert training.weight.next_use == clock + 2
    training.region(BACKWARD)
    assert training.weight.next_use == training.pager.account.clock + 2
    training.region(STEP)
    assert training.weight.next_use == training.pager.account.clock + 2, "over the iteration's end, to position 1"


def test_a_long_row_of_inference_is_left_out_and_counts_as_user_code() -> None:
    training = Training()
    training.iteration()
    for _ in range(3):
        training.regions(FORWARD, BACKWARD)
        for _ in range(500):
            training.region(EVALUATION)
    training.region(STEP)
    recorded = training.observer.iteration_ends()
    assert recorded.complete and recorded.left_out == [2, 4, 6]
    assert [region.identity for region in recorded.regions] == [FORWARD, BACKWARD] * 3 + [STEP]
    assert [r.first for r in recorded.regions[1:]] == [r.first + len(r.stages) for r in recorded.regions[:-1]]
    assert not recorded.untimed
    following = training.iteration((FORWARD, BACKWARD) * 3 + (STEP,))
    assert following.complete and following.signature != recorded.signature, "a plan for one is none for the other"


def test_iterations_that_never_end_are_recorded_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MOST_STAGES", 100)
    training = Training()
    for _ in range(200):
        training.regions(FORWARD, BACKWARD)
    recorded = training.observer.iteration_ends()
    assert recorded.truncated and len(recorded.stages) == recorded.stage_count == 99
    following = training.iteration()
    assert following.complete and following.stage_count == 8


def test_waiting_at_the_end_of_a_region_is_not_the_user_s_time(virtual: VirtualTraining) -> None:
    """A copy of 1 s is under way that user code could see, then user code runs for 0.25 s."""
    training = virtual
    training.iteration()
    training.weights[0].user_visible = True
    training.pager.enter_region()
    training.observer.region_begins("one", 1)
    training.pager.offload(training.weights[0])
    training.observer.region_ended()
    training.pager.leave_region()
    training.mover.pass_seconds(0.25)
    training.pager.enter_region()
    training.observer.region_begins("two", 1)
    training.observer.region_ended()
    recorded = training.observer.iteration_ends()
    assert [stage.seconds for stage in recorded.stages] == [0.0, 0.25]
    assert (recorded.waited_seconds, recorded.seconds) == (1.0, 1.25)
    assert training.observer.iteration_ends().waited_seconds == 0.0


@pytest.mark.parametrize(("asynchronous", "waited"), [(False, 0.0), (True, 0.25 * (STAGES - 1))])
def test_what_is_in_no_stage_is_waiting_on_an_asynchronous_device(
    monkeypatch: pytest.MonkeyPatch, virtual: VirtualTraining, asynchronous: bool, waited: float
) -> None:
    """Between stages 0.25 s pass, in which the host did not wait: the host's own time, or the device's waiting."""
    monkeypatch.setattr(CpuDevice, "asynchronous", asynchronous)
    virtual.between_seconds = 0.25
    virtual.iteration()
    recorded = virtual.iteration()
    assert recorded.seconds == (0.0 if asynchronous else 1.25 * STAGES), "not known yet, or known"
    recorded.read_times()
    assert (recorded.seconds, recorded.waited_seconds) == (1.25 * STAGES, waited)
    assert [stage.seconds for stage in recorded.stages] == [0.0] + [1.0] * STAGES


def test_stages_in_which_the_allocator_took_memory_away_take_what_is_known_of_them(
    monkeypatch: pytest.MonkeyPatch, virtual: VirtualTraining
) -> None:
    """By others with the same code, also where they look alike; where all of a kind are disturbed, by an earlier measurement."""
    monkeypatch.setattr(CpuDevice, "asynchronous", True)
    # One in each stage that takes long.
    monkeypatch.setattr(CpuDevice, "retries", property(lambda device: int(virtual.mover.now)))
    virtual.codes = ["a layer"] * (STAGES - 1) + ["the head"]
    virtual.stage_seconds = [0.5, 1.25, 9.0, *[0.5] * (STAGES - 4), 5.0]
    virtual.iteration()
    recorded = virtual.iteration()
    recorded.read_times()
    assert [stage.seconds for stage in recorded.stages][1:4] == [0.5, 0.5, 0.5]
    head = recorded.stages[-1]
    assert head.seconds == 5.0 and head.retried
    waited = recorded.waited_seconds
    recorded.correct([0.25] * (STAGES + 1))
    assert (head.seconds, head.retried, recorded.waited_seconds - waited) == (0.25, False, 4.75)
    assert recorded.stages[1].seconds == 0.5, "nothing else is corrected"


# -- following a plan


def test_in_step_all_moves_come_in_their_places(planned: Training) -> None:
    for _ in range(3):
        planned.iteration()
        assert planned.asked() == AS_PLANNED
    assert planned.observer.plan.deviations == 0
    planned.observer.plan.follow(None, {})
    planned.asked()
    planned.iteration()
    assert planned.asked() == ({}, []), "without a plan nothing is asked for"


def two_forward_passes(training: Training) -> None:
    """The training graph as an evaluation pass."""
    training.iteration((FORWARD, FORWARD, BACKWARD, STEP))


def more_stages(training: Training) -> None:
    """An optimizer that got more parameters: its positions would run over into those of others."""
    training.regions(FORWARD, BACKWARD)
    training.region(STEP, stages=4)
    training.observer.iteration_ends()
    assert training.observer.plan.deviations == 1


def a_failure(training: Training) -> None:
    training.region(FORWARD)
    training.region(BACKWARD, fails_at=1)
    training.iteration()


def an_evaluation(training: Training) -> None:
    """It asks for nothing, and what follows it comes in its place."""
    training.iteration((FORWARD, EVALUATION, BACKWARD, STEP))
    assert training.asked() == AS_PLANNED and training.observer.plan.deviations == 1


@pytest.mark.parametrize("odd", [two_forward_passes, more_stages, a_failure, an_evaluation])
def test_after_an_odd_iteration_the_next_one_is_in_step(planned: Training, odd: Callable[[Training], None]) -> None:
    odd(planned)
    planned.asked()
    before = planned.observer.plan.deviations
    planned.iteration()
    assert planned.asked() == AS_PLANNED and planned.observer.plan.deviations == before


# -- where re-runs have their places: numbers, what is dropped and when, and what the recorder asks for


class Dropping(Training):
    """Notes drops, and runs what is due before a backward stage. Each re-run waits half a second for the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[Block, float]] = []
        self.pager.take_late = self.take_late  # type: ignore[method-assign]
        self.pager.drop = lambda block: self.pager.asked.append(f"drop {block.name}")  # type: ignore[method-assign]
        self.ran: list[tuple[str, list[str], list[str]]] = []
        self.kept_stages: list[list[int]] = []

    def take_late(self) -> list[tuple[Block, float]]:
        late, self.late = self.late, []
        return late

    def run_due(self, stage: str) -> None:
        for made, fetch in self.observer.reruns_due():
            self.late.append((self.weight, 0.5))
            self.ran.append((stage, [b.name for b in made], [b.name for b in fetch]))
            again = StageRerun(name="forward/0", made_bytes=sum(block.size_bytes for block in made))
            self.observer.stage_ran_again(again, WallMark(0.0), WallMark(0.25))

    def _stage(self, identity: str, number: int) -> None:
        if number == 0:
            self.kept_stages.append(sorted(self.observer.kept_stages() or ()))
        super()._stage(identity, number)


def with_rerun(training: Dropping, moves: Sequence[planner.Move] = ()) -> None:
    """Follow a plan: positions 0 user, 1-2 forward, 3 user, 4-5 backward, 6 user, 7 step; stage 1 runs again before 5."""
    training.iteration()
    recorded = training.iteration()
    profile = profile_of([recorded])
    group = planner.RecomputeGroup(id=0, stage=1, blocks=(FIRST,), reads=(WEIGHT,), duration_seconds=0.25, workspace_bytes=0)
    profile = replace(profile, trace=profile.trace.model_copy(update={"recompute": (group,)}))
    plan = Plan(
        trace_fingerprint="",
        policy="by hand",
        budgets=Budgets(device_bytes=0),
        moves=tuple(moves),
        recompute=(Recompute(group=0, at=5),),
    )
    training.follow(StageSchedule.of(profile, plan), {WEIGHT: training.weight})


def test_the_recorder_drops_and_runs_again_by_the_plan() -> None:
    """What a re-run waits for is late at its place, so that it is fetched earlier from then on."""
    training = Dropping()
    with_rerun(training)
    done = training.iteration()
    _, asked = training.asked()
    assert [each for each in asked if each.startswith("drop")] == ["drop activation0"]
    assert training.ran == [("backward 1", ["activation0"], [])]
    assert training.kept_stages[-3:] == [[0], [], []]
    assert [(again.position, again.seconds, again.made_bytes) for again in done.reruns] == [(5, 0.25, 64)]
    assert [len(region.stages) for region in done.regions] == [3, 3, 2], "a re-run is no stage of the record"

    assert not any(stage.late for stage in done.stages)
    assert training.observer.plan.schedule is not None
    assert training.observer.plan.schedule.reruns.late(done) == {(WEIGHT, 5): 0.5}


def test_moves_count_reruns_as_stages() -> None:
    training = Dropping()
    with_rerun(training, [move(WEIGHT, after=4, start=5, fetch=6, before=8), move(SECOND, after=2, start=2, fetch=5, before=6)])
    training.iteration()
    fetched, asked = training.asked()
    assert training.ran[-1] == ("backward 1", ["activation0"], ["activation1"]), "fetched while the stage runs again"
    assert fetched == {"backward 1": ["weight"]}
    assert asked == ["drop activation0", "out activation1", "out weight"]


# -- what moves with shorter inputs: by the longest inputs of the iteration so far


def profile_of_length(trace: Trace, length: int) -> Profile:
    """Of a run of a graph that takes batches of 3, and then of an optimizer."""
    regions = [Region(identity=SizedGraph(0, (3, length)), first=0), Region(identity="optimizer", first=1)]
    return Profile(trace=trace, iteration=Iteration(number=0, regions=regions), ids={})


def thinned(trace: Trace, made: Plan) -> ThinnedPlans:
    return ThinnedPlans(profile_of_length(trace, 10), made)


def test_the_longest_microbatch_so_far_says_what_moves() -> None:
    trace = varying(hand("chain"), places=(1,))
    made = with_shorter(plan(trace, Budgets(device_bytes=20)), trace, (8, 4))
    follows = thinned(trace, made)

    def moves(graph: object, *, begins: bool = False) -> int | None:
        """How many moves the schedule has that stands for the plan's own."""
        found = follows.schedule_for(graph, begins=begins)
        return None if found is None else sum(map(len, found.leave_after))

    assert [each.sizes for each in made.shorter] == [(8,), (4,)] and made.moves
    assert moves(SizedGraph(0, (3, 4)), begins=True) == moves(SizedGraph(0, (3, 2)), begins=True) == 0
    assert moves(SizedGraph(1, (3, 9))) == moves("optimizer") == 0, "other graphs say nothing, and change nothing"
    assert moves(SizedGraph(0, (3, 7))) == moves(SizedGraph(0, (3, 2))) == len(made.moves), "the longest so far has 7"
    assert moves(SizedGraph(0, (3, 9))) is None and moves(SizedGraph(0, (3, 2))) is None
    assert moves(SizedGraph(0, (3, 2)), begins=True) == 0
    assert moves("teacher", begins=True) is None, "nothing is known of this iteration yet"


def test_what_the_plan_of_other_inputs_brings_as_an_iteration_begins_comes_then() -> None:
    training = Training()
    training.iteration()
    recorded = training.iteration()
    training.follow(lay_out(recorded), {WEIGHT: training.weight})
    later = schedule_of(recorded, move(WEIGHT, after=7, start=7, fetch=9, before=9))
    follows = mock.Mock(spec=ThinnedPlans)
    training.observer.plan.thinned = follows
    asked = []
    for schedule in (later, later, None):
        follows.schedule_for.return_value = schedule
        training.iteration()
        asked.append(training.asked())
    assert asked[1] == ({"forward 0": ["weight"]}, ["out weight"]), "at position 1 of 0 to 7"
    assert asked[2][1][0] == "in weight", "at position 0, where the iteration before did not ask for it"
