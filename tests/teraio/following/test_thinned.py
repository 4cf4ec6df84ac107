"""What moves with shorter inputs: by the longest inputs of the iteration so far."""

from __future__ import annotations

import dataclasses
from unittest import mock

from planner import Budgets, Plan, Trace, plan, with_shorter
from runtime.execution import SizedGraph
from teraio.following.thinned import ThinnedPlans
from teraio.profiling import Iteration, Profile, Region

from ...planner.traces import hand, varying
from .recorded import WEIGHT, Training, lay_out, move, schedule_of


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
