"""Takes a kept plan into force once the first iteration has shown that it fits, and keeps the plans that this run makes."""

from __future__ import annotations

import logging

import planner
from runtime.execution import Program
from runtime.paging import Pager
from teraio.machine import Machine
from teraio.optimizer import SubgroupSizes
from teraio.planning.background import BackgroundPlanner
from teraio.planning.plan_cache import KeptPlan, PlanCache, refit
from teraio.profiling import Iteration, IterationRecorder, Profile, recognise

logger = logging.getLogger("teraio")


class WarmStart:
    """Knows which kept plan may fit, from the graph that begins an iteration, see [Note: Warm starts].

    All calls are for the training thread. They wait for the file system and for the replay of a plan.
    """

    def __init__(
        self,
        cache: PlanCache,
        machine: Machine,
        pager: Pager,
        recorder: IterationRecorder,
        background: BackgroundPlanner,
        subgroups: SubgroupSizes,
    ) -> None:
        self._cache = cache
        self._machine = machine
        self._pager = pager
        self._recorder = recorder
        self._background = background
        self._subgroups = subgroups
        self._first: Program | None = None
        self._kept: KeptPlan | None = None
        self._refused: set[str] = set()

    def graph_begins(self, program: Program) -> None:
        """A graph is about to run. If it begins an iteration, look for a plan that was kept for it.

        A plan is for optimizers that are cut into subgroups of a certain size: it is used from the first step on.
        """
        if not self._recorder.iteration_begins or program is self._first:
            return
        self._first = program
        self._kept = self._cache.find(program)
        if self._kept is not None and self._kept.key in self._refused:
            self._kept = None
        if self._kept is not None and self._subgroups.used_bytes is None:
            self._subgroups.used_bytes = self._kept.trace.subgroup_bytes

    def plan_for(self, iteration: Iteration) -> tuple[Profile, planner.Plan] | None:
        """Return the kept plan with its profile, if the iteration that has ended is the one that it is for."""
        kept = self._kept
        if kept is None or not iteration.regions or not iteration.complete:
            return None
        profile = recognise(kept.trace, iteration, fixed_bytes=self._pager.unmoved_bytes)
        if profile is None:
            return None
        self._kept = None
        plan = refit(kept, self._machine.hardware(), self._background.budgets(profile))
        if isinstance(plan, str):
            self._refused.add(kept.key)
            logger.info("the plan of an earlier start is not used: %s", plan)
            return None
        logger.info("the plan of an earlier start fits: nothing is profiled and nothing is solved")
        return profile, plan

    def keep(self, trace: planner.Trace, plan: planner.Plan) -> None:
        """Keep a plan of this run for later starts."""
        if self._first is not None:
            self._cache.keep(self._first, self._machine.hardware(), trace, plan)
