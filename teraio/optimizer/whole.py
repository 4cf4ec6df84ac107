"""Optimizer steps that cannot be cut: all that they touch is brought in first and held until they are done.

Where that does not fit, the step reads and writes what is not on the device through its stand-in, slower; on a GPU it is
refused, since what waits on a drive has none.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch.optim import Optimizer

from planner.errors import BudgetError
from runtime.device import Mark
from runtime.execution import StageRun
from runtime.paging import Pager
from runtime.system import annotate
from teraio.optimizer.states import OptimizerStates
from teraio.optimizer.subgroups import OptimizerParts, Part
from teraio.profiling import IterationRecorder

_NAME = "optimizer/whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A step under way: what is held for it, and since when it runs."""

    optimizer: weakref.ref[Optimizer]
    part: Part
    begin: Mark
    annotation: AbstractContextManager[object]


class WholeSteps:
    """Holds the blocks of one step at a time between the step's hooks."""

    def __init__(self, pager: Pager, timeline: IterationRecorder, states: OptimizerStates, parts: OptimizerParts) -> None:
        self._pager = pager
        self._timeline = timeline
        self._states = states
        self._parts = parts
        self._held: _Held | None = None

    def begin(self, optimizer: Optimizer, reason: str) -> None:
        """Bring in all that the step will touch, if it fits. Blocks meanwhile.

        reason: why it is not cut. Raises BudgetError on a GPU where it does not fit.
        """
        part = self._parts.whole(optimizer, self._parts.updates(optimizer))
        with self._pager.device.region():
            self._pager.enter_region()
            try:
                if not self._fits(part, f"optimizer/{type(optimizer).__name__}, which is not updated by parts because {reason},"):
                    return
                self._timeline.region_begins(("optimizer", id(optimizer)), 1)
                fetch = self._timeline.stage_reached()
                self._pager.acquire(part.read, part.workspace_bytes, _NAME, then_fetch=fetch)
            finally:
                self._pager.leave_region()
        annotation = annotate("update", _NAME)
        self._held = _Held(optimizer=weakref.ref(optimizer), part=part, begin=self._pager.device.mark(), annotation=annotation)
        annotation.__enter__()

    def _fits(self, part: Part, what: str) -> bool:
        budget = self._pager.budget_bytes
        needed, _ = self._parts.largest([part])
        if budget is None or needed <= budget:
            return True
        if self._pager.device.asynchronous:
            raise BudgetError(smallest_bytes=needed, budget_bytes=budget, stage=what)
        return False

    def end(self, optimizer: Optimizer) -> None:
        """The step is done: record it, let go of what was held. Blocks until nothing of it is being copied."""
        held = self._held
        if held is None or held.optimizer() is not optimizer:
            return
        self._held = None
        part, end = held.part, self._pager.device.mark()
        held.annotation.__exit__(None, None, None)
        with self._pager.device.region():
            try:
                made = self._states.made(optimizer, part.numbers, part.read)
            finally:
                self._pager.retire(part.read, part.read, last_used=part.states)
            self._timeline.stage_ended(
                StageRun(
                    name=_NAME,
                    phase="optimizer",
                    begin=held.begin,
                    end=end,
                    workspace_bytes=part.temporary_bytes,
                    elements=part.elements,
                    read=[block for block in part.read if not block.dead],  # an update may put new tensors in place of states
                    made=made,
                    written=[block for block in part.written if not block.dead],
                )
            )
            self._timeline.region_ended()
            self._pager.leave_region()

    def give_up(self) -> None:
        """The step has failed, or runs compiled regions of its own: hold nothing for it any more. Never blocks."""
        held, self._held = self._held, None
        if held is not None:
            held.annotation.__exit__(None, None, None)
            self._pager.retire(held.part.read, held.part.read)
            self._timeline.region_ended()
