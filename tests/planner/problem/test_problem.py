"""What follows from a trace and budgets."""

from __future__ import annotations

import gc

import pytest

from planner import Budgets
from planner.problem import Problem, live_bytes, without_collections

from ..traces import hand


@pytest.mark.parametrize("name", ["chain", "wrap", "gradient_outlives_update", "recompute"])
def test_periods_around_each_stage(name: str) -> None:
    """Also those that go on over the iteration's end."""
    made = hand(name)
    problem = Problem.of(made, Budgets(device_bytes=max(live_bytes(made))))
    inside = [range(period.after + 1, period.before) for period in problem.periods]
    assert any(inside)
    for stage in range(problem.stage_count):
        wanted = [index for index, stages in enumerate(inside) if {stage, stage + problem.stage_count} & {*stages}]
        assert problem.covering(stage) == wanted


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_searched_for_again_after_planning_if_it_was_before(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError), without_collections():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
