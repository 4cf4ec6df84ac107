"""Around a copy that the iteration waits for, other blocks leave, or the same one at another stage."""

from typing import Any

import pytest

from planner import Budgets, Trace, plan
from planner.problem import Decision, Decisions, Problem
from planner.schedule import Breadth, ReplayedPlan, block_exchanges

from ..strategies import transformer_trace

BROAD = Breadth(others=6, stages=6, leads=(1.0, 0.0), thorough=True)
NARROW = Breadth(others=1, stages=1, leads=(1.0,), thorough=False)


def made_of(seconds: list[float], blocks: list[dict[str, Any]], budget: int, *, out: float = 10.0, workspace: int = 0) -> Problem:
    """Stages of these durations, the third with a workspace, and one lower tier."""
    stages = [
        {"id": s, "name": f"s{s}", "phase": "forward", "duration_seconds": duration, "workspace_bytes": workspace * (s == 2)}
        for s, duration in enumerate(seconds)
    ]
    shown = [{"id": b, "name": f"b{b}", "kind": "activation", "persistent": False, **block} for b, block in enumerate(blocks)]
    links = [
        {"from": "device", "to": "storage", "bytes_per_second": out},
        {"from": "storage", "to": "device", "bytes_per_second": 10.0},
    ]
    machine = {"name": "made up", "device_memory_bytes": 1000, "links": links}
    trace = Trace.model_validate({"name": "made up", "hardware": machine, "stages": stages, "blocks": shown})
    return Problem.of(trace, Budgets(device_bytes=budget))


def seconds(problem: Problem, decisions: Decisions) -> float:
    return ReplayedPlan.of(problem, decisions).timeline.iteration_seconds


def exchanged(problem: Problem, decisions: Decisions, breadth: Breadth = BROAD) -> list[Decisions]:
    return list(block_exchanges(ReplayedPlan.of(problem, decisions), breadth))


def test_a_small_block_leaves_instead_of_a_large_one_where_little_is_missing() -> None:
    """Stage 2 lacks 2 bytes. The program takes 1 s for that; the block of 10 bytes takes 5 s out, the one of 5 bytes 2.5 s."""
    blocks = [
        {"size_bytes": 10, "writes": [0], "reads": [1, 3]},
        {"size_bytes": 10, "writes": [1], "reads": [2], "dies_after": 3},
        {"size_bytes": 5, "writes": [1], "reads": [3]},
    ]
    problem = made_of([2.0, 1.0, 2.0, 2.0], blocks, 28, out=2.0, workspace=5)
    assert [period.block for period in problem.periods] == [0, 1, 2]
    large = {0: Decision(tier="storage", leave=1, start=3)}
    small = {2: Decision(tier="storage", leave=1, start=2)}
    assert seconds(problem, large) == pytest.approx(13.0)
    assert seconds(problem, small) == pytest.approx(10.0)
    for breadth in (BROAD, NARROW):
        assert any(found.keys() == {2} for found in exchanged(problem, large, breadth))
    made = plan(problem.source, problem.budgets)
    assert made.predicted is not None and made.predicted.iteration_seconds == pytest.approx(10.0)


def test_a_copy_out_comes_later_where_another_one_is_more_urgent() -> None:
    """Block 0 occupies the link from stage 0 to 3. Block 1 must be out before stage 2; block 0 has time until stage 4."""
    blocks = [
        {"size_bytes": 30, "writes": [0], "reads": [9]},
        {"size_bytes": 10, "writes": [0], "reads": [9]},
        {"size_bytes": 10, "writes": [2], "reads": [3]},
        {"size_bytes": 40, "writes": [6], "reads": [7]},
    ]
    problem = made_of([1.0] * 10, blocks, 40)
    first = {0: Decision(tier="storage", leave=0, start=8), 1: Decision(tier="storage", leave=0, start=9)}
    found = exchanged(problem, first)
    later = [each for each in found if each.keys() == {0, 1} and each[0].leave > 0]
    assert later and min(seconds(problem, each) for each in later) < seconds(problem, first)


def test_another_block_is_away_as_well_so_that_the_copy_in_can_begin_earlier() -> None:
    """Block 0 is needed in stage 3, and there is no room for it in stage 2 as long as block 1 stays."""
    blocks = [
        {"size_bytes": 20, "writes": [0], "reads": [3]},
        {"size_bytes": 10, "writes": [0], "reads": [4]},
        {"size_bytes": 20, "writes": [1], "reads": [2]},
    ]
    problem = made_of([1.0, 5.0, 5.0, 3.0, 1.0], blocks, 40)
    first = {0: Decision(tier="storage", leave=0, start=3)}
    found = exchanged(problem, first)
    both = [each for each in found if each.keys() == {0, 1}]
    assert both and min(seconds(problem, each) for each in both) < seconds(problem, first)


def test_a_copy_made_in_an_earlier_period_is_still_valid() -> None:
    """Block 0 leaves between stages 2 and 5. With a copy made in stage 1, stage 3 need not wait for it."""
    blocks = [
        {"size_bytes": 10, "writes": [0], "reads": [2, 5]},
        {"size_bytes": 10, "writes": [3], "reads": [4]},
    ]
    problem = made_of([1.0, 2.0, 1.0, 1.0, 1.0, 1.0], blocks, 19)
    periods = {(period.after, period.before): index for index, period in enumerate(problem.periods)}
    first = {periods[2, 5]: Decision(tier="storage", leave=2, start=5)}
    found = [each for each in exchanged(problem, first) if each.keys() == {periods[0, 2], periods[2, 5]}]
    assert found and seconds(problem, found[0]) == seconds(problem, first) - 1.0


def test_all_variants_can_be_carried_out_and_some_are_better() -> None:
    trace = transformer_trace(layers=2, stages_per_layer=4, rate=2e9)
    most = max(Problem.of(trace, Budgets(device_bytes=1 << 40)).live_bytes)
    problem = Problem.of(trace, Budgets(device_bytes=most // 2))
    made = plan(trace, problem.budgets, policy="belady", lower_bound=False)
    decisions = {
        problem.period_after[move.block, move.after]: Decision(
            tier=move.tier,
            leave=move.offload.start if move.offload else move.after,
            start=move.prefetch.start if move.prefetch else move.before,
        )
        for move in made.moves
    }
    found = exchanged(problem, decisions)
    assert len(found) > 50
    assert all(max(problem.occupancy(each)) <= problem.budgets.device_bytes for each in found)
    assert min(seconds(problem, each) for each in found) < seconds(problem, decisions)


def test_nothing_is_exchanged_where_nothing_waits() -> None:
    problem = made_of([1.0] * 5, [{"size_bytes": 10, "writes": [0], "reads": [4]}], 10)
    assert exchanged(problem, {}) == []
    assert exchanged(problem, {0: Decision(tier="storage", leave=0, start=2)}) == []
