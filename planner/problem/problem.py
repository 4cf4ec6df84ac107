"""What every policy works on: settings, a trace and budgets with all that follows from them, and one decision for each period."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from planner.errors import BudgetError, format_bytes
from planner.problem.host_updates import device_iteration, host_bytes, host_updatable, movable_blocks, parameters
from planner.problem.lifetimes import InactivePeriod, bytes_by_stage, inactive_periods, live_bytes, stage_floors, worst_of
from planner.problem.shared_limits import SharedLimit, shared_limits
from planner.schema import Block, Budgets, Link, Subgroup, Tier, Trace, WaitingTier

_UNITS_PER_ITERATION = 100.0
DEFAULT_GAP = 0.005
DEFAULT_THREADS = 2
DEFAULT_TIME_LIMIT_SECONDS = 120.0
DEFAULT_WRITE_WEIGHT = 0.005
# Seconds of iteration time that one second of copying is worth where nothing wears out: of equal plans, the one that moves
# less wins.
TIE_WEIGHT = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverSettings:
    """Settings of one planning run, see `planner.plan`. `time_limit_seconds`: of processor time, for all of it."""

    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    gap: float = DEFAULT_GAP
    threads: int = DEFAULT_THREADS
    write_weight: float = DEFAULT_WRITE_WEIGHT


def outward_weight(tier: WaitingTier, write_weight: float) -> float:
    """Return the seconds of iteration time that one second of copying out to `tier` is worth.

    Drives wear out, host memory does not.
    """
    return write_weight if tier == "storage" else TIE_WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A usable lower tier with its two links and its budget (None: no limit)."""

    tier: WaitingTier
    outward: Link
    inward: Link
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The move of one period: the block leaves after stage `leave`; its prefetch is queued when stage `start` is reached.

    `leave` is in [after, last_leave] and `start` in (leave, before]; both are numbered on over the iteration's end. In a final
    period `start` is `before`, and there is no prefetch.
    """

    tier: WaitingTier
    leave: int
    start: int


# Period index (in `Problem.periods`) → decision. The block of a period without a decision stays on the device.
Decisions = dict[int, Decision]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A trace and budgets under which every stage can run, and what follows from them.

    `source`: the whole trace. `on_host`: subgroups that update on the host, in this order. `trace`: the iteration that is
    left for the device then. `live_bytes[s]`: device bytes during stage s if nothing leaves. `routes`: usable lower tiers,
    the fastest to copy in first. `shared`: what their links can carry together. `updated`: subgroup by period, for periods
    around an update on the host of the period's block. Such a period always has a decision: the block waits in the host tier.
    `host_blocks`: movable blocks of subgroups that update on the host, with their whole size. They have their place in the
    host tier for good, and wait in no other tier. `gradient_leaves`: by block, the stage at whose end a gradient of such a
    subgroup leaves, if that is later than right after its last use; `live_bytes` includes it until then. `border`: the tier
    of each persistent block when the iteration begins, where that is given: decisions must agree with it. `unit_seconds`: of
    `routes` and `shared`, see `in_units`; the trace counts time in seconds.
    """

    source: Trace
    on_host: tuple[int, ...]
    trace: Trace
    budgets: Budgets
    periods: tuple[InactivePeriod, ...]
    routes: tuple[Route, ...]
    shared: tuple[SharedLimit, ...]
    live_bytes: tuple[int, ...]
    updated: dict[int, int]
    host_blocks: tuple[Block, ...]
    gradient_leaves: dict[int, int] = field(default_factory=dict)
    border: Mapping[int, Tier] | None = None
    unit_seconds: float = 1.0

    @classmethod
    def of(
        cls, source: Trace, budgets: Budgets, on_host: Sequence[int] = (), border: Mapping[int, Tier] | None = None
    ) -> Problem:
        """Build the problem. Raises BudgetError when the device budget is below what one stage needs.

        on_host: ids of `host_updatable` subgroups. Does not check that their blocks fit into the host tier.
        """
        trace = device_iteration(source, on_host)
        routes = _routes(trace, budgets)
        live = live_bytes(trace)
        alone = stage_floors(trace)
        smallest, worst = worst_of(alone if routes else live)
        if smallest > budgets.device_bytes:
            why = "" if routes else f"as nothing can leave without a lower tier (with one, {format_bytes(max(alone))} would do)"
            name = trace.stages[worst].name
            raise BudgetError(smallest_bytes=smallest, budget_bytes=budgets.device_bytes, stage=name, why=why)
        periods = inactive_periods(trace) if routes else ()
        if border is not None:  # what is on the device then stays there around it
            periods = tuple(p for p in periods if p.final or p.before < len(trace.stages) or border[p.block] != "device")
        return cls(
            source=source,
            on_host=tuple(on_host),
            trace=trace,
            budgets=budgets,
            periods=periods,
            routes=routes,
            shared=shared_limits(trace.hardware, [link for route in routes for link in (route.outward, route.inward)]),
            live_bytes=tuple(live),
            updated=_updated(source, periods, on_host),
            host_blocks=tuple(block for number in on_host for block in movable_blocks(source, source.subgroups[number])),
            border=border,
        )

    @property
    def stage_count(self) -> int:
        """Number of stages in the iteration."""
        return len(self.trace.stages)

    @cached_property
    def ends(self) -> np.ndarray:
        """`after`, `before` and `final` of all periods, as three rows."""
        return np.array([(period.after, period.before, period.final) for period in self.periods], dtype=int).reshape(-1, 3).T

    def covering(self, stage: int) -> list[int]:
        """Return the periods that contain a stage, ascending."""
        after, before, _ = self.ends
        found: list[int] = np.flatnonzero(np.where(after < stage, stage, stage + self.stage_count) < before).tolist()
        return found

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """What was worked out from the problem and may be asked for again, by what was asked."""
        return {}

    @cached_property
    def period_after(self) -> dict[tuple[int, int], int]:
        """Period index by block and the use that the period follows, as moves name it."""
        return {(period.block, period.after): index for index, period in enumerate(self.periods)}

    @cached_property
    def periods_of(self) -> dict[int, list[int]]:
        """Period indices by block, for blocks that have some."""
        found: dict[int, list[int]] = {}
        for index, period in enumerate(self.periods):
            found.setdefault(period.block, []).append(index)
        return found

    @cached_property
    def _host_only(self) -> frozenset[int]:
        return frozenset(block.id for block in self.host_blocks)

    @property
    def everything_fits(self) -> bool:
        """Whether the device holds all blocks at all times and runs all updates."""
        return not self.on_host and max(self.live_bytes) <= self.budgets.device_bytes

    def route(self, tier: WaitingTier) -> Route:
        """Return the route of a usable tier."""
        return next(route for route in self.routes if route.tier == tier)

    @cached_property
    def may_update_on_host(self) -> tuple[Subgroup, ...]:
        """The subgroups that can update on the host and would each fit into the host tier alone."""
        limit = next((route.budget_bytes for route in self.routes if route.tier == "host"), 0)
        subgroups = host_updatable(self.source)
        return tuple(each for each in subgroups if limit is None or host_bytes(self.source, each) <= limit)

    @property
    def byte_scale(self) -> float:
        """The unit in which rows of programs count bytes: the device budget. It keeps the numbers near one."""
        return float(max(self.budgets.device_bytes, 1))

    @cached_property
    def over_the_end(self) -> frozenset[int]:
        """Periods in which, by the `border`, the block is away when the iteration ends: they always have a decision."""
        periods = enumerate(self.periods if self.border is not None else ())
        return frozenset(index for index, period in periods if period.before >= self.stage_count and not period.final)

    def host_only(self, index: int) -> bool:
        """Return whether the block of a period may wait in the host tier only."""
        return bool(self.on_host) and self.periods[index].block in self._host_only

    def routes_of(self, index: int) -> tuple[Route, ...]:
        """Return the routes that the block of a period may take."""
        if self.host_only(index):
            return tuple(route for route in self.routes if route.tier == "host")
        return self.routes

    def with_gradient_leaves(self, leaves: dict[int, int]) -> Problem:
        """Return the same problem, in which exactly these gradients of updates on the host leave later."""
        live = list(live_bytes(self.trace))
        for block, leave in leaves.items():
            for stage in range(self.trace.blocks[block].uses[-1] + 1, leave + 1):
                live[stage] += self.trace.blocks[block].size_bytes
        return replace(self, gradient_leaves=leaves, live_bytes=tuple(live))

    def occupancy(self, decisions: Decisions) -> list[int]:
        """Return the device bytes of each stage: a block counts until it leaves, and again from the start of its prefetch.

        A plan within the budget at every stage cannot deadlock: copies out always end, and then all blocks whose copies were
        queued fit.
        """
        moves = ((decision.leave + 1, decision.start, self.periods[index].size_bytes) for index, decision in decisions.items())
        away = bytes_by_stage(moves, self.stage_count)
        return [live - size for live, size in zip(self.live_bytes, away, strict=True)]


def _updated(source: Trace, periods: Sequence[InactivePeriod], on_host: Sequence[int]) -> dict[int, int]:
    owner = {block.id: number for number in on_host for block in parameters(source, source.subgroups[number])}
    updated = {}
    for index, period in enumerate(periods):
        if period.block in owner:
            stage = source.subgroups[owner[period.block]].stage
            if any(period.after < s < period.before for s in (stage, stage + len(source.stages))):
                updated[index] = owner[period.block]
    return updated


def _routes(trace: Trace, budgets: Budgets) -> tuple[Route, ...]:
    routes = []
    tiers: tuple[tuple[WaitingTier, int | None], ...] = (("host", budgets.host_bytes), ("storage", budgets.storage_bytes))
    for tier, limit in tiers:
        outward, inward = trace.hardware.link("device", tier), trace.hardware.link(tier, "device")
        if outward is not None and inward is not None and limit != 0:
            routes.append(Route(tier=tier, outward=outward, inward=inward, budget_bytes=limit))
    return tuple(sorted(routes, key=lambda route: -route.inward.bytes_per_second))


def in_units(problem: Problem) -> Problem:
    """Return the same problem with a unit of time for solvers, which have absolute tolerances: numbers are near one then."""
    unit = problem.trace.ideal_seconds / _UNITS_PER_ITERATION or 1.0

    def scaled(link: Link) -> Link:
        rate, latency = link.bytes_per_second * unit, link.latency_seconds / unit
        return link.model_copy(update={"bytes_per_second": rate, "latency_seconds": latency})

    routes = tuple(replace(each, outward=scaled(each.outward), inward=scaled(each.inward)) for each in problem.routes)
    shared = tuple({name: seconds / unit for name, seconds in limit.items()} for limit in problem.shared)
    return replace(problem, routes=routes, shared=shared, unit_seconds=unit)
