"""What follows from decisions: how full the lower tiers get, which moves copy out, and the plan that carries them out."""

from __future__ import annotations

from collections.abc import Iterator

from planner.problem.host_updates import gradients
from planner.problem.problem import Decision, Decisions, Problem, Route
from planner.schema import Move, Offload, Placement, Plan, Prefetch, Update, WaitingTier


class TierCapacity:
    """Bytes used in each lower tier and stage, for tiers with a budget. Tiers without one always have room.

    A copy keeps its place until the block dies; the copy of a persistent block keeps it for good. All blocks of subgroups that
    update on the host keep their place in the host tier for good.
    """

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self._problem = problem
        most = max(problem.live_bytes) + sum(block.size_bytes for block in problem.host_blocks)  # no tier ever holds more
        limits = {route.tier: route.budget_bytes for route in problem.routes}
        self._limits = {tier: None if limit is None or most <= limit else limit for tier, limit in limits.items()}
        self._used = {tier: [0] * problem.stage_count for tier, limit in self._limits.items() if limit is not None}
        self._most = dict.fromkeys(self._used, 0)  # at any stage
        self._since: dict[tuple[str, int], int] = {}
        self._busy_seconds = dict.fromkeys(self._limits, 0.0)
        for block in problem.host_blocks:
            self._since["host", block.id] = 0
            if "host" in self._used:
                self._fill("host", range(problem.stage_count), block.size_bytes)
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
        if self._most[tier] + size <= limit:
            return True
        stages = self._new_stages(index, tier)
        return not stages or max(self._used[tier][stages.start : stages.stop]) + size <= limit

    def take(self, index: int, tier: WaitingTier) -> None:
        """Record that the block of a period waits in `tier`."""
        self._busy_seconds[tier] += self._inward_seconds(index, self._problem.route(tier))
        if self._limits[tier] is None:
            return
        period = self._problem.periods[index]
        self._fill(tier, self._new_stages(index, tier), period.size_bytes)
        key = (tier, period.block)
        self._since[key] = min(period.after, self._since.get(key, period.after))

    def _fill(self, tier: WaitingTier, stages: range, size_bytes: int) -> None:
        used = self._used[tier]
        for stage in stages:
            used[stage] += size_bytes
            self._most[tier] = max(self._most[tier], used[stage])

    def best(self, index: int) -> WaitingTier | None:
        """Return the fastest tier with room for the block of a period, or None."""
        return next((route.tier for route in self._problem.routes_of(index) if self.fits(index, route.tier)), None)

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


def copies_out(problem: Problem, decisions: Decisions) -> set[int]:
    """Return the periods whose move must copy out: the first of each block, epoch and tier. The others find a valid copy."""
    first: dict[tuple[int, int, str], int] = {}
    for index in decisions:
        period = problem.periods[index]
        if period.read_only:
            continue
        key = (period.block, period.epoch, decisions[index].tier)
        if key not in first or problem.periods[first[key]].rank > period.rank:
            first[key] = index
    return set(first.values())


def decisions_of(problem: Problem, plan: Plan) -> Decisions:
    """Return the decisions that the moves of a plan carry out, as far as the problem has their periods."""
    decisions: Decisions = {}
    for move in plan.moves:
        index = problem.period_after.get((move.block, move.after))
        if index is not None:  # gradients of updates on the host have none
            start = move.before if move.prefetch is None else move.prefetch.start
            decisions[index] = Decision(tier=move.tier, leave=move.leaves, start=start)
    return decisions


def build_plan(problem: Problem, decisions: Decisions, *, policy: str) -> Plan:
    """Build the plan that carries out `decisions`, without predictions. Moves with earlier deadlines come first."""
    dirty = copies_out(problem, decisions)
    stages = problem.stage_count
    moves = [move for number in problem.on_host for move in _gradient_moves(problem, number)]
    initial = {block.id: "device" for block in problem.trace.blocks if block.persistent}
    for index, decision in decisions.items():
        period = problem.periods[index]
        leave = decision.leave if index in dirty else period.after
        moves.append(
            Move.model_construct(
                block=period.block,
                after=period.after,
                before=period.before,
                tier=decision.tier,
                offload=Offload.model_construct(start=leave, free_after=leave) if index in dirty else None,
                prefetch=None if period.final else Prefetch.model_construct(start=decision.start, ready_by=period.before),
            )
        )
        if leave < stages <= decision.start and not period.final:
            initial[period.block] = decision.tier
    moves.sort(key=lambda move: _queue_order(move, stages, dies=problem.trace.blocks[move.block].dies_after is not None))
    return Plan(
        trace_fingerprint=problem.source.fingerprint,
        policy=policy,
        budgets=problem.budgets,
        moves=tuple(moves),
        initial=tuple(Placement.model_validate({"block": block, "tier": tier}) for block, tier in initial.items()),
        updates=tuple(Update(subgroup=number, where="host") for number in problem.on_host),
    )


def _gradient_moves(problem: Problem, number: int) -> Iterator[Move]:
    """Out after the last use before the update, and never back."""
    subgroup = problem.source.subgroups[number]
    for block in gradients(problem.source, subgroup):
        after = problem.trace.blocks[block.id].uses[-1]
        leave = problem.gradient_leaves.get(block.id, after)
        yield Move(
            block=block.id,
            after=after,
            before=subgroup.stage,
            tier="host",
            offload=Offload(start=leave, free_after=leave),
            prefetch=None,
        )


def _queue_order(move: Move, stages: int, *, dies: bool) -> tuple[int, int, int]:
    """Order by the stage at which the prefetch starts, then by the stages from there until the block must be back.

    A block that does not come back goes out first if an update waits for it, and last if it only dies.
    """
    if move.prefetch is None:
        return stages if dies else -1, 0, move.block
    start = move.prefetch.start
    return start % stages, move.before - start + start % stages, move.block
