"""Iterations as they are recorded, and a plan applied by position: in step, out of step, and in step again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest
import torch

from planner import Budgets, Hardware, Move, Offload, Plan, Prefetch
from planner.schema import WaitingTier
from runtime.device import CpuDevice, WallMark
from runtime.execution import StageRun
from runtime.paging import Block, Pager
from teraio.following import IterationObserver, StageSchedule
from teraio.profiling import Iteration, Profile, build_profile, recorder

from ..virtual import STAGES, VirtualTraining, plan_for

FORWARD, BACKWARD, STEP, EVALUATION = "forward", "backward", "optimizer", "evaluation"
COUNTS = {FORWARD: 2, BACKWARD: 2, STEP: 1, EVALUATION: 3}
"""Stages of each region; every region has the user's code before it as one more."""


class NotingPager(Pager):
    """Notes the moves that it is asked for; carries out none."""

    def __init__(self) -> None:
        super().__init__(mover=None, budget_bytes=None)
        self.asked: list[str] = []

    def offload_all(self, leaving: Sequence[tuple[Block, WaitingTier | None]]) -> None:
        self.asked += [f"out {block.name}" for block, _ in leaving]

    def prefetch(self, block: Block) -> None:
        self.asked.append(f"in {block.name}")


class Training:
    """A recorder that is driven as the executor drives it. Each forward stage makes an activation for the backward."""

    def __init__(self) -> None:
        self.pager = NotingPager()
        self.observer = IterationObserver(self.pager)
        self.weight, self._tensor = self.block("weight")
        self.kept: list[torch.Tensor] = []
        self.made: list[Block] = []
        self.fetched: list[tuple[str, list[str]]] = []

    def block(self, name: str) -> tuple[Block, torch.Tensor]:
        tensor = torch.zeros(16)
        return self.pager.block_of(tensor, name=name, kind="activation", user_visible=False), tensor

    def region(self, identity: Hashable, *, stages: int | None = None, fails_at: int | None = None) -> None:
        count = COUNTS[str(identity)] if stages is None else stages
        self.observer.region_begins(identity, count, is_inference=identity == EVALUATION)
        for number in range(count):
            self.run_due(f"{identity} {number}")
            wanted = [block.name for block in self.observer.stage_reached()]
            self.fetched.append((f"{identity} {number}", wanted))
            if number == fails_at:
                break
            self._stage(str(identity), number)
        self.observer.region_ended()

    def run_due(self, stage: str) -> None:
        """Run what has its place before a stage: nothing, in these plans."""
        assert not list(self.observer.reruns_due())

    def _stage(self, identity: str, number: int) -> None:
        read, made = [self.weight], list[Block]()
        if identity == FORWARD:
            block, tensor = self.block(f"activation{number}")
            self.kept.append(tensor)
            self.made.append(block)
            made = [block]
        if identity == BACKWARD and self.made:
            read.append(self.made.pop())
        self.observer.stage_ended(
            StageRun(
                name=f"{identity}/{number}",
                phase=identity,
                begin=WallMark(0.0),
                end=WallMark(0.001),
                workspace_bytes=7,
                read=read,
                made=made,
                written=[self.weight] if identity == STEP else [],
            )
        )
        if identity == BACKWARD and self.kept:
            self.kept.pop()

    def iteration(self, regions: Sequence[str] = (FORWARD, BACKWARD, STEP)) -> Iteration:
        for identity in regions:
            self.region(identity)
        return self.observer.iteration_ends()

    def follow(self, schedule: StageSchedule, blocks: dict[int, Block]) -> None:
        self.observer.plan.follow(schedule, blocks)
        self.pager.asked.clear()
        self.fetched.clear()

    def asked(self) -> tuple[dict[str, list[str]], list[str]]:
        """What stages fetched and what else was hinted since the last call."""
        fetched = {stage: names for stage, names in self.fetched if names}
        asked = list(self.pager.asked)
        self.fetched.clear()
        self.pager.asked.clear()
        return fetched, asked


WEIGHT, FIRST, SECOND = 0, 1, 2
"""Trace ids of the weight and the two activations."""


def profile_of(recorded: Iteration) -> Profile:
    hardware = Hardware(name="made up", device_memory_bytes=1 << 20, links=())
    return build_profile([recorded], name="t", created_by="tests", hardware=hardware, fixed_bytes=0, survivors=set())


def schedule_of(recorded: Iteration, *moves: Move) -> StageSchedule:
    profile = profile_of(recorded)
    assert [block.name for block in profile.trace.blocks[:3]] == ["weight", "activation0", "activation1"]
    plan = Plan(trace_fingerprint="", policy="by hand", budgets=Budgets(device_bytes=0), moves=moves)
    return StageSchedule.of(profile, plan)


def lay_out(recorded: Iteration) -> StageSchedule:
    """Positions: 0 user, 1-2 forward, 3 user, 4-5 backward, 6 user, 7 step."""
    moves = (
        move(FIRST, after=1, start=2, fetch=4, before=5),
        move(WEIGHT, after=5, start=5, fetch=6, before=7),
        move(WEIGHT, after=7, start=7, fetch=8, before=9),
    )
    return schedule_of(recorded, *moves)


def move(block: int, *, after: int, start: int, fetch: int, before: int) -> Move:
    return Move(
        block=block,
        after=after,
        before=before,
        tier="storage",
        offload=Offload(start=start, free_after=start),
        prefetch=Prefetch(start=fetch, ready_by=before),
    )


def planned() -> Training:
    """A training that has recorded two iterations and follows a plan since."""
    training = Training()
    training.iteration()
    schedule = lay_out(training.iteration())
    training.follow(schedule, {WEIGHT: training.weight})
    return training


AS_PLANNED = ({"backward 0": ["activation0"]}, ["out activation0", "out weight", "in weight", "out weight", "in weight"])
"""The activation is fetched at 4, the weight at 6 and 8 = 0: both user code, so when the region before has ended."""


# -- recording


def test_positions_count_user_code_as_stages() -> None:
    training = Training()
    training.iteration()
    recorded = training.iteration()
    assert [stage.name for stage in recorded.stages] == [
        "user",
        "forward/0",
        "forward/1",
        "user",
        "backward/0",
        "backward/1",
        "user",
        "optimizer/0",
    ]
    assert [region.first for region in recorded.regions] == [0, 3, 6]
    assert recorded.signature == ((FORWARD, 3), (BACKWARD, 3), (STEP, 2))
    assert training.weight.uses == (1, 2, 4, 5, 7)
    assert recorded.seconds > 0 and all(stage.seconds >= 0 for stage in recorded.stages)


def test_blocks_are_recognised_by_their_order() -> None:
    training = Training()
    training.iteration()
    training.region(FORWARD)
    first, second = training.observer.recorder._iteration.regions[0].made
    assert first.uses == (1, 5) and second.uses == (2, 4)


def test_the_next_use_is_known_from_the_iteration_before() -> None:
    training = Training()
    training.iteration()
    training.iteration()
    training.region(FORWARD)
    clock = training.pager.account.clock
    first, second = training.observer.recorder._iteration.regions[0].made
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
    training.observer.stage_ended(
        StageRun(
            name="x",
            phase="forward",
            begin=WallMark(0.0),
            end=WallMark(0.0),
            workspace_bytes=0,
            read=[training.weight],
            made=[],
            written=[],
            next_uses=lambda: {training.weight: 2},
        )
    )
    assert training.weight.next_use == training.pager.account.clock + 2


def test_a_region_that_failed_is_not_complete() -> None:
    training = Training()
    training.iteration()
    training.region(FORWARD)
    training.region(BACKWARD, fails_at=1)
    training.region(STEP)
    assert [r.complete for r in training.observer.iteration_ends().regions] == [True, False, True]


def test_a_long_row_of_inference_is_left_out_and_counts_as_user_code() -> None:
    training = Training()
    training.iteration()
    for _ in range(3):
        training.region(FORWARD)
        training.region(BACKWARD)
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
        training.region(FORWARD)
        training.region(BACKWARD)
    recorded = training.observer.iteration_ends()
    assert recorded.truncated and len(recorded.stages) == recorded.stage_count == 99
    following = training.iteration()
    assert following.complete and following.stage_count == 8


def test_a_plan_applies_again_after_regions_without_a_record() -> None:
    training = planned()
    for _ in range(100):
        training.region(EVALUATION)
    training.asked()
    training.iteration()
    fetched, asked = training.asked()
    assert fetched == AS_PLANNED[0] and asked[-5:] == AS_PLANNED[1]


def test_survivors_are_what_lives_when_the_next_iteration_begins() -> None:
    training = Training()
    for identity in (FORWARD, BACKWARD, STEP):
        training.region(identity)
    training.region(FORWARD)  # its activations live on: there was no backward for them
    before = training.observer.iteration_ends()
    training.iteration()
    assert before.survivors == {(3, 0), (3, 1)}


def test_waiting_at_the_end_of_a_region_is_not_the_user_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 1 s is under way that user code could see, then user code runs for 0.25 s."""
    training = VirtualTraining(monkeypatch)
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
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, waited: float
) -> None:
    """Between stages 0.25 s pass, in which the host did not wait: the host's own time, or the device's waiting."""
    monkeypatch.setattr(CpuDevice, "asynchronous", asynchronous)
    training = VirtualTraining(monkeypatch)
    training.between_seconds = 0.25
    training.iteration()
    recorded = training.iteration()
    assert recorded.seconds == (0.0 if asynchronous else 1.25 * STAGES), "not known yet, or known"
    recorded.read_times()
    assert (recorded.seconds, recorded.waited_seconds) == (1.25 * STAGES, waited)
    assert [stage.seconds for stage in recorded.stages] == [0.0] + [1.0] * STAGES


def test_late_blocks_are_recorded_where_they_were_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    training = VirtualTraining(monkeypatch)
    profile = training.profile()
    schedule = StageSchedule.of(profile, plan_for(profile.trace, (3, 3), (6, 6)))
    training.observer.plan.follow(schedule, {number: block for block, number in profile.ids.items()})
    training.iteration()
    training.mover.seconds["storage->device"] = 1.75
    recorded = training.iteration()
    assert {stage.name: stage.late for stage in recorded.stages if stage.late} == {
        "forward/3": ((3, 0.75),),
        "forward/6": ((6, 0.75),),
    }
    assert recorded.waited_seconds == 1.5


def test_what_a_stage_that_failed_waited_for_is_not_the_next_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    training = VirtualTraining(monkeypatch)
    profile = training.profile()
    schedule = StageSchedule.of(profile, plan_for(profile.trace, (3, 3)))
    training.observer.plan.follow(schedule, {number: block for block, number in profile.ids.items()})
    training.iteration()
    training.pager.prefetch(training.weights[3])
    training.pager.acquire([training.weights[3]], 0, "a stage that fails")
    training.pager.retire([training.weights[3]], [])
    recorded = training.iteration()
    assert recorded.waited_seconds == 1.0 and all(stage.late == () for stage in recorded.stages)


# -- following a plan


def test_in_step_all_moves_come_in_their_places() -> None:
    training = planned()
    for _ in range(3):
        training.iteration()
        assert training.asked() == AS_PLANNED
    assert training.observer.plan.deviations == 0


@pytest.mark.parametrize("extra", [None, EVALUATION])
def test_an_iteration_as_planned_without_times_is_not_looked_through_again(
    monkeypatch: pytest.MonkeyPatch, extra: str | None
) -> None:
    """Its blocks keep the uses of the iteration before. One that ran otherwise is looked through."""
    monkeypatch.setattr(CpuDevice, "asynchronous", True)
    training = planned()
    training.observer.recorder.sampled = True
    training.iteration()
    training.region(FORWARD)
    if extra is not None:
        training.region(extra)
    training.region(BACKWARD)
    training.region(STEP)
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
    training = Training()
    training.iteration()
    recorded = training.iteration()
    moves = (move(WEIGHT, after=2, start=3, fetch=4, before=4),)  # 3 is user code
    training.follow(schedule_of(recorded, *moves), {WEIGHT: training.weight})
    training.region(FORWARD)
    assert training.asked() == ({}, [])
    training.region(BACKWARD)
    assert training.asked() == ({"backward 0": ["weight"]}, ["out weight"])


def test_a_plan_that_begins_in_the_middle_of_an_iteration() -> None:
    training = Training()
    training.iteration()
    schedule = lay_out(training.iteration())
    training.region(FORWARD)
    training.follow(schedule, {WEIGHT: training.weight})
    training.region(BACKWARD)
    training.region(STEP)
    training.observer.iteration_ends()
    training.asked()
    training.iteration()
    assert training.asked() == AS_PLANNED


def test_an_evaluation_pass_in_between_asks_for_nothing_and_changes_nothing() -> None:
    training = planned()
    training.region(FORWARD)
    training.region(EVALUATION)
    training.region(BACKWARD)
    training.region(STEP)
    training.observer.iteration_ends()
    assert training.asked() == AS_PLANNED
    assert training.observer.plan.deviations == 1
    training.iteration()
    assert training.asked() == AS_PLANNED and training.observer.plan.deviations == 1


def test_the_training_graph_as_an_evaluation_pass_falls_into_step_again() -> None:
    training = planned()
    training.iteration((FORWARD, FORWARD, BACKWARD, STEP))
    training.asked()
    training.iteration()
    assert training.asked() == AS_PLANNED


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


def test_a_region_with_another_number_of_stages_is_another_region() -> None:
    """An optimizer that got more parameters: its positions would run over into those of others."""
    training = planned()
    training.region(FORWARD)
    training.region(BACKWARD)
    training.region(STEP, stages=4)
    training.observer.iteration_ends()
    assert training.observer.plan.deviations == 1
    training.asked()
    training.iteration()
    assert training.asked() == AS_PLANNED


def test_a_region_that_fails_and_is_repeated() -> None:
    training = planned()
    training.region(FORWARD)
    training.region(BACKWARD, fails_at=1)
    training.iteration()
    training.asked()
    training.iteration()
    assert training.asked() == AS_PLANNED


def test_a_block_of_another_size_is_not_taken_for_the_planned_one() -> None:
    training = Training()
    training.iteration()
    schedule = lay_out(training.iteration())
    other = replace(schedule, sizes=(64, 65, 64))
    training.follow(other, {WEIGHT: training.weight})
    training.iteration()
    assert "out activation0" not in training.asked()[1]


def test_without_a_plan_nothing_is_asked_for() -> None:
    training = planned()
    training.observer.plan.follow(None, {})
    training.asked()
    training.iteration()
    assert training.asked() == ({}, [])


def test_moves_that_run_over_the_end_are_laid_out_from_the_beginning() -> None:
    training = Training()
    training.iteration()
    recorded = training.iteration()
    moves = (
        move(WEIGHT, after=7, start=8, fetch=9, before=9),
        Move(block=SECOND, after=2, before=4, tier="storage", offload=None, prefetch=Prefetch(start=3, ready_by=4)),
    )
    schedule = schedule_of(recorded, *moves)
    leave = {p: ids for p, ids in enumerate(schedule.leave_after) if ids}
    fetch = {p: ids for p, ids in enumerate(schedule.fetch_at) if ids}
    assert leave == {0: ((WEIGHT, "storage"),), 2: ((SECOND, "storage"),)} and fetch == {1: (WEIGHT,), 3: (SECOND,)}
