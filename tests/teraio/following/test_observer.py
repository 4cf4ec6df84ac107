"""Iterations as they are recorded, and a plan applied by position: in step, out of step, and in step again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner import Move, Prefetch
from runtime.device import CpuDevice, WallMark
from teraio.following import StageSchedule
from teraio.profiling import Iteration, recorder

from ..virtual import STAGES, VirtualTraining, plan_for, stage_run
from .recorded import BACKWARD, EVALUATION, FORWARD, SECOND, STEP, WEIGHT, Training, lay_out, move, schedule_of


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


def follow_by_hand(training: VirtualTraining, *fetched: tuple[int, int]) -> None:
    profile = training.profile()
    schedule = StageSchedule.of(profile, plan_for(profile.trace, *fetched))
    training.observer.plan.follow(schedule, {number: block for block, number in profile.ids.items()})


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


def test_uses_within_the_region_come_first() -> None:
    training = Training()
    training.observer.region_begins(FORWARD, 3)
    run = stage_run("x", read=[training.weight], next_uses=lambda: {training.weight: 2})
    training.observer.stage_ended(run)
    assert training.weight.next_use == training.pager.account.clock + 2


def test_a_region_that_failed_is_not_complete() -> None:
    training, _ = recorded_twice()
    training.region(FORWARD)
    training.region(BACKWARD, fails_at=1)
    training.region(STEP)
    assert [r.complete for r in training.observer.iteration_ends().regions] == [True, False, True]


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


def test_the_time_of_inference_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(CpuDevice, "mark", lambda device: WallMark(now))
    training = Training()
    training.region(FORWARD)
    for _ in range(100):
        now += 1.0
        training.region(EVALUATION)
    now += 1.0
    training.region(STEP)
    recorded = training.observer.iteration_ends()
    assert [each.stages[0].seconds for each in recorded.regions] == [0.0, 101.0] and recorded.seconds == 101.0


def test_a_short_inference_pass_is_part_of_the_iteration() -> None:
    training = Training()
    recorded = [training.iteration((EVALUATION, FORWARD, BACKWARD, STEP)) for _ in range(2)]
    assert all(each.complete for each in recorded)
    assert recorded[0].signature == recorded[1].signature and recorded[0].signature[0] == (EVALUATION, 4)


def test_iterations_that_never_end_are_recorded_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MOST_STAGES", 100)
    training = Training()
    for _ in range(200):
        training.regions(FORWARD, BACKWARD)
    recorded = training.observer.iteration_ends()
    assert recorded.truncated and len(recorded.stages) == recorded.stage_count == 99
    following = training.iteration()
    assert following.complete and following.stage_count == 8


def test_survivors_are_what_lives_when_the_next_iteration_begins() -> None:
    training = Training()
    training.regions(FORWARD, BACKWARD, STEP, FORWARD)  # its activations live on: there was no backward for them
    before = training.observer.iteration_ends()
    training.iteration()
    assert before.survivors == {(3, 0), (3, 1)}


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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stage_that_takes_far_longer_than_those_alike_has_waited_on_an_asynchronous_device(
    monkeypatch: pytest.MonkeyPatch, virtual: VirtualTraining, asynchronous: bool
) -> None:
    """The allocator has taken memory away in the third stage of a kind; there is only one stage of the last kind."""
    monkeypatch.setattr(CpuDevice, "asynchronous", asynchronous)
    virtual.codes = ["a layer"] * (STAGES - 1) + ["the head"]
    virtual.stage_seconds = [1.0, 1.25, 9.0, *[1.0] * (STAGES - 4), 5.0]
    virtual.iteration()
    recorded = virtual.iteration()
    recorded.read_times()
    third, waited = (1.0, 8.0) if asynchronous else (9.0, 0.0)
    assert [stage.seconds for stage in recorded.stages] == [0.0, 1.0, 1.25, third, *[1.0] * (STAGES - 4), 5.0]
    assert (recorded.seconds, recorded.waited_seconds) == (sum(virtual.stage_seconds), waited)


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


def test_what_the_allocator_did_in_iterations_without_times_is_not_a_later_stage_s(
    monkeypatch: pytest.MonkeyPatch, virtual: VirtualTraining
) -> None:
    retries = 0
    monkeypatch.setattr(CpuDevice, "asynchronous", True)
    monkeypatch.setattr(CpuDevice, "retries", property(lambda device: retries))
    recorder = virtual.observer.recorder
    recorder.sampled = True
    virtual.iteration()
    while not recorder._iteration.timed:
        retries += 1
        virtual.iteration()
    recorded = virtual.iteration()
    assert recorded.timed and retries > 1 and not any(stage.retried for stage in recorded.stages)


def test_late_blocks_are_recorded_where_they_were_waited_for(virtual: VirtualTraining) -> None:
    follow_by_hand(virtual, (3, 3), (6, 6))
    virtual.iteration()
    virtual.mover.seconds["storage->device"] = 1.75
    recorded = virtual.iteration()
    late = {stage.name: stage.late for stage in recorded.stages if stage.late}
    assert late == {"forward/3": ((3, 0.75),), "forward/6": ((6, 0.75),)}
    assert recorded.waited_seconds == 1.5


def test_what_a_stage_that_failed_waited_for_is_not_the_next_one_s(virtual: VirtualTraining) -> None:
    follow_by_hand(virtual, (3, 3))
    virtual.iteration()
    virtual.pager.prefetch(virtual.weights[3])
    virtual.pager.acquire([virtual.weights[3]], 0, "a stage that fails")
    virtual.pager.retire([virtual.weights[3]], [])
    recorded = virtual.iteration()
    assert recorded.waited_seconds == 1.0 and all(stage.late == () for stage in recorded.stages)


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


def test_a_plan_applies_again_after_regions_without_a_record(planned: Training) -> None:
    for _ in range(100):
        planned.region(EVALUATION)
    planned.asked()
    planned.iteration()
    fetched, asked = planned.asked()
    assert fetched == AS_PLANNED[0] and asked[-5:] == AS_PLANNED[1]


def test_a_plan_that_begins_in_the_middle_of_an_iteration() -> None:
    training, recorded = recorded_twice()
    training.region(FORWARD)
    training.follow(lay_out(recorded), {WEIGHT: training.weight})
    training.regions(BACKWARD, STEP)
    training.observer.iteration_ends()
    training.asked()
    training.iteration()
    assert training.asked() == AS_PLANNED


@pytest.mark.parametrize("extra", [None, EVALUATION])
def test_an_iteration_as_planned_without_times_is_not_looked_through_again(
    monkeypatch: pytest.MonkeyPatch, planned: Training, extra: str | None
) -> None:
    """Its blocks keep the uses of the iteration before. One that ran otherwise is looked through."""
    monkeypatch.setattr(CpuDevice, "asynchronous", True)
    training = planned
    training.observer.recorder.sampled = True
    training.iteration()
    training.region(FORWARD)
    if extra is not None:
        training.region(extra)
    training.regions(BACKWARD, STEP)
    first, second = training.observer.recorder._iteration.regions[0].made
    known = training.weight.uses
    done = training.observer.iteration_ends()
    assert not done.timed
    if extra is None:
        assert training.weight.uses is known == (1, 2, 4, 5, 7) and (first.uses, second.uses) == ((1, 5), (2, 4))
        assert not done.held
    else:
        assert training.weight.uses == (1, 2, 4, 5, 6, 8, 9, 11) and (first.uses, second.uses) == ((1, 9), (2, 8))
        assert training.weight in done.held


def test_what_leaves_after_user_code_leaves_when_the_next_region_begins() -> None:
    training, recorded = recorded_twice()
    moved = move(WEIGHT, after=2, start=3, fetch=4, before=4)  # 3 is user code
    training.follow(schedule_of(recorded, moved), {WEIGHT: training.weight})
    training.region(FORWARD)
    assert training.asked() == ({}, [])
    training.region(BACKWARD)
    assert training.asked() == ({"backward 0": ["weight"]}, ["out weight"])


def test_more_and_fewer_accumulation_steps() -> None:
    training = Training()
    twice = (FORWARD, BACKWARD, FORWARD, BACKWARD, STEP)
    training.iteration(twice)
    recorded = training.iteration(twice)
    moves = (move(WEIGHT, after=2, start=2, fetch=4, before=4), move(WEIGHT, after=8, start=8, fetch=10, before=10))
    training.follow(schedule_of(recorded, *moves), {WEIGHT: training.weight})
    expected = ({"backward 0": ["weight", "weight"]}, ["out weight", "out weight"])
    training.iteration(twice)
    fetched, asked = training.asked()
    assert asked == expected[1] and list(fetched) == ["backward 0"]
    training.iteration((FORWARD, BACKWARD, STEP))
    assert training.asked()[1] == ["out weight"] and training.observer.plan.deviations == 1
    training.iteration((FORWARD, BACKWARD) * 3 + (STEP,))
    assert training.asked()[1].count("out weight") >= 2
    training.iteration(twice)
    assert training.asked()[1] == expected[1]


def test_moves_that_run_over_the_end_are_laid_out_from_the_beginning() -> None:
    _, recorded = recorded_twice()
    moves = (
        move(WEIGHT, after=7, start=8, fetch=9, before=9),
        Move(block=SECOND, after=2, before=4, tier="storage", offload=None, prefetch=Prefetch(start=3, ready_by=4)),
    )
    schedule = schedule_of(recorded, *moves)
    leave = {p: ids for p, ids in enumerate(schedule.leave_after) if ids}
    fetch = {p: ids for p, ids in enumerate(schedule.fetch_at) if ids}
    assert leave == {0: ((WEIGHT, "storage"),), 2: ((SECOND, "storage"),)} and fetch == {1: (WEIGHT,), 3: (SECOND,)}
