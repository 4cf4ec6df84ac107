"""Where re-runs have their places: numbers, what is dropped and when, and what the recorder asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import planner
from planner import Budgets, Plan, Recompute, Trace, plan, with_shorter
from runtime.device import WallMark
from runtime.execution import SizedGraph, StageRerun
from runtime.paging import Block
from teraio.following import RerunsByStage, StageSchedule
from teraio.following.thinned import ThinnedPlans
from teraio.profiling import Iteration, Profile, Region

from ...planner.traces import hand, layers, varying
from ..virtual import profile_of
from .recorded import BACKWARD, FIRST, FORWARD, SECOND, STEP, WEIGHT, Training, lay_out, move, schedule_of

CHOSEN = [Recompute(group=0, at=5), Recompute(group=1, at=4)]
"""Of three layers: 0, 1, 2 forward, 3, 4, 5 backward. Re-runs are stages 4 (of 1) and 6 (of 0) then."""


def test_numbers_and_places() -> None:
    placed = RerunsByStage.of(layers(), CHOSEN)
    assert placed.count == 8 and list(placed.numbers) == [0, 1, 2, 3, 5, 7]
    assert placed.stages == {0, 1} and placed.made == {4: (1,), 6: (0,)}
    assert placed.dropped_after == {2: (1,), 4: (0,)}, "1 is last read by stage 2, 0 by the re-run that makes 1 anew"
    without = RerunsByStage.of(layers(), [])
    assert without.count == 6 and list(without.numbers) == list(range(6)) and not without.made
    assert placed.spread([1, 2, 3, 4, 5, 6], {4: 0.5}) == [1, 2, 3, 4, 0.5, 5, 0.0, 6]


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
            again = StageRerun(name="forward/0", begin=WallMark(0.0), end=WallMark(0.25), made=made)
            self.observer.stage_ran_again(again)

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


def test_out_of_step_nothing_is_due() -> None:
    training = Dropping()
    with_rerun(training)
    training.iteration((FORWARD, "evaluation", BACKWARD, STEP))
    assert training.ran[-1][0] == "backward 1", "back in step"
    training.ran.clear()
    training.region(BACKWARD, stages=3)
    assert not training.ran


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


def test_a_trace_of_one_length_has_one_plan() -> None:
    trace = varying(hand("chain"), places=(1,))
    made = with_shorter(plan(trace, Budgets(device_bytes=20)), trace, (8, 4))
    for follows in (thinned(trace.rebuilt(lengths=None), made), thinned(trace, plan(trace, Budgets(device_bytes=20)))):
        assert follows.schedule_for(SizedGraph(0, (3, 2)), begins=True) is None
    without = dataclasses.replace(profile_of_length(trace, 10), iteration=Iteration(number=0))
    assert ThinnedPlans(without, made).schedule_for(SizedGraph(0, (3, 2)), begins=True) is None
