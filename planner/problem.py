"""What every policy works on: trace and budgets with all that follows from them, and decisions per period."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.errors import BudgetError
from planner.lifetimes import InactivePeriod, inactive_periods, live_bytes, stage_floors
from planner.plan import Budgets, Move, Offload, Placement, Plan, Prefetch, WaitingTier
from planner.trace import Link, Trace

__all__ = ["Decision", "Decisions", "Problem", "Route", "build_plan", "copies_out", "in_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A usable lower tier with its two links and its budget (None: no limit)."""

    tier: WaitingTier
    outward: Link
    inward: Link
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One period's move: leaves after stage `leave`, prefetch queued when stage `start` is reached.

    `leave` is in [after, before), `start` in (leave, before]; both run on over the iteration's end.
    """

    tier: WaitingTier
    leave: int
    start: int


Decisions = dict[int, Decision]
"""Period index (in `Problem.periods`) → decision; a period without one stays on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A trace and budgets under which every stage can run, and what follows from them.

    `live_bytes[s]`: device bytes during stage s if nothing leaves. `covering[s]`: periods that s lies in.
    `routes`: usable lower tiers, fastest (to copy in) first.
    """

    trace: Trace
    budgets: Budgets
    periods: tuple[InactivePeriod, ...]
    routes: tuple[Route, ...]
    live_bytes: tuple[int, ...]
    covering: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, trace: Trace, budgets: Budgets) -> Problem:
        """Raises BudgetError when the device budget is below what one stage needs."""
        routes = _routes(trace, budgets)
        live = live_bytes(trace)
        floors = stage_floors(trace) if routes else live
        worst = max(range(len(floors)), key=floors.__getitem__)
        if floors[worst] > budgets.device_bytes:
            raise BudgetError(
                smallest_bytes=floors[worst],
                budget_bytes=budgets.device_bytes,
                stage=trace.stages[worst].name,
            )
        periods = inactive_periods(trace) if routes else ()
        covering: list[list[int]] = [[] for _ in trace.stages]
        for index, period in enumerate(periods):
            for stage in range(period.after + 1, period.before):
                covering[stage % len(trace.stages)].append(index)
        return cls(
            trace=trace,
            budgets=budgets,
            periods=periods,
            routes=routes,
            live_bytes=tuple(live),
            covering=tuple(tuple(indices) for indices in covering),
        )

    @property
    def stage_count(self) -> int:
        """Number of stages in the iteration."""
        return len(self.trace.stages)

    @property
    def everything_fits(self) -> bool:
        """Whether the device holds all blocks at all times."""
        return max(self.live_bytes) <= self.budgets.device_bytes

    def route(self, tier: WaitingTier) -> Route:
        """The route of a usable tier."""
        return next(route for route in self.routes if route.tier == tier)

    def occupancy(self, decisions: Decisions) -> list[int]:
        """Device bytes per stage: a block counts until it leaves and again from its prefetch's start on.

        When this is within the budget at every stage, the plan cannot deadlock: copies out always end, and
        then everything that was queued fits.
        """
        stages = self.stage_count
        change = [0] * (stages + 1)
        for index, decision in decisions.items():
            size = self.periods[index].size_bytes
            first, end = decision.leave + 1, decision.start
            if first >= end:
                continue
            first, end = (first - stages, end - stages) if first >= stages else (first, end)
            change[first] -= size
            if end <= stages:
                change[end] += size
            else:
                change[0] -= size
                change[end - stages] += size
        occupied, total = [], 0
        for live, delta in zip(self.live_bytes, change, strict=False):
            total += delta
            occupied.append(live + total)
        return occupied


def _routes(trace: Trace, budgets: Budgets) -> tuple[Route, ...]:
    routes = []
    tiers: tuple[tuple[WaitingTier, int | None], ...] = (
        ("host", budgets.host_bytes),
        ("storage", budgets.storage_bytes),
    )
    for tier, limit in tiers:
        outward, inward = trace.hardware.link("device", tier), trace.hardware.link(tier, "device")
        if outward is not None and inward is not None and limit != 0:
            routes.append(Route(tier=tier, outward=outward, inward=inward, budget_bytes=limit))
    return tuple(sorted(routes, key=lambda route: -route.inward.bytes_per_second))


def in_units(problem: Problem, unit_seconds: float) -> Problem:
    """The same problem with the links' rates and latencies per `unit_seconds`; the trace is left as it is."""
    routes = []
    for route in problem.routes:
        outward, inward = (
            link.model_copy(
                update={
                    "bytes_per_second": link.bytes_per_second * unit_seconds,
                    "latency_seconds": link.latency_seconds / unit_seconds,
                }
            )
            for link in (route.outward, route.inward)
        )
        routes.append(replace(route, outward=outward, inward=inward))
    return replace(problem, routes=tuple(routes))


def copies_out(problem: Problem, decisions: Decisions) -> set[int]:
    """Periods whose move must copy out: the first of each block, epoch and tier. Others find a valid copy."""
    first: dict[tuple[int, int, str], int] = {}
    for index in decisions:
        period = problem.periods[index]
        if period.frozen:
            continue
        key = (period.block, period.epoch, decisions[index].tier)
        if key not in first or problem.periods[first[key]].rank > period.rank:
            first[key] = index
    return set(first.values())


def build_plan(problem: Problem, decisions: Decisions, *, policy: str) -> Plan:
    """The plan that carries out `decisions`, not yet with predictions; earliest deadlines first."""
    dirty = copies_out(problem, decisions)
    stages = problem.stage_count
    initial = {block.id: "device" for block in problem.trace.blocks if block.persistent}
    moves = []
    for index, decision in decisions.items():
        period = problem.periods[index]
        leave = decision.leave if index in dirty else period.after
        moves.append(
            Move(
                block=period.block,
                after=period.after,
                before=period.before,
                tier=decision.tier,
                offload=Offload(start=leave, free_after=leave) if index in dirty else None,
                prefetch=Prefetch(start=decision.start, ready_by=period.before),
            )
        )
        if leave < stages <= decision.start:
            initial[period.block] = decision.tier
    moves.sort(key=lambda move: (move.prefetch.start % stages, _deadline(move, stages), move.block))
    return Plan(
        trace_fingerprint=problem.trace.fingerprint,
        policy=policy,
        budgets=problem.budgets,
        moves=tuple(moves),
        initial=tuple(
            Placement.model_validate({"block": block, "tier": tier}) for block, tier in initial.items()
        ),
    )


def _deadline(move: Move, stages: int) -> int:
    """The stage before which the block must be back, counted on from the stage where the prefetch starts."""
    return move.before - move.prefetch.start + move.prefetch.start % stages
