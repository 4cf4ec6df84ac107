"""Keep, offload or recompute: which forward stages run again in the backward pass, decided together with the moves.

The coarse program says how much of each group runs again. Its rounded solution and other sets are then planned exactly, as
iterations in which the re-runs are stages of their own (`planner.recomputed`), and replayed. To run nothing again is one of the
candidates, so a plan is never slower than without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property

from planner.bound import lower_bound_seconds
from planner.errors import BudgetError, InfeasiblePlanError, PlanError, SolverError
from planner.ilp import MAX_INTEGER_STAGES, rerun_shares
from planner.problem import (
    DEFAULT_WRITE_WEIGHT,
    Problem,
    RerunPlaces,
    SolverSettings,
    by_kind,
    floor,
    folded,
    live_bytes,
    over_half,
    recomputed,
    rounded,
    simple_sets,
    whole_layers,
)
from planner.schema import Budgets, Plan, Recompute, Trace

__all__ = ["best_recomputation", "checkpointed"]

Planner = Callable[[Problem], Plan]
BoundedPlanner = Callable[[Problem, float], Plan]
"""Is given seconds that no plan can beat, so that it knows when to stop."""

_HARDLY = 1e-3
"""Share of the iteration that must be stalls for re-runs to be worth a look."""
_CLOSE = 1.002
_CLOSE_DRAFT = 1.004
"""A draft within this factor of the bound is good enough."""
_FAR = 1.02
"""Beyond this factor, a plan of a long iteration without re-runs is compared with others than the coarse program proposed."""
_MAX_WORSE = 2
"""So many sets that are no better, one after the other, end that."""
_CLOSE_LONG = 1.01
"""For more than _LONG_STAGES stages, where it takes longest to see what re-runs are worth."""
_BETTER = 0.9999
_SHORT_STAGES = 32
"""Up to this many stages a plan takes a fraction of a second, so that many sets can be tried."""
_LONG_STAGES = 500
"""Above this, the program for re-runs takes long, and is left out where a plan without re-runs is close to the bound."""
_MANY = 0.5
"""In long iterations, whole layers are tried if the coarse program runs about this share of them again."""
_MAX_CHANGES = 24
"""Single changes of the best set that are tried in short iterations."""


def best_recomputation(
    trace: Trace, budgets: Budgets, settings: SolverSettings, *, plan: BoundedPlanner, refine: BoundedPlanner, draft: Planner
) -> Plan:
    """Return the best plan, with or without re-runs. plan: plans an iteration well; refine: the same, but compares with other
    policies only far from the bound; draft: faster, to compare sets of groups.

    Raises BudgetError and InfeasiblePlanError as `plan` does, where no set of groups helps.
    """
    search = _Search(trace, budgets, settings, draft)
    pressed = search.places.usable and max(live_bytes(trace)) > budgets.device_bytes
    if pressed and MAX_INTEGER_STAGES < len(trace.stages) <= _LONG_STAGES:
        sets = {search.places.of(groups): None for groups in _proposals(search)}
        for chosen in sets if len(sets) > 1 else ():
            search.try_plan(chosen)
        if sets and not search.is_close():
            search.finish(lambda problem: refine(problem, search.bound_seconds), *sets)
        if not search.surely_better():
            search.without(plan)
        if search.misses_reruns():
            search.widen(lambda problem: refine(problem, search.bound_seconds))
        return search.made()
    search.without(plan)
    close = _CLOSE if len(trace.stages) <= _LONG_STAGES else _CLOSE_LONG
    if search.places.usable and (search.best is None or _stalls(search.best, close=close)):
        for groups in _proposals(search):
            search.try_plan(search.places.of(groups))
        if len(trace.stages) <= _SHORT_STAGES:
            search.improve()
        short = len(trace.stages) <= MAX_INTEGER_STAGES
        search.finish((lambda problem: plan(problem, 0.0)) if short else lambda problem: refine(problem, search.bound_seconds))
    return search.made()


def checkpointed(trace: Trace, budgets: Budgets, settings: SolverSettings, *, plan: Planner) -> Plan:
    """Return the plan in which every layer is recomputed from its input, and the rest is offloaded where it must be.

    Raises BudgetError and InfeasiblePlanError as `plan` does.
    """
    places = RerunPlaces(trace)
    chosen = places.of(whole_layers(trace, places.usable))
    return folded(trace, chosen, plan(Problem.of(recomputed(trace, chosen), budgets)))


def _with_reruns(trace: Trace, error: BudgetError) -> BudgetError:
    """The error with the budget that suffices if forward stages may run again, which counts if nothing can leave."""
    if error.smallest_bytes < max(live_bytes(trace)):
        return error
    alone = trace.model_copy(update={"hardware": trace.hardware.model_copy(update={"links": (), "shared": ()})})
    least, stage = floor(alone)
    if least >= error.smallest_bytes:
        return error
    return BudgetError(smallest_bytes=least, budget_bytes=error.budget_bytes, stage=trace.stages[stage].name)


def _stalls(made: Plan, *, close: float) -> bool:
    """Whether stages wait, and the plan takes more than `close` times the bound, if that is known (it holds for re-runs, too)."""
    assert made.predicted is not None  # every plan is replayed
    seconds, bound = made.predicted.iteration_seconds, made.predicted.lower_bound_seconds
    return made.predicted.stall_seconds > _HARDLY * seconds and not 0 < seconds <= bound * close


class _Search:
    """The sets of groups that have been tried, and the best plan so far."""

    def __init__(self, trace: Trace, budgets: Budgets, settings: SolverSettings, draft: Planner) -> None:
        self.trace, self.budgets, self.settings = trace, budgets, settings
        self.places = RerunPlaces(trace)
        self.best: Plan | None = None
        self._refusal: BudgetError | InfeasiblePlanError | None = None
        self._draft = draft
        self._tried: set[tuple[Recompute, ...]] = {()}

    def without(self, plan: BoundedPlanner) -> None:
        """Plan without re-runs, and keep the plan if it is no worse than the best."""
        known = self.bound_seconds if "bound_seconds" in vars(self) else 0.0
        try:
            made = plan(Problem.of(self.trace, self.budgets), known)
        except BudgetError as error:
            self._refusal = _with_reruns(self.trace, error)
        except InfeasiblePlanError as error:
            self._refusal = error
        else:
            if self.best is None or self._cost(made) <= self._cost(self.best):
                self.best = made

    def surely_better(self) -> bool:
        """Whether the best plan is faster than any plan without re-runs, by the lower bound of those."""
        if self.best is None or self.settings.write_weight > DEFAULT_WRITE_WEIGHT:
            return False
        alone = self.trace.model_copy(update={"recompute": ()})
        try:
            problem, cost = Problem.of(alone, self.budgets), self._cost(self.best)
        except BudgetError:
            return True  # there is none
        return cost <= lower_bound_seconds(problem, threads=self.settings.threads, enough_seconds=cost)

    def is_close(self) -> bool:
        """Whether the best plan is close to the lower bound."""
        return self.best is not None and self._cost(self.best) <= self.bound_seconds * _CLOSE_DRAFT

    def misses_reruns(self) -> bool:
        """Whether the best plan runs nothing again, and is so far from the lower bound that this may be why."""
        return self.best is not None and not self.best.recompute and self._cost(self.best) > self.bound_seconds * _FAR

    @cached_property
    def bound_seconds(self) -> float:
        """The lower bound on all plans, with re-runs or without; 0 where only plans with re-runs fit."""
        try:
            return lower_bound_seconds(Problem.of(self.trace, self.budgets), threads=self.settings.threads)
        except BudgetError:
            return 0.0

    def made(self) -> Plan:
        """Return the best plan. Raises BudgetError or InfeasiblePlanError where there is none."""
        if self.best is None:
            assert self._refusal is not None  # either there is a plan, or there is a reason
            raise self._refusal
        if "bound_seconds" not in vars(self) or self.best.predicted is None:
            return self.best
        predicted = self.best.predicted.model_copy(update={"lower_bound_seconds": self.bound_seconds})
        return self.best.model_copy(update={"predicted": predicted})

    @property
    def chosen(self) -> dict[int, int]:
        """Return the groups that the best plan runs again, with their places."""
        return {} if self.best is None else {each.group: each.at for each in self.best.recompute}

    def try_plan(self, chosen: tuple[Recompute, ...]) -> bool:
        """Plan with these re-runs, and keep the plan if it is the best. Return whether it is."""
        if chosen in self._tried:
            return False
        self._tried.add(chosen)
        return self._keep_better(chosen, self._draft)

    def finish(self, plan: Planner, *untried: tuple[Recompute, ...]) -> None:
        """Plan the best re-runs with `plan`, and keep the better plan. Where nothing was planned so far: the `untried` ones."""
        for chosen in (self.best.recompute,) if self.best is not None else untried:
            if chosen:
                self._keep_better(chosen, plan)

    def _keep_better(self, chosen: tuple[Recompute, ...], plan: Planner) -> bool:
        try:
            made = folded(self.trace, chosen, plan(Problem.of(recomputed(self.trace, chosen), self.budgets)))
        except (BudgetError, InfeasiblePlanError, PlanError):
            return False  # a group of a changed set may find nothing that it could make
        if self.best is not None and self._cost(made) >= self._cost(self.best) * _BETTER:
            return False
        self.best = made
        return True

    def widen(self, plan: Planner) -> None:
        """Draft plans without re-runs, with whole layers, and with more and more kinds of groups. Plan the best with `plan`."""
        before = self.best
        self._keep_better((), self._draft)
        usable = self.places.usable
        self.try_plan(self.places.of(whole_layers(self.trace, usable)))
        worse = 0
        for groups in by_kind(self.trace, usable):
            worse = 0 if self.try_plan(self.places.of(groups)) else worse + 1
            if worse == _MAX_WORSE:
                break
        if self.best is not before:
            self.finish(plan)

    def improve(self) -> None:
        """Add, drop or displace single groups, or run all at one place, as long as that helps."""
        before, better = len(self._tried), True
        while better:
            better = False
            for chosen in self._changes():
                if len(self._tried) - before >= _MAX_CHANGES:
                    return
                better |= self.try_plan(chosen)

    def _changes(self) -> Iterator[tuple[Recompute, ...]]:
        for group in self.places.usable:
            yield self.places.of(self.chosen.keys() ^ {group})
            others = {number: at for number, at in self.chosen.items() if number != group}
            yield self.places.in_order(others)
            for at in self.places.options(group):
                yield self.places.in_order({**others, group: at})
        yield from self.places.together()

    def _cost(self, made: Plan) -> float:
        """Iteration seconds, plus what copies to drives are worth where that weighs more than usual."""
        assert made.predicted is not None  # every plan is replayed
        cost = made.predicted.iteration_seconds
        link = self.trace.hardware.link("device", "storage")
        if link is not None and self.settings.write_weight > DEFAULT_WRITE_WEIGHT:
            cost += self.settings.write_weight * made.predicted.storage_written_bytes / link.bytes_per_second
        return cost


def _proposals(search: _Search) -> Iterator[frozenset[int]]:
    """Sets to plan exactly: what the coarse program says, and simple ones. In long iterations, only a few simple ones."""
    trace, usable = search.trace, search.places.usable
    shares: dict[int, float] | None = None
    with suppress(SolverError, BudgetError):
        shares = rerun_shares(Problem.of(trace, search.budgets), search.places, search.settings)
    if shares:
        yield rounded(trace, shares)
    if shares is not None and len(trace.stages) > _SHORT_STAGES:
        layers = whole_layers(trace, usable)
        if _seconds(trace, over_half(shares)) >= _MANY * _seconds(trace, layers):
            yield layers
        return
    yield over_half(shares or {})
    yield from simple_sets(trace, usable)


def _seconds(trace: Trace, groups: Iterable[int]) -> float:
    return sum(trace.recompute[number].duration_seconds for number in groups)
