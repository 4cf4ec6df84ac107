"""One plan for equal ranks: who makes it, from when on all follow it, what happens if that fails. Two ranks in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import planner
from planner import Budgets, Trace
from teraio.planning import background
from teraio.ranks import RankGroup, RankPlace

from ..traces import CHAIN

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

BUDGETS = Budgets(device_bytes=10)


class Rank:
    """A rank with a planner whose plan is ready when the test says so."""

    def __init__(self, store: dist.Store, rank: int, trace: Trace = CHAIN, timeout_seconds: float = 60.0) -> None:
        place = RankPlace(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        self.started, self.ready = False, None
        self.trace = trace
        self.plan = background.RankPlan(
            RankGroup(store, place, timeout_seconds=timeout_seconds),
            trace,
            BUDGETS,
            name="plan",
            start=self._start,
            take=self._take,
            timeout_seconds=timeout_seconds,
        )

    def _start(self) -> None:
        assert not self.started
        self.started = True

    def _take(self) -> planner.Plan | None:
        if isinstance(self.ready, Exception):
            raise self.ready
        return self.ready

    ready: planner.Plan | Exception | None


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def plan_of(trace: Trace) -> planner.Plan:
    return planner.plan(trace, BUDGETS, policy="teraio", lower_bound=False)


def test_a_rank_plans_for_itself_if_the_other_gives_up_or_is_silent(store: dist.Store) -> None:
    one, two = Rank(store, 0), Rank(store, 1)
    one.plan.plan(1), two.plan.plan(1)
    one.plan.cancel()
    two.plan.plan(2)
    assert two.started
    two.ready = plan_of(CHAIN)
    assert two.plan.plan(3) is not None

    other = dist.HashStore()
    one, two = Rank(other, 0), Rank(other, 1, timeout_seconds=0.0)
    one.plan.plan(1), two.plan.plan(1)
    two.plan.plan(2)
    assert two.started


def test_a_plan_that_does_not_fit_here_is_not_followed(store: dist.Store) -> None:
    one, two = Rank(store, 0), Rank(store, 1)
    one.plan.plan(1), two.plan.plan(1)
    made = plan_of(CHAIN)
    one.ready = made.model_copy(update={"moves": made.moves[:1]})
    one.plan.plan(2), two.plan.plan(2)
    assert two.started
