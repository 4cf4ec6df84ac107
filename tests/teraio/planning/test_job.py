"""Planning in the background: a process of its own, which may fail, be slow or be cancelled without harm; and its owner."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import planner
from planner import Budgets, SolverError
from teraio.machine import ResolvedBudgets
from teraio.options import parse_options
from teraio.planning import BackgroundPlanner, PlanningJob
from teraio.planning import background as planning
from teraio.profiling import Profile
from teraio.ranks import RankGroup, RankPlace

from ...planner.traces import varying
from ..in_process import InstantJobs
from ..traces import CHAIN
from ..virtual import STAGES, VirtualTraining, plan_for


def job(device_bytes: int = 20, **limits: float) -> PlanningJob:
    return PlanningJob(CHAIN, Budgets(device_bytes=device_bytes), **{"time_limit_seconds": 10.0, **limits})


def refusal(work: PlanningJob, kind: type[planner.TeraioError] = SolverError) -> str:
    """Wait until it has failed."""
    assert work.wait(60) and work.done
    with pytest.raises(kind) as raised:
        work.result()
    return str(raised.value)


def test_a_plan() -> None:
    threads = threading.active_count()
    work = job()
    began = time.monotonic()
    assert not work.wait(0.0) and time.monotonic() - began < 5
    assert work.wait(60) and work.done
    plan = work.result()
    assert plan.trace_fingerprint == CHAIN.fingerprint and plan.budgets.device_bytes == 20
    assert [move.block for move in plan.moves] == [0]
    planner.simulate(CHAIN, plan)
    work.cancel()
    assert work.result() is plan and threading.active_count() == threads


def test_a_known_plan_is_thinned_and_not_made_again() -> None:
    trace = varying(CHAIN)
    by_hand = planner.plan(trace, Budgets(device_bytes=20), policy="belady")
    work = PlanningJob(trace, by_hand.budgets, time_limit_seconds=10.0, known=by_hand)
    assert work.wait(60) and work.result() == planner.with_shorter(by_hand, trace) != by_hand


def test_no_plan_is_possible() -> None:
    assert "needs 10 B at once" in refusal(job(9))


Replace = Callable[[str], list[subprocess.Popen[str]]]
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def replaced_by(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """The planning process runs some code instead. Returns the processes that are started."""
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def replace(code: str) -> list[subprocess.Popen[str]]:
        def start(command: list[str], **arguments: Any) -> subprocess.Popen[str]:
            started.append(real([sys.executable, "-c", code], **arguments))
            return started[-1]

        monkeypatch.setattr(planning.subprocess, "Popen", start)
        return started

    return replace


@pytest.mark.parametrize("at_once", [False, True])
def test_cancelling_leaves_no_process_and_no_file(
    at_once: bool, replaced_by: Replace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What lies in the folder for temporary files would stay if the process is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = replaced_by(SLEEPS)
    work = job()
    while not started and not at_once:
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())
    work.cancel()
    assert work.done and all(process.poll() is not None for process in started)
    refusal(work)


def test_a_solver_that_does_not_come_back(replaced_by: Replace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_GRACE_SECONDS", 0.2)
    (started, work) = replaced_by(SLEEPS), job(time_limit_seconds=0.1)
    assert "solver_time_limit" in refusal(work) and started[0].poll() is not None


def test_a_process_that_dies_or_writes_no_plan(replaced_by: Replace) -> None:
    replaced_by("import sys; sys.exit('out of memory')")
    assert "out of memory" in refusal(job())
    replaced_by("")
    refusal(job(), planner.TeraioError)


@pytest.mark.parametrize(
    ("where", "what", "message"), [(planning.subprocess, "Popen", "could not be started"), (Path, "write_text", "allocate")]
)
def test_a_process_that_cannot_be_started_or_given_the_trace(
    where: Any, what: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(where, what, refuse)
    assert message in refusal(job())


# -- the owner of planning jobs: one job at a time, taken once, cancelled when it is no longer wanted

BUDGETS = Budgets(device_bytes=1)


class Rig:
    """An owner over jobs that end at once, or when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, host: int | None = None, storage: int | None = None) -> None:
        self.training = VirtualTraining(monkeypatch)
        self.profile: Profile = self.training.profile()
        self.trace = self.profile.trace
        self.jobs = InstantJobs()
        self.jobs.answers = [plan_for(self.trace, (6, 6)), plan_for(self.trace, (6, 6))]
        machine: Any = SimpleNamespace(host_bytes=host, budgets=ResolvedBudgets(storage=storage))
        self.background = BackgroundPlanner(parse_options({}), machine, self.training.pager, start_job=self.jobs)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_plan_is_taken_once_with_the_trace_that_it_is_for(rig: Rig) -> None:
    """Before there is a job, there is nothing to wait for or to take. One that goes on is not taken."""
    assert not rig.background.busy and rig.background.wait(0.0) and rig.background.take() is None
    rig.background.cancel()
    rig.background.start(rig.trace, BUDGETS)
    rig.jobs.started[0].done = False
    assert rig.background.take() is None and rig.background.busy and not rig.background.wait(0.0)
    rig.jobs.started[0].done = True
    assert rig.background.busy and rig.background.wait(0.0)
    made = rig.background.take()
    assert made is not None and made[0] is rig.trace and made[1] == plan_for(rig.trace, (6, 6))
    assert not rig.background.busy and rig.background.take() is None


def test_there_is_one_job_at_a_time(rig: Rig) -> None:
    rig.background.start(rig.trace, BUDGETS)
    rig.background.start(rig.trace, BUDGETS)
    first, second = rig.jobs.started
    assert first.cancelled and not second.cancelled
    rig.background.cancel()
    assert second.cancelled and not rig.background.busy


def test_budgets_leave_out_states_that_always_stay_in_a_lower_tier(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    without = rig.background.budgets(rig.profile)
    assert without.host_bytes is None and without.storage_bytes is None, "without lower tiers nothing limits them"
    rig = Rig(monkeypatch, host=1000, storage=50)
    device_bytes = STAGES * rig.trace.blocks[0].size_bytes
    assert rig.background.budgets(rig.profile) == Budgets(device_bytes=device_bytes, host_bytes=1000, storage_bytes=50)
    for weight, tier in zip(rig.training.weights, ("host", "host", "storage"), strict=False):
        weight.kind, weight.tier, weight.slot = "optimizer_state", tier, SimpleNamespace(size_bytes=64)  # type: ignore
        del rig.profile.ids[weight]
    assert rig.background.budgets(rig.profile) == Budgets(device_bytes=device_bytes, host_bytes=872, storage_bytes=0)


# -- one plan for equal ranks: what happens if it fails where it is made. Two ranks in one process


class Rank:
    """A rank with a planner whose plan, `ready`, is there when the test says so."""

    def __init__(self, store: dist.Store, rank: int, seconds: float = 60.0) -> None:
        group = RankGroup(store, RankPlace(rank=rank, world_size=2, local_rank=rank, local_world_size=2), timeout_seconds=seconds)
        self.started, self.ready = False, None
        functions: Any = {"start": self._start, "take": lambda: self.ready}
        self.plan = planning.RankPlan(group, CHAIN, Budgets(device_bytes=10), name="plan", timeout_seconds=seconds, **functions)

    ready: planner.Plan | None

    def _start(self) -> None:
        assert not self.started
        self.started = True


@pytest.fixture
def ranks() -> Callable[..., tuple[Rank, Rank]]:
    """Makes two that have begun to plan."""
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")

    def make(*seconds: float) -> tuple[Rank, Rank]:
        store = dist.HashStore()
        made = Rank(store, 0), Rank(store, 1, *seconds)
        for rank in made:
            rank.plan.plan(1)
        return made

    return make


def test_a_rank_plans_for_itself_if_the_other_gives_up_or_is_silent(ranks: Callable[..., tuple[Rank, Rank]]) -> None:
    one, two = ranks()
    one.plan.cancel()
    two.plan.plan(2)
    assert two.started
    two.ready = planner.plan(CHAIN, Budgets(device_bytes=10), policy="teraio", lower_bound=False)
    assert two.plan.plan(3) is not None

    _, two = ranks(0.0)
    two.plan.plan(2)
    assert two.started


def test_a_plan_that_does_not_fit_here_is_not_followed(ranks: Callable[..., tuple[Rank, Rank]]) -> None:
    one, two = ranks()
    made = planner.plan(CHAIN, Budgets(device_bytes=10), policy="teraio", lower_bound=False)
    one.ready = made.model_copy(update={"moves": made.moves[:1]})
    one.plan.plan(2), two.plan.plan(2)
    assert two.started
