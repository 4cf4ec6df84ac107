"""One plan for all ranks of a machine that run the same iteration: one makes it, all follow it from the same iteration on.

The rank with the slowest stages plans, with what it has measured itself, since it waits least for others. These get its plan if
their iterations have the same stages and blocks and nearly the same budgets; a rank with other ones plans for itself. All is told
through the store, at the ends of iterations, so no rank waits for another one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import planner
from planner.errors import InfeasiblePlanError, PlanError, RankError, SolverError
from teraio.ranks import RankGroup

logger = logging.getLogger("teraio")

_LOOKS = 3  # ends of iterations at which a rank looks for others that want the same plan. Later ones get it all the same.
_AHEAD = 2  # iterations from the end of planning until all ranks follow the plan, so that each has heard of it


class RankPlan:
    """A plan in the making for this rank and all equal ones.

    name: the same on all of them, and never used before. start, take: start to plan on this rank, and return the plan once there
    is one, as `BackgroundPlanner` does. timeout_seconds: after which this rank plans for itself.
    """

    def __init__(
        self,
        ranks: RankGroup,
        trace: planner.Trace,
        budgets: planner.Budgets,
        *,
        name: str,
        start: Callable[[], None],
        take: Callable[[], planner.Plan | None],
        timeout_seconds: float,
    ) -> None:
        self._ranks, self._trace, self._budgets, self._name = ranks, trace, budgets, name
        self._start, self._take = start, take
        self._ends = time.monotonic() + timeout_seconds
        self._state: Literal["asking", "leading", "following", "alone"] = "asking"
        self._looks = 0
        self._made: planner.Plan | None = None
        self._from = 0
        # Without user code and collectives, in which ranks wait for slower ones.
        stages = [stage for stage in trace.stages if stage.phase != "user"]
        seconds = sum(stage.duration_seconds - stage.collective_seconds for stage in stages)
        with self._safely():
            ranks.tell(f"asks for {name}", repr(seconds))
            ranks.call(name)

    def plan(self, iteration: int) -> planner.Plan | None:
        """Return the plan if it is to be followed after this iteration, which has ended. Never waits.

        Raises the TeraioError that planning ended with, here or on the rank that plans for all.
        """
        if self._made is None:
            with self._safely():
                if self._state == "asking":
                    self._look()
                if self._state == "leading":
                    self._lead(iteration)
                elif self._state == "following":
                    self._follow()
                elif self._state == "alone":
                    self._made, self._from = self._take(), iteration
        return self._made if self._made is not None and iteration >= self._from else None

    def cancel(self) -> None:
        """Give up. If others wait for this rank's plan, they plan for themselves."""
        if self._state == "leading" and self._made is None:
            with self._safely():
                self._give(None, 0)

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Plan alone from now on if the others can no longer be talked to within the block."""
        try:
            yield
        except RankError as error:
            self._alone(str(error))

    def _alone(self, reason: str) -> None:
        logger.warning("this rank plans for itself: %s", reason)
        if self._state not in ("leading", "alone"):
            self._start()
        self._state = "alone"

    def _look(self) -> None:
        """Find out who wants the same plan; the slowest makes it."""
        self._looks += 1
        told = {rank: self._ranks.told(f"asks for {self._name}", rank) for rank in self._ranks.ranks}
        seconds = {rank: float(text) for rank, text in told.items() if text is not None}
        if len(seconds) < len(told) and self._looks < _LOOKS:
            return
        # What the slowest has measured holds for all: it waits least for others.
        slowest = max(seconds, key=lambda rank: (seconds[rank], -rank))
        if slowest == self._ranks.rank and self._ranks.first(self._name):
            self._state = "leading"
            self._start()
            logger.info("rank %d plans for ranks %s", slowest, ", ".join(map(str, seconds)))
            if len(seconds) < len(told):
                others = ", ".join(str(rank) for rank in told if rank not in seconds)
                logger.warning(
                    "of this machine, ranks %s have not asked for the same plan: they run other iterations, have other budgets, "
                    "or are late",
                    others,
                )
        else:
            self._state = "following"

    def _lead(self, iteration: int) -> None:
        try:
            made = self._take()
        except planner.TeraioError as error:
            self._ranks.tell(f"makes {self._name}", json.dumps({"problem": str(error)}))
            raise
        if made is not None:
            self._made, self._from = made, iteration + _AHEAD
            self._give(made, self._from)

    def _give(self, made: planner.Plan | None, first: int) -> None:
        plan = None if made is None else base64.b64encode(zlib.compress(made.model_dump_json().encode())).decode()
        self._ranks.tell(f"makes {self._name}", json.dumps({"plan": plan, "from": first}))

    def _follow(self) -> None:
        for rank in self._ranks.ranks:
            text = self._ranks.told(f"makes {self._name}", rank)
            if text is None:
                continue
            found = json.loads(text)
            if "problem" in found:
                raise SolverError(f"rank {rank} planned for all: {found['problem']}")
            if found["plan"] is None:
                self._alone(f"rank {rank} gave up planning")
                return
            self._adopt(rank, zlib.decompress(base64.b64decode(found["plan"])).decode(), found["from"])
            return
        if time.monotonic() > self._ends:
            self._alone("no other rank has made the plan in time")

    def _adopt(self, rank: int, text: str, first: int) -> None:
        made = planner.Plan.model_validate_json(text, strict=True)
        made = made.model_copy(update={"trace_fingerprint": self._trace.fingerprint, "budgets": self._budgets})
        try:
            planner.simulate(self._trace, made)
        except (InfeasiblePlanError, PlanError) as error:
            self._alone(f"the plan of rank {rank} cannot be carried out here: {error}")
            return
        self._made, self._from = made, first


def signature_of(trace: planner.Trace, budgets: planner.Budgets) -> str:
    """Return a text that is the same for ranks that can follow one plan: no times, no rates, budgets to two digits."""
    content = {
        "stages": [(stage.name, stage.phase) for stage in trace.stages],
        "blocks": [block.model_dump(mode="json") for block in trace.blocks],
        "subgroups": [(each.stage, each.blocks, each.elements, each.host_seconds is None) for each in trace.subgroups],
        "recompute": [(each.stage, each.blocks, each.reads) for each in trace.recompute],
        "links": sorted(link.name for link in trace.hardware.links),
        "budgets": [None if size is None else f"{size:.1e}" for size in budgets.model_dump().values()],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
