"""Optimizer steps that cannot be cut: all blocks that they touch are brought in first, and stay until the step is done.

Where that does not fit, the step reads and writes what is not on the device through its mapping into the lower tiers, which is
slower. On a GPU it is refused, since blocks on a drive have no such mapping.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from planner.errors import BudgetError
from runtime.device import Mark
from runtime.execution import StageRun
from runtime.paging import Pager
from runtime.system import annotate
from teraio.following import IterationObserver
from teraio.optimizer.managed import ManagedOptimizer
from teraio.optimizer.parameters import owned_parameters
from teraio.optimizer.subgroups import ParameterSubgroup

_NAME = "optimizer/whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningStep:
    """A step that runs: whose it is, what is held for it, and since when it runs."""

    managed: ManagedOptimizer
    subgroup: ParameterSubgroup
    begin: Mark
    annotation: AbstractContextManager[object]


class WholeSteps:
    """Holds the blocks of one step at a time between the step's hooks."""

    def __init__(self, pager: Pager, recorder: IterationObserver) -> None:
        self._pager = pager
        self._recorder = recorder
        self._running: _RunningStep | None = None

    def begin(self, managed: ManagedOptimizer, reason: str) -> None:
        """Bring in all that the step will touch, if it fits. Waits for it.

        reason: why the step is not cut. Raises BudgetError on a GPU where it does not fit.
        """
        subgroup = managed.subgroups.whole(managed.pending_step())
        needed, _ = managed.subgroups.smallest_budget([subgroup])
        what = f"optimizer/{type(managed.optimizer).__name__}, which is updated as a whole because {reason},"
        with self._pager.device.region():
            self._pager.enter_region()
            try:
                if not self._fits(needed, what):
                    return
                self._recorder.region_begins(managed.identity, 1)
                fetch = self._recorder.stage_reached()
                self._pager.acquire(subgroup.read, subgroup.workspace_bytes, _NAME, then_fetch=fetch)
            finally:
                self._pager.leave_region()
        annotation, begin = annotate("update", _NAME), self._recorder.mark()
        self._running = _RunningStep(managed=managed, subgroup=subgroup, begin=begin, annotation=annotation)
        annotation.__enter__()

    def _fits(self, needed: int, what: str) -> bool:
        budget = self._pager.budget_bytes
        if budget is None or needed <= budget:
            return True
        if self._pager.device.asynchronous:
            raise BudgetError(smallest_bytes=needed, budget_bytes=budget, stage=what)
        return False

    def end(self, managed: ManagedOptimizer) -> bool:
        """Record the step that is done, and let go of its blocks. Return whether it was that of `managed`.

        Waits until no state of it is being copied.
        """
        running = self._running
        if running is None or running.managed is not managed:
            return False
        self._running = None
        subgroup, end = running.subgroup, self._recorder.mark()
        running.annotation.__exit__(None, None, None)
        with self._pager.device.region():
            try:
                parameters = owned_parameters(managed.optimizer)
                made = managed.states.made([parameters[number] for number in subgroup.numbers], subgroup.read)
            finally:
                self._pager.retire(subgroup.read, subgroup.read, last_used=subgroup.states)
            self._recorder.stage_ended(
                StageRun(
                    name=_NAME,
                    phase="optimizer",
                    begin=running.begin,
                    end=end,
                    workspace_bytes=subgroup.temporary_bytes,
                    elements=subgroup.elements,
                    read=[block for block in subgroup.read if not block.dead],  # an update may replace states by new tensors
                    made=made,
                    written=[block for block in subgroup.written if not block.dead],
                )
            )
            self._recorder.region_ended()
            self._pager.leave_region()
        return True

    def give_up(self) -> None:
        """Let go of the blocks: the step has failed, or runs compiled regions of its own. Never waits."""
        running, self._running = self._running, None
        if running is not None:
            running.annotation.__exit__(None, None, None)
            self._pager.retire(running.subgroup.read, running.subgroup.read)
            self._recorder.region_ended()
