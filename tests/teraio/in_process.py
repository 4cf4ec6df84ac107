"""Planning in the process of the tests: at once by the real planner, or by jobs that have ended with what a test says."""

from __future__ import annotations

import sys

import pytest

import planner
from planner import Budgets, Plan, TeraioError, Trace


class InstantJob:
    """Stands for `teraio.planning.PlanningJob`: a job that has ended as soon as it is started."""

    def __init__(self, trace: Trace, answer: Plan | TeraioError) -> None:
        self.done = True
        self.cancelled = False
        self._trace = trace
        self._answer = answer

    def result(self) -> Plan:
        if isinstance(self._answer, Plan):
            return self._answer.model_copy(update={"trace_fingerprint": self._trace.fingerprint})
        raise self._answer

    def wait(self, timeout_seconds: float | None) -> bool:
        return self.done

    def cancel(self) -> None:
        self.cancelled = True


class InProcessJob(InstantJob):
    """Plans at once, in the training thread, with the same planner and limits.

    No second interpreter imports the planner for each training, and no plan is searched for longer than that of a very long
    iteration would be: a training must follow what it gets, and how good that is, the planner's own tests tell.
    """

    def __init__(self, trace: Trace, budgets: Budgets, *, time_limit_seconds: float, known: Plan | None = None) -> None:
        answer: Plan | TeraioError
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["planner.policies.effort"], "_BY_STAGES", ())
            try:
                made = known or planner.plan(trace, budgets, time_limit_seconds=time_limit_seconds)
                answer = planner.with_shorter(made, trace)
            except TeraioError as error:
                answer = error
        super().__init__(trace, answer)


class InstantJobs:
    """Starts jobs: the next of `answers` is what one ends with, None for a real plan; `asked`: what they were asked for."""

    def __init__(self) -> None:
        self.answers: list[Plan | TeraioError | None] = []
        self.asked: list[Trace] = []
        self.started: list[InstantJob] = []

    def __call__(self, trace: Trace, budgets: Budgets, *, time_limit_seconds: float, known: Plan | None = None) -> InstantJob:
        self.asked.append(trace)
        answer = self.answers.pop(0)
        if answer is None:
            job: InstantJob = InProcessJob(trace, budgets, time_limit_seconds=time_limit_seconds, known=known)
        else:
            job = InstantJob(trace, answer)
        self.started.append(job)
        return job
