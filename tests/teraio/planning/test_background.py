"""The owner of planning jobs: one job at a time, taken once, cancelled when it is no longer wanted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planner import Budgets, SolverError
from teraio.machine import ResolvedBudgets
from teraio.options import parse_options
from teraio.planning import BackgroundPlanner
from teraio.profiling import Profile

from ..instant_jobs import InstantJobs
from ..virtual import STAGES, VirtualTraining, plan_for

BUDGETS = Budgets(device_bytes=1)


class Rig:
    """An owner over jobs that end at once, or when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, host: int | None = None, storage: int | None = None) -> None:
        self.training = VirtualTraining(monkeypatch)
        self.profile: Profile = self.training.profile()
        self.trace = self.profile.trace
        self.plan = plan_for(self.trace, (6, 6))
        self.jobs = InstantJobs()
        machine: Any = SimpleNamespace(host_bytes=host, budgets=ResolvedBudgets(storage=storage))
        self.background = BackgroundPlanner(parse_options({}), machine, self.training.pager, start_job=self.jobs)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_without_a_job_there_is_nothing_to_wait_for_or_to_take(rig: Rig) -> None:
    assert not rig.background.busy and rig.background.wait(0.0) and rig.background.take() is None
    rig.background.cancel()


def test_a_plan_is_taken_once_with_the_trace_that_it_is_for(rig: Rig) -> None:
    rig.jobs.answers = [rig.plan]
    rig.background.start(rig.trace, BUDGETS)
    assert rig.background.busy and rig.background.wait(0.0)
    made = rig.background.take()
    assert made is not None and made.trace is rig.trace and made.plan == rig.plan
    assert not rig.background.busy and rig.background.take() is None


def test_a_job_that_goes_on_is_not_taken(rig: Rig) -> None:
    rig.jobs.answers = [rig.plan]
    rig.background.start(rig.trace, BUDGETS)
    rig.jobs.started[0].done = False
    assert rig.background.take() is None and rig.background.busy and not rig.background.wait(0.0)


def test_a_failure_is_raised_once(rig: Rig) -> None:
    rig.jobs.answers = [SolverError("out of luck")]
    rig.background.start(rig.trace, BUDGETS)
    with pytest.raises(SolverError, match="out of luck"):
        rig.background.take()
    assert not rig.background.busy and rig.background.take() is None


def test_there_is_one_job_at_a_time(rig: Rig) -> None:
    rig.jobs.answers = [rig.plan, rig.plan]
    rig.background.start(rig.trace, BUDGETS)
    rig.background.start(rig.trace, BUDGETS)
    first, second = rig.jobs.started
    assert first.cancelled and not second.cancelled
    rig.background.cancel()
    assert second.cancelled and not rig.background.busy


def test_budgets_leave_out_states_that_always_stay_in_a_lower_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, host=1000, storage=50)
    device_bytes = STAGES * rig.trace.blocks[0].size_bytes
    assert rig.background.budgets(rig.profile) == Budgets(device_bytes=device_bytes, host_bytes=1000, storage_bytes=50)
    for weight, tier in zip(rig.training.weights, ("host", "host", "storage"), strict=False):
        weight.kind, weight.tier, weight.slot = "optimizer_state", tier, SimpleNamespace(size_bytes=64)  # type: ignore
        del rig.profile.ids[weight]
    assert rig.background.budgets(rig.profile) == Budgets(device_bytes=device_bytes, host_bytes=872, storage_bytes=0)


def test_without_lower_tiers_nothing_limits_them(rig: Rig) -> None:
    budgets = rig.background.budgets(rig.profile)
    assert budgets.host_bytes is None and budgets.storage_bytes is None
