"""A replay ends as soon as an iteration ends as it began; what comes then would be the same."""

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Trace, plan, simulate
from planner.simulator.replay import Replay
from planner.simulator.standing import Standing, same
from planner.simulator.timeline import agree

from ..strategies import random_plan, training_problems

simulation = importlib.import_module("planner.simulator.simulate")


@pytest.fixture
def iterations() -> Iterator[mock.Mock]:
    with mock.patch.object(Replay, "one_iteration", autospec=True, side_effect=Replay.one_iteration) as counted:
        yield counted


def test_what_must_be_the_same() -> None:
    one = Standing(what=("device", ()), seconds=(1.0,))
    assert same(one, Standing(what=("device", ()), seconds=(1.0 + 1e-12,)), 1.0)
    assert not same(one, Standing(what=("device", ()), seconds=(1.0 + 1e-6,)), 1.0)
    assert not same(one, Standing(what=("away", ()), seconds=(1.0,)), 1.0)
    assert not same(one, Standing(what=("device", ()), seconds=()), 1.0)


@given(training_problems(), st.integers(0, 99))
def test_more_iterations_are_the_same(case: tuple[Trace, Budgets], seed: int) -> None:
    trace, budgets = case
    try:
        made = random_plan(trace, budgets, random.Random(seed))
        found = simulate(trace, made)
    except InfeasiblePlanError:
        return
    with mock.patch.object(simulation, "same", return_value=False):
        longer = simulate(trace, made)
    assert agree(found, longer)
    assert found.peak_bytes == longer.peak_bytes and found.moved_bytes == longer.moved_bytes


def test_how_many_iterations_are_replayed(iterations: mock.Mock) -> None:
    """Without moves one; with a copy that is under way between iterations one more, because the first begins without it."""
    trace = Trace.load(Path(__file__).parents[3] / "traces" / "hand" / "wrap.json")
    stays = plan(trace, Budgets(device_bytes=10**6), policy="keep-all")
    moves = plan(trace, Budgets(device_bytes=20), policy="belady")
    for made, count in ((stays, 1), (moves, 2)):
        iterations.reset_mock()
        simulate(trace, made)
        assert iterations.call_count == count
