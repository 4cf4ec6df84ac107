"""How full the lower tiers get. A copy keeps its place until the block dies; the copy of a persistent block keeps it for good.

All blocks of subgroups that update on the host keep their place in the host tier for good.
"""

from __future__ import annotations

from planner.problem.problem import Decisions, Problem, Route
from planner.schema import WaitingTier

__all__ = ["TierCapacity"]


class TierCapacity:
    """Bytes used in each lower tier and stage, for tiers with a budget. Tiers without one always have room."""

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self._problem = problem
        self._limits = {route.tier: route.budget_bytes for route in problem.routes}
        self._used = {tier: [0] * problem.stage_count for tier, limit in self._limits.items() if limit is not None}
        self._since: dict[tuple[str, int], int] = {}
        self._busy_seconds = dict.fromkeys(self._limits, 0.0)
        for block in problem.host_blocks:
            self._since["host", block.id] = 0
            for stage in range(problem.stage_count if "host" in self._used else 0):
                self._used["host"][stage] += block.size_bytes
        for index, decision in decisions.items():
            self.take(index, decision.tier)

    def fits(self, index: int, tier: WaitingTier) -> bool:
        """Whether the block of a period can wait in `tier` in addition to the blocks that are there."""
        limit = self._limits[tier]
        if tier != "host" and self._problem.host_only(index):
            return False
        if limit is None:
            return True
        size = self._problem.periods[index].size_bytes
        stages = self._new_stages(index, tier)
        return not stages or max(self._used[tier][stages.start : stages.stop]) + size <= limit

    def take(self, index: int, tier: WaitingTier) -> None:
        """Record that the block of a period waits in `tier`."""
        self._busy_seconds[tier] += self._inward_seconds(index, self._problem.route(tier))
        if self._limits[tier] is None:
            return
        period = self._problem.periods[index]
        for stage in self._new_stages(index, tier):
            self._used[tier][stage] += period.size_bytes
        key = (tier, period.block)
        self._since[key] = min(period.after, self._since.get(key, period.after))

    def best(self, index: int) -> WaitingTier | None:
        """Return the fastest tier with room for the block of a period, or None."""
        for route in self._problem.routes_of(index):
            if self.fits(index, route.tier):
                return route.tier
        return None

    def least_busy(self, index: int) -> WaitingTier | None:
        """Return the tier with room whose link inward would be busy for the shortest total time with this block, or None."""
        fitting = [route for route in self._problem.routes_of(index) if self.fits(index, route.tier)]
        if not fitting:
            return None
        return min(fitting, key=lambda r: self._busy_seconds[r.tier] + self._inward_seconds(index, r)).tier

    def _inward_seconds(self, index: int, route: Route) -> float:
        return route.inward.seconds(self._problem.periods[index].size_bytes)

    def _new_stages(self, index: int, tier: str) -> range:
        period = self._problem.periods[index]
        block = self._problem.trace.blocks[period.block]
        since = self._since.get((tier, block.id))
        if block.persistent:
            return range(0 if since is None else self._problem.stage_count, self._problem.stage_count)
        last = block.last_stage if since is None else since - 1
        return range(period.after, last + 1)
