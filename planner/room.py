"""How full the lower tiers get: a copy keeps its place until the block dies; a persistent one, for ever."""

from __future__ import annotations

from planner.plan import WaitingTier
from planner.problem import Decisions, Problem

__all__ = ["LowerTiers"]


class LowerTiers:
    """Bytes per lower tier and stage, for tiers with a budget; tiers without one always have room."""

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self._problem = problem
        self._limits = {route.tier: route.budget_bytes for route in problem.routes}
        self._used = {
            tier: [0] * problem.stage_count for tier, limit in self._limits.items() if limit is not None
        }
        self._since: dict[tuple[str, int], int] = {}
        for index, decision in decisions.items():
            self.take(index, decision.tier)

    def fits(self, index: int, tier: WaitingTier) -> bool:
        """Whether the block of a period can wait in `tier` in addition to what is there."""
        limit = self._limits[tier]
        if limit is None:
            return True
        size = self._problem.periods[index].size_bytes
        return all(self._used[tier][stage] + size <= limit for stage in self._new_stages(index, tier))

    def take(self, index: int, tier: WaitingTier) -> None:
        """Note that the block of a period waits in `tier`."""
        if self._limits[tier] is None:
            return
        period = self._problem.periods[index]
        for stage in self._new_stages(index, tier):
            self._used[tier][stage] += period.size_bytes
        key = (tier, period.block)
        self._since[key] = min(period.after, self._since.get(key, period.after))

    def best(self, index: int) -> WaitingTier | None:
        """The fastest tier with room for the block of a period, or None."""
        for route in self._problem.routes:
            if self.fits(index, route.tier):
                return route.tier
        return None

    def _new_stages(self, index: int, tier: str) -> range:
        period = self._problem.periods[index]
        block = self._problem.trace.blocks[period.block]
        since = self._since.get((tier, block.id))
        if block.persistent:
            return range(0 if since is None else self._problem.stage_count, self._problem.stage_count)
        last = block.uses[-1] if since is None else since - 1
        return range(period.after, last + 1)
