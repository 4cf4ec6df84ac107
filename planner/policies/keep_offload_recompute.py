"""Keep, offload or recompute: which forward stages run again in the backward pass, decided together with the moves.

The coarse program says how much of each group runs again. Its rounded solution and other sets are then planned exactly, as
iterations in which the re-runs are stages of their own (`planner.recomputed`), and replayed. To run nothing again is one of the
candidates, so a plan is never slower than without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import inf

from planner.bound import lower_bound_seconds
from planner.errors import BudgetError, InfeasiblePlanError, PlanError, SolverError
from planner.ilp import MAX_INTEGER_STAGES, rerun_shares, room_bytes
from planner.policies.effort import effort_of
from planner.policies.optimise import Task, optimise
from planner.policies.predictions import cost_of, with_bound
from planner.problem import (
    DEFAULT_WRITE_WEIGHT,
    Problem,
    RerunPlaces,
    by_kind,
    floor,
    folded,
    kinds_of_places,
    live_bytes,
    made_bytes,
    out_of_time,
    over_half,
    recomputed,
    rounded,
    simple_sets,
    whole_layers,
)
from planner.schema import Budgets, Plan, Recompute, Trace


def best_recomputation(trace: Trace, budgets: Budgets, task: Task) -> Iterator[Plan]:
    """Yield the best plan, with or without re-runs, of those that `optimise` makes; before it, the one without, once it is made.

    Raises BudgetError and InfeasiblePlanError as that does, where no set of groups helps.
    """
    search = _Search(trace, budgets, task)
    pressed = search.places.usable and max(live_bytes(trace)) > budgets.device_bytes
    alone: Plan | None = None
    for step in _GROUPS_FIRST if pressed and search.effort.groups_first else _ALONE_FIRST:
        goes_on = step(search)
        if search.best is not None and not search.best.recompute and search.best is not alone:
            alone = search.best
            yield search.made()
        if not goes_on or (search.best is not None and out_of_time()):
            break
    if search.best is None or search.best is not alone:
        yield search.made()


def checkpointed(trace: Trace, budgets: Budgets, task: Task) -> Iterator[Plan]:
    """Yield the plan in which every layer is recomputed from its input, and the rest is offloaded where it must be.

    Raises BudgetError and InfeasiblePlanError as `optimise` does.
    """
    places = RerunPlaces(trace)
    chosen = places.of(whole_layers(trace, places.usable))
    yield folded(trace, chosen, optimise(Problem.of(recomputed(trace, chosen), budgets), task))


class _Search:
    """The sets of groups that have been tried, and the best plan so far."""

    def __init__(self, trace: Trace, budgets: Budgets, task: Task) -> None:
        self.trace, self.budgets = trace, budgets
        effort = effort_of(len(trace.stages))
        self.effort = replace(effort, far=effort.far_in_part) if task.part else effort
        self._kinds = kinds_of_places(trace)
        self.places = self._kinds[0]
        self.best: Plan | None = None
        self._refusal: BudgetError | InfeasiblePlanError | None = None
        self._task, self._draft = task, replace(task, draft=True)
        self._tried: set[tuple[Recompute, ...]] = {()}
        self._proposed: tuple[tuple[Recompute, ...], ...] = ()
        self._of_best: dict[tuple[Recompute, ...], Problem] = {}  # it knows what was solved for it

    # -- steps; the search goes on as long as they return True

    def plan_alone(self) -> bool:
        """Plan without re-runs, and keep the plan if it is no worse than the best. Return whether stages still wait."""
        known = self.bound_seconds if self._bound_is_known else 0.0
        try:
            made = optimise(Problem.of(self.trace, self.budgets), replace(self._task, known_bound=known))
        except BudgetError as error:
            self._refusal = _with_reruns(self.trace, error)
        except InfeasiblePlanError as error:
            self._refusal = error
        else:
            if self.best is None or self._cost(made) <= self._cost(self.best):
                self.best = made
        return bool(self.places.usable) and (self.best is None or self._waits(self.best))

    def plan_alone_if_it_may_be_better(self) -> bool:
        """The same, unless the lower bound of plans without re-runs says that none is as fast as the best."""
        if not self._surely_better():
            self.plan_alone()
        return True

    def draft_proposals(self) -> bool:
        """Draft plans for the proposed sets."""
        for chosen in self._proposals():
            self._try(chosen)
        return True

    def compare_proposals(self) -> bool:
        """The same if there are several, since a draft of a single one decides nothing."""
        sets = tuple(dict.fromkeys(self._proposals()))
        for chosen in sets if len(sets) > 1 else ():
            self._try(chosen)
        self._proposed = sets
        return True

    def finish_unless_close(self) -> bool:
        """Plan the best set well, unless its draft is close to the lower bound. Where nothing was drafted: the only proposal."""
        close = self.effort.close_draft
        if self._proposed and (self.best is None or self._cost(self.best) > self.bound_seconds * close):
            self._finish(self._refined(), self._proposed)
        return True

    def drop_groups(self) -> bool:
        """Where no stage waits, less may do: drop groups that take the most time for their bytes, as long as that helps."""
        helps = self.best is not None and not self._stalls(self.best)
        while helps and self.best is not None and self.best.recompute and not out_of_time():
            groups = [self.trace.recompute[each.group] for each in self.best.recompute]
            worst = max(groups, key=lambda group: group.duration_seconds / max(made_bytes(self.trace, group), 1))
            chosen = tuple(each for each in self.best.recompute if each.group != worst.id)
            helps = self._keep_better(chosen, self._refined())
        return True

    def finish(self) -> bool:
        """Plan the best set well."""
        self._finish(self._task if len(self.trace.stages) <= MAX_INTEGER_STAGES else self._refined())
        return True

    def widen(self) -> bool:
        """Draft other sets and finish the best, if the best plan runs nothing again and may be far from the bound for that.

        They are none at all, whole layers, and more and more kinds of groups, until some in a row are no better.
        """
        before = self.best
        if before is None or before.recompute or self._cost(before) <= self.bound_seconds * self.effort.far:
            return True
        self._keep_better((), self._draft)
        usable = self.places.usable
        self._try(self.places.of(whole_layers(self.trace, usable)))
        worse = 0
        for groups in by_kind(self.trace, usable):
            worse = 0 if self._try(self.places.of(groups)) else worse + 1
            if worse == self.effort.worse_kinds:
                break
        if self.best is not before:
            self._finish(self._refined())
        return True

    def change_single_groups(self) -> bool:
        """Add, drop or displace single groups, or run all at one place, as long as that helps."""
        before, better = len(self._tried), True
        while better:
            better = False
            for chosen in self._changes():
                if len(self._tried) - before >= self.effort.changes:
                    return True
                better |= self._try(chosen)
        return True

    # -- what they use

    def made(self) -> Plan:
        """Return the best plan. Raises BudgetError or InfeasiblePlanError where there is none."""
        if self.best is None:
            assert self._refusal is not None  # either there is a plan, or there is a reason
            raise self._refusal
        return with_bound(self.best, self.bound_seconds) if self._bound_is_known else self.best

    @cached_property
    def bound_seconds(self) -> float:
        """The lower bound on all plans, with re-runs or without; 0 where only plans with re-runs fit."""
        enough = inf if self.best is None else self._cost(self.best) / self.effort.close_draft
        if self._task.part:
            enough = 0.0  # a rough one will do
        try:
            problem = Problem.of(self.trace, self.budgets)
            return lower_bound_seconds(problem, threads=self._task.settings.threads, enough_seconds=enough)
        except BudgetError:
            return 0.0

    @property
    def _bound_is_known(self) -> bool:
        return "bound_seconds" in vars(self)

    def _refined(self) -> Task:
        """The task for a plan that rivals need not be compared with unless it is far from the bound."""
        return replace(self._task, known_bound=self.bound_seconds, rivals_beyond=self.bound_seconds * self.effort.far)

    def _waits(self, made: Plan) -> bool:
        """Whether stages wait, and the plan is not close to the bound, if that is known (it holds for re-runs, too)."""
        seconds, bound = made.replayed.iteration_seconds, made.replayed.lower_bound_seconds
        return self._stalls(made) and not 0 < seconds <= bound * self.effort.close_alone

    def _stalls(self, made: Plan) -> bool:
        return made.replayed.stall_seconds > self.effort.waits * made.replayed.iteration_seconds

    def _surely_better(self) -> bool:
        """Whether the best plan is faster than any plan without re-runs, by the lower bound of those."""
        if self.best is None or self._task.settings.write_weight > DEFAULT_WRITE_WEIGHT:
            return False
        alone, cost = self.trace.model_copy(update={"recompute": ()}), self._cost(self.best)
        try:
            problem = Problem.of(alone, self.budgets)
        except BudgetError:
            return True  # there is none
        return cost <= lower_bound_seconds(problem, threads=self._task.settings.threads, enough_seconds=cost)

    def _proposals(self) -> Iterator[tuple[Recompute, ...]]:
        """Sets to plan exactly: what the coarse program says, and simple ones, of which longer iterations get only a few."""
        trace, kinds = self.trace, self._kinds
        shares: dict[int, float] | None = None
        with suppress(SolverError, BudgetError):
            problem = Problem.of(trace, self.budgets)
            room = room_bytes(problem)
            # Of a part, one set is planned. If all the room stays free for it, too much runs again, and if none does, too little.
            for reserve in dict.fromkeys((room // 2,) if self._task.part else (0, room)):
                solved = {each: rerun_shares(problem, each, self._task.settings, reserve_bytes=reserve) for each in kinds}
                if self._task.part or not self.effort.all_places:
                    kinds = (min(kinds, key=lambda places: solved[places][0]),)
                for places in kinds:
                    shares = solved[places][1]
                    if shares:
                        yield places.of(rounded(trace, shares))
        if shares is not None and not self.effort.simple_sets:
            layers = whole_layers(trace, self.places.usable)
            if _seconds(trace, over_half(shares)) >= self.effort.many * _seconds(trace, layers):
                yield from (places.of(layers) for places in kinds)
            return
        for places in kinds:
            yield places.of(over_half(shares or {}))
            yield from map(places.of, simple_sets(trace, places.usable))

    def _changes(self) -> Iterator[tuple[Recompute, ...]]:
        for group in self.places.usable:
            yield self.places.of(self._chosen.keys() ^ {group})
            others = {number: at for number, at in self._chosen.items() if number != group}
            yield self.places.in_order(others)
            for at in self.places.options(group):
                yield self.places.in_order({**others, group: at})
        yield from self.places.together()

    @property
    def _chosen(self) -> dict[int, int]:
        """The groups that the best plan runs again, with their places."""
        return {} if self.best is None else {each.group: each.at for each in self.best.recompute}

    def _try(self, chosen: tuple[Recompute, ...]) -> bool:
        """Draft a plan with these re-runs, and keep it if it is the best. Return whether it is."""
        if chosen in self._tried or (self.best is not None and out_of_time()):
            return False
        self._tried.add(chosen)
        return self._keep_better(chosen, self._draft)

    def _finish(self, task: Task, untried: Iterable[tuple[Recompute, ...]] = ()) -> None:
        """Plan the best re-runs by `task`, and keep the better plan. Where nothing was planned so far: the `untried` ones."""
        for chosen in (self.best.recompute,) if self.best is not None else untried:
            if chosen and not (self.best is not None and out_of_time()):
                self._keep_better(chosen, task)

    def _keep_better(self, chosen: tuple[Recompute, ...], task: Task) -> bool:
        try:
            problem = self._of_best.get(chosen) or Problem.of(recomputed(self.trace, chosen), self.budgets)
            made = folded(self.trace, chosen, optimise(problem, task))
        except (BudgetError, InfeasiblePlanError, PlanError):
            return False  # a group of a changed set may find nothing that it could make
        if self.best is not None and self._cost(made) >= self._cost(self.best) * self.effort.better:
            return False
        self.best, self._of_best = made, {chosen: problem}
        return True

    def _cost(self, made: Plan) -> float:
        return cost_of(made, self.trace, self._task.settings.write_weight)


_Steps = tuple[Callable[[_Search], bool], ...]
_ALONE_FIRST: _Steps = (_Search.plan_alone, _Search.draft_proposals, _Search.change_single_groups, _Search.finish)
# For iterations in which a plan without re-runs takes long.
_GROUPS_FIRST: _Steps = (
    _Search.compare_proposals,
    _Search.finish_unless_close,
    _Search.drop_groups,
    _Search.plan_alone_if_it_may_be_better,
    _Search.widen,
)


def _with_reruns(trace: Trace, error: BudgetError) -> BudgetError:
    """The error with the budget that suffices if forward stages may run again, which counts if nothing can leave."""
    if error.smallest_bytes < max(live_bytes(trace)):
        return error
    alone = trace.model_copy(update={"hardware": trace.hardware.model_copy(update={"links": (), "shared": ()})})
    least, stage = floor(alone)
    if least >= error.smallest_bytes:
        return error
    return BudgetError(smallest_bytes=least, budget_bytes=error.budget_bytes, stage=trace.stages[stage].name, why=error.why)


def _seconds(trace: Trace, groups: Iterable[int]) -> float:
    return sum(trace.recompute[number].duration_seconds for number in groups)
