"""The owner of planning jobs: starts them, gives their plans to the phase that waits for one, ends them."""

from __future__ import annotations

from dataclasses import dataclass

import planner
from runtime.paging import Pager
from teraio.machine import Machine
from teraio.options import Options
from teraio.planning.job import Job, PlanningJob, StartJob
from teraio.profiling import Profile, states_that_stay


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """A plan and the trace that it was made for."""

    trace: planner.Trace
    plan: planner.Plan


class BackgroundPlanner:
    """Makes plans while training goes on, at most one at a time.

    start_job: starts a job; tests give one that plans at once. All calls are for the training thread, but `wait` is for any.
    """

    def __init__(self, options: Options, machine: Machine, pager: Pager, *, start_job: StartJob = PlanningJob) -> None:
        self._options = options
        self._machine = machine
        self._pager = pager
        self._start_job = start_job
        self._job: Job | None = None
        self._trace: planner.Trace | None = None

    def budgets(self, profile: Profile) -> planner.Budgets:
        """Return what a plan for this profile may use of each tier.

        Optimizer states that always stay in a lower tier are in no trace. The bytes that they take there are subtracted.
        """
        taken = states_that_stay(self._pager.blocks, profile.ids)
        host, storage = self._machine.host_bytes, self._options.storage_budget
        return planner.Budgets(
            device_bytes=self._pager.budget_bytes or 0,
            host_bytes=None if host is None else max(host - taken["host"], 0),
            storage_bytes=None if storage is None else max(storage - taken["storage"], 0),
        )

    @property
    def busy(self) -> bool:
        """True from `start` until the plan is taken or the job is cancelled."""
        return self._job is not None

    def start(self, trace: planner.Trace, budgets: planner.Budgets) -> None:
        """Start to plan for `trace`. Never waits for the plan. Cancels a job that has not been taken."""
        self.cancel()
        self._trace = trace
        self._job = self._start_job(trace, budgets, time_limit_seconds=self._options.solver_time_limit)

    def take(self) -> PlanMade | None:
        """Return the plan if it is ready, else None. Afterwards there is no job. Never waits.

        Raises the TeraioError that planning ended with.
        """
        job, trace = self._job, self._trace
        if job is None or trace is None or not job.done:
            return None
        self._job = self._trace = None
        return PlanMade(trace=trace, plan=job.result())

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until no plan is being made, or until the time is over. Return whether none is. For any thread."""
        job = self._job
        return True if job is None else job.wait(timeout_seconds)

    def cancel(self) -> None:
        """End the job, if there is one. Waits until its solver has ended."""
        if self._job is not None:
            self._job.cancel()
        self._job = self._trace = None
