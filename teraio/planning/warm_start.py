"""Takes a kept plan into force once the first iteration has shown that it fits, and keeps the plans that this run makes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

import planner
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Program
from runtime.paging import Block, Pager
from teraio.machine import Machine
from teraio.planning.background import BackgroundPlanner
from teraio.planning.plan_cache import KeptPlan, PlanCache, refit
from teraio.profiling import FIXED_NAME, Iteration, Profile

logger = logging.getLogger("teraio")

_Signature = tuple[str, str, int, bool, tuple[int, ...]]
"""Name, kind, bytes, whether it can move, and the stages that use it."""


class WarmStart:
    """Knows which kept plan may fit, from the graph that begins an iteration, see [Note: Warm starts].

    All calls are for the training thread. They wait for the file system and for the replay of a plan.
    """

    def __init__(
        self,
        cache: PlanCache,
        machine: Machine,
        pager: Pager,
        background: BackgroundPlanner,
    ) -> None:
        self._cache = cache
        self._machine = machine
        self._pager = pager
        self._background = background
        self._first: Program | None = None
        self._kept: KeptPlan | None = None
        self._refused: set[str] = set()

    def iteration_begins(self, program: Program) -> int | None:
        """A graph that begins an iteration is about to run: look for a plan that was kept for it.

        Return the size in bytes of the subgroups that optimizers have to be cut into for that plan, from the first step on.
        """
        if program is not self._first:
            self._first = program
            self._kept = self._cache.find(program)
            if self._kept is not None and self._kept.key in self._refused:
                self._kept = None
        return self._kept.trace.subgroup_bytes if self._kept is not None else None

    def plan_for(self, iteration: Iteration) -> tuple[Profile, planner.Plan] | None:
        """Return the kept plan with its profile, if the iteration that has ended is the one that it is for."""
        kept = self._kept
        if kept is None or not iteration.regions or not iteration.complete:
            return None
        profile = recognise(kept.trace, iteration, fixed_bytes=self._pager.account.unmoved_bytes)
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


def recognise(trace: planner.Trace, iteration: Iteration, *, fixed_bytes: int) -> Profile | None:
    """Return `trace` as the profile of `iteration`; None unless this ran the same stages over the same blocks.

    Stages are the same by position, name and phase, blocks by name, kind, size and the stages that use them; times do not count.
    In its first iteration an optimizer makes the states that it reads later on: it uses them all the same. fixed_bytes: what
    stays on the device without being a block; may differ by less than the smallest block that moves.
    """
    if [(s.name, s.phase) for s in iteration.stages] != [(s.name, s.phase) for s in trace.stages]:
        return None
    wanted: dict[_Signature, list[int]] = defaultdict(list)
    fixed = 0
    for each in trace.blocks:
        if each.name == FIXED_NAME:
            fixed += each.size_bytes
            continue
        used = _without_user_code(each.uses, trace.stages)
        wanted[each.name, each.kind, each.size_bytes, each.movable, used].append(each.id)
    if abs(fixed - fixed_bytes) >= MIN_MOVED_BYTES:
        return None
    ids: dict[Block, int] = {}
    for block, uses in iteration.uses().items():
        same = wanted.get((block.name, block.kind, block.size_bytes, block.span is not None, uses))
        if not same:
            return None
        ids[block] = same.pop(0)
    return None if any(wanted.values()) else Profile(trace=trace, iteration=iteration, ids=ids)


def _without_user_code(uses: Iterable[int], stages: Sequence[planner.Stage]) -> tuple[int, ...]:
    """Return the uses by stages that were recorded. A trace adds the user code that makes inputs and reads outputs."""
    return tuple(use for use in uses if stages[use].phase != "user")
