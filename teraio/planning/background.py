"""The owner of planning jobs: starts them, gives their plans to the phase that waits for one, ends them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import planner
from planner.errors import RankError
from runtime.paging import Pager
from teraio.machine import Machine
from teraio.options import Options
from teraio.planning.job import Job, PlanningJob, StartJob
from teraio.planning.rank_plan import RankPlan, signature_of
from teraio.profiling import Profile
from teraio.ranks import RankGroup

logger = logging.getLogger("teraio")

# Takes a plan that was made, and returns the one to follow. May raise a TeraioError.
Choose = Callable[[planner.Plan], planner.Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """A plan and the trace that it was made for."""

    trace: planner.Trace
    plan: planner.Plan


def _as_made(plan: planner.Plan) -> planner.Plan:
    return plan


class BackgroundPlanner:
    """Makes plans while training goes on, at most one at a time.

    start_job: starts a job; tests give one that plans at once. ranks: of this machine; equal ones get one plan, which one of them
    makes. All calls are for the training thread, but `wait` is for any.
    """

    def __init__(
        self,
        options: Options,
        machine: Machine,
        pager: Pager,
        *,
        start_job: StartJob = PlanningJob,
        ranks: RankGroup | None = None,
    ) -> None:
        self._options = options
        self._machine = machine
        self._pager = pager
        self._start_job = start_job
        self._job: Job | None = None
        self._trace: planner.Trace | None = None
        self._ranks = ranks
        self._shared: RankPlan | None = None
        self._asked: dict[str, int] = {}
        self._signed: tuple[planner.Trace, str] | None = None
        self._choose: Choose = _as_made

    def budgets(self, profile: Profile) -> planner.Budgets:
        """Return what a plan for this profile may use of each tier."""
        # Optimizer states that always stay in a lower tier, see [Note: Updates by slices], are in no trace: their slots are
        # not free.
        taken = {"host": 0, "storage": 0}
        for block in self._pager.blocks:
            if block.kind == "optimizer_state" and block not in profile.ids and block.slot is not None and block.tier is not None:
                taken[block.tier] += block.slot.size_bytes
        host, storage = self._machine.host_bytes, self._machine.budgets.storage
        return planner.Budgets(
            device_bytes=self._pager.account.budget_bytes or 0,
            host_bytes=None if host is None else max(host - taken["host"], 0),
            storage_bytes=None if storage is None else max(storage - taken["storage"], 0),
        )

    @property
    def busy(self) -> bool:
        """True from `start` until the plan is taken or the job is cancelled."""
        return self._job is not None or self._shared is not None

    def start(self, trace: planner.Trace, budgets: planner.Budgets, choose: Choose = _as_made) -> None:
        """Start to plan for `trace`, once for all equal ranks of this machine. Cancels a job that has not been taken.

        Never waits for the plan. `take` has to be called at the end of each iteration then: it tells and asks the other ranks.
        choose: decides on the rank that plans, for all of them.
        """
        self.cancel()
        self._trace, self._choose = trace, choose
        if self._ranks is None:
            self._start_job_for(trace, budgets)
            return
        name, signature = self._next_name(trace, budgets)
        self._asked[signature] = self._asked.get(signature, 0) + 1
        self._shared = RankPlan(
            self._ranks,
            trace,
            budgets,
            name=name,
            start=lambda: self._start_job_for(trace, budgets),
            take=self._take_job,
            timeout_seconds=self._options.rank_timeout,
        )

    def wanted(self, trace: planner.Trace, budgets: planner.Budgets) -> bool:
        """Return whether another rank that runs the same iteration has started to plan, and this one has not. Never waits."""
        if self._ranks is None or self.busy:
            return False
        try:
            return self._ranks.called(self._next_name(trace, budgets)[0])
        except RankError as error:
            self._ranks = None
            logger.warning("this rank plans for itself from now on: %s", error)
            return False

    def _next_name(self, trace: planner.Trace, budgets: planner.Budgets) -> tuple[str, str]:
        """Return the name of the next plan for such iterations, the same on all ranks that run them, and their signature."""
        if self._signed is None or self._signed[0] is not trace:
            self._signed = (trace, signature_of(trace, budgets))
        signature = self._signed[1]
        return f"plan {self._asked.get(signature, 0) + 1} of {signature}", signature

    def _start_job_for(self, trace: planner.Trace, budgets: planner.Budgets) -> None:
        self._job = self._start_job(trace, budgets, time_limit_seconds=self._options.solver_time_limit)

    def take(self) -> PlanMade | None:
        """Return the plan if it is ready, else None. Afterwards there is no job. Never waits.

        Raises the TeraioError that planning ended with.
        """
        trace = self._trace
        try:
            plan = self._take_job() if self._shared is None else self._shared.plan(self._pager.iteration)
        except planner.TeraioError:
            self._shared = self._trace = None
            raise
        if plan is None or trace is None:
            return None
        self._shared = self._trace = None
        return PlanMade(trace=trace, plan=plan)

    def _take_job(self) -> planner.Plan | None:
        """Return the plan of this rank's job if it is ready; there is no job then. Raises as `take` does."""
        job = self._job
        if job is None or not job.done:
            return None
        self._job = None
        return self._choose(job.result())

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until no plan is being made on this rank, or until the time is over. Return whether none is. For any thread."""
        job = self._job
        return True if job is None else job.wait(timeout_seconds)

    def cancel(self) -> None:
        """End the job, if there is one. Waits until its solver has ended."""
        if self._shared is not None:
            self._shared.cancel()
        if self._job is not None:
            self._job.cancel()
        self._job = self._trace = self._shared = None
