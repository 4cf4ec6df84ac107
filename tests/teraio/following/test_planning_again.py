"""When one rank of a machine plans again, all do, and follow one plan from the same iteration on. Two ranks in virtual time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from planner import Plan, SolverError
from runtime import device as device_module
from teraio.following import PlanInForce
from teraio.options import parse_options
from teraio.planning import BackgroundPlanner
from teraio.ranks import RankGroup, RankPlace

from ..in_process import InstantJob, InstantJobs
from ..virtual import IN, STAGES, VirtualTraining, plan_for

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

SLOW = 9.0
"""Seconds of a copy that no correction makes up for."""


class PendingJobs(InstantJobs):
    """Its jobs go on until the test says that they have ended."""

    def __call__(self, *arguments: Any, **named: Any) -> InstantJob:
        job = super().__call__(*arguments, **named)
        job.done = False
        return job


class Rank:
    """A rank that follows a plan by which weights 2 and 3 leave, although all have room. followed: when another plan came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: dist.Store, rank: int) -> None:
        self._monkeypatch = monkeypatch
        self.training = VirtualTraining(monkeypatch)
        self.jobs = InstantJobs()
        place = RankPlace(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        ranks, given = RankGroup(store, place, timeout_seconds=1.0), parse_options({})
        machine: Any = self.training.mover
        profile = self.training.profile()
        self.background = BackgroundPlanner(given, machine, self.training.pager, start_job=self.jobs, ranks=ranks)
        plan = plan_for(profile.trace, (2, 2), (3, 3))
        self.in_force = PlanInForce(self.training.observer, self.background, profile, plan)
        self.followed: list[int] = []

    def run(self) -> None:
        clock = SimpleNamespace(perf_counter=self.training.mover.perf_counter)
        self._monkeypatch.setattr(device_module, "time", clock)
        iteration = self.training.iteration()
        if self.in_force.iteration_ended(iteration, as_planned=True):
            self.followed.append(iteration.number)

    @property
    def moves(self) -> tuple[Any, ...]:
        return self.in_force.plan.moves


def run(ranks: Sequence[Rank], times: int) -> None:
    """In turns."""
    for _ in range(times):
        for rank in ranks:
            rank.run()


def slowest(rank: Rank, answer: Plan | SolverError | None = None) -> None:
    """Make it the one that plans, with this answer of its solver."""
    rank.jobs.answers = [answer]
    rank.training.stage_seconds = [1.001] * STAGES


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """Two ranks. The copies of rank 1 get slow, those of rank 0 stay as they are."""
    store = dist.HashStore()
    both = [Rank(monkeypatch, store, rank) for rank in range(2)]
    both[1].training.mover.seconds[IN] = SLOW
    return both


@pytest.mark.parametrize(("order", "ahead"), [((0, 1), 0), ((1, 0), 0), ((0, 1), 1)])
def test_all_follow_the_new_plan_from_one_iteration_on(pair: list[Rank], order: tuple[int, int], ahead: int) -> None:
    """Rank 0 alone would plan as before: nothing of it has drifted. ahead: by so many iterations rank 1 is ahead of it.

    With collectives, it is one at the most.
    """
    slowest(pair[1])
    run(pair[1:], ahead)
    run([pair[rank] for rank in order], 20)
    assert [len(rank.jobs.asked) for rank in pair] == [0, 1]
    assert pair[0].followed == pair[1].followed and len(pair[0].followed) == 1
    assert pair[0].moves == pair[1].moves == ()


def test_a_plan_that_takes_long_is_waited_for_by_all(pair: list[Rank]) -> None:
    """The rank whose times drift is not the one that plans: the slowest does. Both go on by the old plan meanwhile."""
    pair[0].background.start_job = jobs = PendingJobs()
    jobs.answers = [None]
    pair[0].training.stage_seconds = [1.001] * STAGES
    for number in range(40):
        for job in jobs.started:
            job.done = number == 30
        run(pair, 1)
        assert not pair[0].followed or number > 30
    assert len(jobs.asked) == 1 and not pair[1].jobs.asked
    assert pair[0].followed == pair[1].followed


def test_the_old_plan_stays_everywhere_if_the_new_one_is_not_better(pair: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    slowest(pair[1], pair[1].in_force.plan)
    with caplog.at_level(logging.INFO, logger="teraio"):
        run(pair, 18)
    assert [rank.followed for rank in pair] == [[], []]
    assert pair[0].moves == pair[1].moves != ()
    assert [rank.in_force._wait for rank in pair] == [20, 20]
    told = [record.message for record in caplog.records if "the old one, which is followed" in record.message]
    assert len(told) == 2 and any("as another rank of this machine plans again" in text for text in told)


def test_a_plan_that_cannot_be_made_leaves_the_old_one_everywhere(pair: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    slowest(pair[1], SolverError("out of luck"))
    run(pair, 18)
    assert [rank.followed for rank in pair] == [[], []] and not any(rank.background.busy for rank in pair)
    told = [record.message for record in caplog.records]
    assert any(text.endswith("old one stays in force: out of luck") for text in told)
    assert any(text.endswith("rank 1 planned for all: out of luck") for text in told)


def test_a_rank_that_runs_other_iterations_is_left_alone(pair: list[Rank]) -> None:
    one, two = pair
    plan = two.in_force.plan
    changed = plan.budgets.model_copy(update={"device_bytes": plan.budgets.device_bytes * 2})
    two.in_force._now = replace(two.in_force._now, plan=plan.model_copy(update={"budgets": changed}))
    two.jobs.answers = [None]
    run(pair, 20)
    assert not one.jobs.asked and not one.followed and len(two.followed) == 1


def test_without_the_store_a_rank_plans_for_itself(
    pair: list[Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*arguments: object) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(pair[1].background.ranks, "_store", SimpleNamespace(check=gone, set=gone, get=gone, add=gone))
    pair[1].jobs.answers = [None]
    run(pair[1:], 20)
    assert len(pair[1].followed) == 1
    assert len([r for r in caplog.records if "this rank plans for itself from now on" in r.message]) == 1
