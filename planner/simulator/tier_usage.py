"""How full the lower tiers are in a replay."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import InfeasiblePlanError
from planner.schema import Budgets, Trace

__all__ = ["TierUsage"]


class TierUsage:
    """Bytes used in each lower tier.

    A copy has its place from its start until its block dies; in the tiers `lasting` (by block) for good.

    `peak_bytes`: the most bytes that were used, by tier.
    """

    def __init__(self, trace: Trace, budgets: Budgets, lasting: Sequence[frozenset[str]]) -> None:
        self._trace = trace
        self._limits = {"host": budgets.host_bytes, "storage": budgets.storage_bytes}
        self._lasting = lasting
        self._held: list[frozenset[str]] = [frozenset()] * len(trace.blocks)
        self._used = dict.fromkeys(self._limits, 0)
        self.peak_bytes = dict(self._used)
        for block, tiers in enumerate(lasting):
            for tier in tiers:
                self.take(block, tier, stage=0)

    def take(self, block: int, tier: str, *, stage: int) -> None:
        """Record a copy that begins in `stage`, or that is there from the start.

        Raises InfeasiblePlanError where there is no room.
        """
        if tier in self._held[block]:
            return
        self._held[block] |= {tier}
        self._used[tier] += self._trace.blocks[block].size_bytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self._used[tier])
        limit = self._limits[tier]
        if limit is not None and self._used[tier] > limit:
            raise InfeasiblePlanError(
                f"the {tier} tier would hold {self._used[tier]:,} bytes; its budget is {limit:,} bytes: raise "
                f"it, or move fewer blocks (the last was {self._trace.blocks[block].name!r})",
                stage=self._trace.stages[stage].name,
                block=self._trace.blocks[block].name,
            )

    def held(self) -> list[frozenset[str]]:
        """The tiers that each block has a place in, by block."""
        return list(self._held)

    def give_back(self, block: int) -> None:
        """Record that the block has died."""
        for tier in self._held[block] - self._lasting[block]:
            self._used[tier] -= self._trace.blocks[block].size_bytes
        self._held[block] &= self._lasting[block]
