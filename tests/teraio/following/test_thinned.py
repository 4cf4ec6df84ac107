"""What moves with shorter inputs: by the longest inputs of the iteration so far."""

from __future__ import annotations

import dataclasses

from planner import Budgets, Plan, Trace, plan, with_shorter
from runtime.execution import SizedGraph
from teraio.following.thinned import ThinnedPlans
from teraio.profiling import Iteration, Profile, Region

from ...planner.traces import block, hand, hardware, staged, trace, varying


def profile_of_length(traced: Trace, length: int) -> Profile:
    """Of a run of a graph that takes batches of 3, and then of an optimizer."""
    regions = [Region(identity=SizedGraph(0, (3, length)), first=0), Region(identity="optimizer", first=1)]
    return Profile(trace=traced, iteration=Iteration(number=0, regions=regions), ids={})


def thinned(traced: Trace, made: Plan) -> ThinnedPlans:
    return ThinnedPlans(profile_of_length(traced, 10), made)


def test_the_longest_microbatch_so_far_says_what_moves() -> None:
    whole = varying(hand("chain"), places=(1,))
    made = with_shorter(plan(whole, Budgets(device_bytes=20)), whole, (8, 4))
    follows = thinned(whole, made)

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


def test_blocks_stay_after_four_iterations_as_short_until_longer_inputs_come() -> None:
    blocks = [block(10, [0], [1]), block(10, [2], [2], "optimizer_state")]
    whole = varying(trace(staged("fbo"), blocks, hardware(rate=5.0)), places=(1,))
    made = with_shorter(plan(whole, Budgets(device_bytes=15)), whole, (8, 5))
    follows = thinned(whole, made)

    def iteration(length: int) -> tuple[int | None, list[int]]:
        """How many moves leave, None for all of the plan, and which blocks are overdue."""
        found = follows.schedule_for(SizedGraph(0, (3, length)), begins=True)
        overdue = [number for number, _ in follows.overdue()]
        assert follows.schedule_for("optimizer", begins=False) is found and not follows.overdue()
        return None if found is None else sum(map(len, found.leave_after)), overdue

    assert [iteration(length)[0] for length in (9, 5, 4, 5, 3, 5, 2)] == [None, 1, 1, 1, 1, 0, 0]
    same = Iteration(number=1, regions=[Region(identity=SizedGraph(0, (3, 10)), first=0)])
    assert iteration(10) == (None, [1]) and not follows.is_whole(same), "it began with what had stayed"
    assert iteration(10) == (None, []) and follows.is_whole(same)
    assert [iteration(5)[0] for _ in range(5)] == [1, 1, 1, 1, 0]


def test_a_trace_of_one_length_has_one_plan() -> None:
    whole = varying(hand("chain"), places=(1,))
    made = with_shorter(plan(whole, Budgets(device_bytes=20)), whole, (8, 4))
    for follows in (thinned(whole.rebuilt(lengths=None), made), thinned(whole, plan(whole, Budgets(device_bytes=20)))):
        assert follows.schedule_for(SizedGraph(0, (3, 2)), begins=True) is None
    without = dataclasses.replace(profile_of_length(whole, 10), iteration=Iteration(number=0))
    assert ThinnedPlans(without, made).schedule_for(SizedGraph(0, (3, 2)), begins=True) is None
