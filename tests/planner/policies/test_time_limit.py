"""The time limit bounds planning as a whole: what there is then counts."""

from __future__ import annotations

from typing import Any

import pytest

from planner import Trace, plan
from planner.ilp import MAX_INTEGER_STAGES, coarse_solutions
from planner.lp import solve_program
from planner.policies import POLICIES
from planner.problem import Problem, SolverSettings, out_of_time, seconds_left, time_limit
from tests.planner.problem.test_repeats import budgets
from tests.planner.traces import microbatches, replay, transformer_trace


@pytest.mark.parametrize("traced", [microbatches(4), transformer_trace(layers=4, states=True)], ids=lambda each: each.name)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("keep-all", "host-updates", "stride-2")])
def test_without_time_there_is_a_plan(policy: str, traced: Trace) -> None:
    given = budgets(traced, 0.2)
    made = plan(traced, given, policy=policy, time_limit_seconds=1e-9)
    assert made.solver.status == "time limit" and made.predicted is not None and made.predicted.lower_bound_seconds > 0
    replay(traced, made)


@pytest.mark.parametrize("passes", [4, 11])
def test_what_ends_an_integer_program_is_counted(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, one program of a short iteration would take all the time, and leave none to make its solution exact."""
    most: list[int | None] = []

    def counted(*given: Any, linear: bool, max_nodes: int | None = None, **more: Any) -> Any:
        most.extend([] if linear else [max_nodes])
        return solve_program(*given, linear=linear, max_nodes=max_nodes, **more)

    monkeypatch.setattr("planner.ilp.coarse.solve_program", counted)
    traced = microbatches(passes)
    assert (len(traced.stages) <= MAX_INTEGER_STAGES) == (passes == 4)
    assert list(coarse_solutions(Problem.of(traced, budgets(traced, 0.2)), SolverSettings())) and most
    assert all(each is not None and each <= 100 for each in most)


def test_limits_nest() -> None:
    assert not out_of_time() and seconds_left() == float("inf")
    with time_limit(0.0), time_limit(100.0):
        assert out_of_time() and seconds_left() == 0.0
    with time_limit(100.0):
        assert not out_of_time() and 0 < seconds_left() <= 100.0
    assert not out_of_time()
