"""Replays of plans with re-runs give the numbers that are worked out by hand."""

from typing import Any

import pytest

from planner import InfeasiblePlanError, Plan, PlanError, Recompute, Trace, recomputed, simulate
from planner.problem import folded
from planner.simulator import critical_path

from ..recompute_traces import layers
from .test_simulate import made, move


def again(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    return [{"group": group, "at": at} for group, at in pairs]


def replayed(trace: Trace, budget: int, moves: list[dict[str, Any]], pairs: list[dict[str, int]]) -> Any:
    return simulate(trace, made(trace, budget, moves, recompute=pairs))


def test_a_re_run_takes_its_time_and_the_dropped_block_no_memory() -> None:
    trace = layers()
    timeline = replayed(trace, 31, [], again((0, 5)))
    assert timeline.iteration_seconds == pytest.approx(7.0)
    assert timeline.peak_bytes["device"] == 30 and timeline.moved_bytes == {}
    assert len(timeline.stages) == 7 and timeline.stall_seconds == 0.0
    with pytest.raises(InfeasiblePlanError):
        replayed(trace, 31, [], [])


def test_a_dropped_block_and_the_one_made_anew_both_may_move() -> None:
    # Derived stages: 0 1 2 | 3 4=forward/0 5=backward/1 6=backward/0. The new a0 waits in storage during stage 5.
    trace = layers()
    timeline = replayed(trace, 31, [move(0, 4, 6, 6)], again((0, 4)))
    assert timeline.moved_bytes == {"device->storage": 10, "storage->device": 10}
    assert {transfer.block for transfer in timeline.transfers} == {0}, "ids are those of the trace"
    assert timeline.iteration_seconds == pytest.approx(7.0 + 1.0)


def test_a_move_of_the_input_of_a_re_run() -> None:
    # a0 waits in storage until forward/1 runs again before backward/1: uses 0, 1, then derived stage 4.
    trace = layers()
    timeline = replayed(trace, 31, [move(0, 1, 4, 4)], again((1, 4)))
    assert timeline.iteration_seconds == pytest.approx(7.0 + 2.0)  # stage 2 waits for the copy out, the re-run for the copy in
    assert [transfer.block for transfer in timeline.transfers] == [0, 0]


def test_moves_must_fit_the_uses_with_re_runs() -> None:
    trace = layers()
    with pytest.raises(InfeasiblePlanError, match="between stages 1 and 5, which are not consecutive uses"):
        replayed(trace, 40, [move(0, 1, 5, 5)], again((0, 5)))
    with pytest.raises(PlanError, match="recomputes group 7"):
        replayed(trace, 40, [], again((7, 5)))
    other = made(layers(4), 40, [], recompute=again((0, 5)))
    with pytest.raises(PlanError, match="made for trace"):
        simulate(trace, other)


def test_a_plan_of_the_derived_trace_and_its_folded_form_are_replayed_alike() -> None:
    trace = layers()
    pairs = (Recompute(group=0, at=4),)
    derived = recomputed(trace, pairs)
    plan = Plan.model_validate(made(derived, 31, [move(4, 4, 6, 6)]).model_dump())
    one, other = simulate(derived, plan), simulate(trace, folded(trace, pairs, plan))
    assert one.stages == other.stages and one.iteration_seconds == other.iteration_seconds
    path = critical_path(trace, folded(trace, pairs, plan), other)
    assert sum(path.seconds().values()) == pytest.approx(other.iteration_seconds)
