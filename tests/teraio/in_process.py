"""Planning in the process of the tests: no second interpreter that imports the planner for each training."""

from __future__ import annotations

import planner


class InProcessJob:
    """Stands for `teraio.planning.PlanningJob`: plans at once, in the training thread, with the same planner and limits."""

    def __init__(self, trace: planner.Trace, budgets: planner.Budgets, *, time_limit_seconds: float) -> None:
        self.done = True
        self._result: planner.Plan | planner.TeraioError
        try:
            self._result = planner.plan(trace, budgets, time_limit_seconds=time_limit_seconds)
        except planner.TeraioError as error:
            self._result = error

    def wait(self, timeout_seconds: float | None) -> bool:
        return True

    def result(self) -> planner.Plan:
        """Return the plan. Raises the TeraioError that planning ended with."""
        if isinstance(self._result, planner.TeraioError):
            raise self._result
        return self._result

    def cancel(self) -> None:
        """Do nothing: the plan has been made."""
