"""Published policies, which the integer program is compared with. Written from the publications, not from their code.

The planners of TERAIO and of G10 choose inactive periods greedily, by benefit and cost. Both place transfers on an ideal clock:
a copy out takes the earliest free time of its link, a copy in the latest. Neither says what to do if memory is over the budget
when no period is left to choose. Here blocks then leave on demand, furthest next use first, and stages wait for them.

ZeRO-Infinity has a fixed schedule: everything is offloaded and comes back one layer ahead. Fixed rules for where optimizer
subgroups update show what it is worth to decide that for each subgroup.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from planner.errors import InfeasiblePlanError, UnsupportedError
from planner.problem import Decision, Decisions, Problem, Route, TierCapacity, host_bytes, host_updatable, layer_of, out_of_time
from planner.schedule import evict_furthest, on_demand, prefetch_from
from planner.schema import WaitingTier

_EPSILON = 1e-12


def teraio_decisions(problem: Problem) -> Decisions:
    """The published algorithm of TERAIO.

    While some stage is over the budget, the period with the highest benefit / cost moves. Benefit: bytes × the time within the
    period, without both copies, during which memory is over the budget. Cost: seconds of both copies. Storage is tried first;
    host memory is used only where storage has no bandwidth left in the period, or no room. Prefetches start as late as is safe.

    Source: Yuan et al., Cost-Efficient LLM Training with Lifetime-Aware Tensor Offloading via GPUDirect Storage (NeurIPS 2025),
    on its migration planner.
    """
    chosen = _Greedy(problem, _time_over_budget).choose()
    feasible = evict_furthest(problem, on_demand(problem, chosen), early=True)
    return prefetch_from(problem, feasible, {index: decision.start for index, decision in chosen.items()})


def g10_decisions(problem: Problem) -> Decisions:
    """Eviction in the order of memory pressure, with eager prefetching, after G10.

    Like `teraio_decisions`, but the benefit is the pressure that the move removes: for each stage, no more bytes than the stage
    is over the budget. At the end, every prefetch moves to the earliest stage that has memory for it.

    Source: Zhang et al., G10: Enabling An Efficient Unified GPU Memory and Storage Architecture with Smart Tensor Migrations
    (MICRO 2023), on smart eviction and prefetching.
    """
    chosen = _Greedy(problem, _relieved).choose()
    feasible = evict_furthest(problem, on_demand(problem, chosen), early=True)
    return prefetch_from(problem, feasible, {index: decision.leave + 1 for index, decision in feasible.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pressure:
    """How far each stage is over the budget, over two iterations in a row so that a range may wrap.

    `seconds_until[s]`: time over the budget before stage s. `thin`: stages that are over the budget by fewer bytes than the
    largest block has, with those bytes.
    """

    seconds: np.ndarray
    seconds_until: list[float]
    thin: list[tuple[int, float]]

    @classmethod
    def of(cls, excess: np.ndarray, seconds: np.ndarray, largest_bytes: int) -> _Pressure:
        twice = np.tile(np.where(excess > 0, seconds, 0.0), 2)
        stages = np.flatnonzero((excess > 0) & (excess < largest_bytes))
        thin = [*zip(stages.tolist(), excess[stages].tolist(), strict=True)]
        thin += [(stage + len(seconds), bytes_over) for stage, bytes_over in thin]
        return cls(seconds=seconds, seconds_until=[0.0, *np.cumsum(twice).tolist()], thin=thin)


# (bytes that a move frees, first stage without them, stage where they are back, pressure) → byte seconds.
Benefit = Callable[[int, int, int, _Pressure], float]


def _time_over_budget(size_bytes: int, first: int, end: int, pressure: _Pressure) -> float:
    """Bytes × the time over the budget."""
    return size_bytes * (pressure.seconds_until[end] - pressure.seconds_until[first])


def _relieved(size_bytes: int, first: int, end: int, pressure: _Pressure) -> float:
    """The same, but for each stage no more bytes than the stage is over the budget."""
    begin, stop = bisect_left(pressure.thin, (first, 0.0)), bisect_left(pressure.thin, (end, 0.0))
    unneeded: float = sum(
        (size_bytes - over) * pressure.seconds[stage % len(pressure.seconds)]
        for stage, over in pressure.thin[begin:stop]
        if over < size_bytes
    )
    return _time_over_budget(size_bytes, first, end, pressure) - unneeded


class _LinkTime:
    """The time that a link has free within each stage. Ranges of stages continue over the iteration's end."""

    def __init__(self, seconds: list[float]) -> None:
        self._free = list(seconds)
        self._sum()

    def _sum(self) -> None:
        self._until = list(accumulate(self._free * 2, initial=0.0))

    def earliest(self, first: int, end: int, seconds: float) -> int | None:
        """The stage before which `seconds` of the link are free from stage `first` on; None if that is after `end`."""
        stage = bisect_left(self._until, self._until[first] + seconds - _EPSILON, first)
        return stage if stage <= end else None

    def latest(self, first: int, end: int, seconds: float) -> int | None:
        """The last stage from which `seconds` are free until stage `end`; None if that is before `first`."""
        stage = bisect_right(self._until, self._until[end] - seconds + _EPSILON, 0, end + 1) - 1
        return stage if stage >= first else None

    def take(self, stages: range, seconds: float) -> None:
        """Use up `seconds` in the first of `stages` that have some free."""
        for stage in stages:
            share = min(self._free[stage % len(self._free)], seconds)
            self._free[stage % len(self._free)] -= share
            seconds -= share
        self._sum()


class _ScoredMove(NamedTuple):  # a tuple, since hundreds of thousands are made
    """A period's move to one tier, and its benefit / cost.

    Its memory is free from stage `free` to stage `start`, where it comes back.
    """

    period: int
    route: Route
    out_seconds: float
    in_seconds: float
    free: int
    start: int
    ratio: float


class _Greedy:
    """Takes the best move again and again, and updates the free time of links and the memory."""

    def __init__(self, problem: Problem, benefit: Benefit) -> None:
        self._problem = problem
        self._benefit = benefit
        seconds = [stage.duration_seconds for stage in problem.trace.stages]
        self._seconds = np.array(seconds)
        self._largest = max((period.size_bytes for period in problem.periods), default=0)
        self._excess = np.array(problem.live_bytes, dtype=float) - problem.budgets.device_bytes
        self._measure_pressure()
        self._links = {link.name: _LinkTime(seconds) for route in problem.routes for link in (route.outward, route.inward)}
        self._room = TierCapacity(problem, {})
        self._written: set[tuple[int, int, str]] = set()
        self._routes = [
            (route, self._links[route.outward.name], self._links[route.inward.name])
            for route in sorted(problem.routes, key=lambda route: route.tier != "storage")
        ]

    def choose(self) -> Decisions:
        """Choose moves until no stage is over the budget or no move helps."""
        chosen: Decisions = {}
        heap = [(-c.ratio, c.period) for i in range(len(self._problem.periods)) if (c := self._candidate(i))]
        heapq.heapify(heap)
        while heap and self._over_budget:
            _, index = heapq.heappop(heap)
            # Anew, since earlier moves may have lowered its value. For one tier, values never rise.
            candidate = self._candidate(index)
            if candidate is None:
                continue
            if heap and candidate.ratio < -heap[0][0] * (1 - 1e-9):
                heapq.heappush(heap, (-candidate.ratio, index))
                continue
            self._take(candidate)
            period = self._problem.periods[index]
            chosen[index] = Decision(tier=candidate.route.tier, leave=period.after, start=candidate.start)
            if out_of_time():
                break
        return chosen

    def _measure_pressure(self) -> None:
        self._pressure = _Pressure.of(self._excess, self._seconds, self._largest)
        self._over_budget = bool(self._excess.max() > 0)

    def _candidate(self, index: int) -> _ScoredMove | None:
        """The move to the first tier with bandwidth and room that has any benefit; None if there is none."""
        period = self._problem.periods[index]
        first, end = period.after + 1, period.before
        if self._pressure.seconds_until[end] <= self._pressure.seconds_until[first]:
            return None  # the memory is over the budget at no time within the period
        for route, outward, inward in self._routes:
            if not self._room.fits(index, route.tier):
                continue
            copied = period.read_only or (period.block, period.epoch, route.tier) in self._written
            out_seconds = 0.0 if copied else route.outward.seconds(period.size_bytes)
            in_seconds = 0.0 if period.final else route.inward.seconds(period.size_bytes)
            free, start = outward.earliest(first, end, out_seconds), inward.latest(first, end, in_seconds)
            if free is None or start is None or free >= start:
                continue
            benefit = self._benefit(period.size_bytes, free, start, self._pressure)
            if benefit > 0:
                ratio = benefit / max(out_seconds + in_seconds, _EPSILON)
                return _ScoredMove(index, route, out_seconds, in_seconds, free, start, ratio)
        return None

    def _take(self, candidate: _ScoredMove) -> None:
        period, route, stages = self._problem.periods[candidate.period], candidate.route, len(self._seconds)
        self._links[route.outward.name].take(range(period.after + 1, candidate.free), candidate.out_seconds)
        self._links[route.inward.name].take(range(period.before - 1, candidate.start - 1, -1), candidate.in_seconds)
        self._excess[candidate.free : min(candidate.start, stages)] -= period.size_bytes
        self._excess[max(candidate.free - stages, 0) : max(candidate.start - stages, 0)] -= period.size_bytes
        self._measure_pressure()
        self._room.take(candidate.period, route.tier)
        self._written.add((period.block, period.epoch, route.tier))


def zero_infinity_decisions(problem: Problem) -> Decisions:
    """Offload every block after every use, and prefetch the blocks of a layer while the layer before it runs.

    A layer is a run of stages whose names begin alike, see `planner.problem.layer_of`; other stages are layers of their
    own. Model and optimizer states go to storage, activations to host memory. A block goes to the other tier where its own is
    missing or full, and stays if neither has room. A block whose next use is in the same layer or the next one stays too. A
    prefetch without room starts later.

    Source: Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning (SC 2021): all states
    on NVMe, activation checkpoints in CPU memory, overlap-centric prefetching along the traced order of layers.
    """
    numbers, first_of = _layers(problem)
    room = TierCapacity(problem, {})
    decisions: Decisions = {}
    ahead: dict[int, int] = {}
    stages, layers = problem.stage_count, len(first_of)
    for index, period in enumerate(problem.periods):
        needed_in = numbers[period.before % stages] + period.before // stages * layers
        if not period.final and needed_in - numbers[period.after] <= 1:
            continue
        kind = problem.trace.blocks[period.block].kind
        wanted: WaitingTier = "host" if kind == "activation" else "storage"
        tiers = sorted((route.tier for route in problem.routes), key=lambda tier: tier != wanted)
        tier = next((tier for tier in tiers if room.fits(index, tier)), None)
        if tier is None:
            continue
        room.take(index, tier)
        decisions[index] = Decision(tier=tier, leave=period.after, start=period.before)
        turns, layer = divmod(needed_in - 1, layers)
        ahead[index] = max(first_of[layer] + turns * stages, period.after + 1)
    feasible = evict_furthest(problem, decisions, early=True)
    return prefetch_from(problem, feasible, ahead)


def _layers(problem: Problem) -> tuple[list[int], list[int]]:
    """Return the layer of every stage, and the first stage of every layer."""
    names = [layer_of(stage.name) or f"stage {number}" for number, stage in enumerate(problem.trace.stages)]
    first_of = [number for number, name in enumerate(names) if number == 0 or name != names[number - 1]]
    return [bisect_right(first_of, number) - 1 for number in range(len(names))], first_of


def fixed_updates(policy: str, problem: Problem, step: int) -> Sequence[int]:
    """Return the ids of every `step`-th of the subgroups that can update on the host, in the order of their stages.

    With 1, that is all of them: ZeRO-Offload updates everything there. With 2, the device updates the next subgroup while the
    host updates one; the states of the next come in and go out meanwhile.

    Raises UnsupportedError if there are none, and InfeasiblePlanError if the host tier has no room for them all. `policy` is the
    name that the message begins with.

    Sources: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training (USENIX ATC 2021); Maurya et al., Deep Optimizer
    States: Towards Scalable Training of Transformer Models Using Interleaved Offloading (Middleware 2024), on the scheduling of
    subgroups.
    """
    source, budget = problem.source, problem.budgets.host_bytes
    chosen = sorted(host_updatable(source), key=lambda subgroup: (subgroup.stage, subgroup.id))[::step]
    if not chosen:
        raise UnsupportedError(
            f"policy {policy!r}: none of the {len(source.subgroups)} optimizer subgroups of this trace can update on "
            "the host (the trace needs their host_seconds and links to and from the host tier); use 'device-updates' or 'ilp'"
        )
    size = sum(host_bytes(source, subgroup) for subgroup in chosen)
    if budget is not None and size > budget:
        raise InfeasiblePlanError(
            f"policy {policy!r}: the blocks of the {len(chosen)} optimizer subgroups that would update on the host take "
            f"{size:,} bytes there; the host tier's budget is {budget:,} bytes: raise host_budget, or use policy 'ilp'"
        )
    return [subgroup.id for subgroup in chosen]
