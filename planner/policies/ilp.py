"""From the coarse solution to an exact plan: schedule it, replay it, improve it, and keep the best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf

from planner.bound import lower_bound_seconds
from planner.errors import InfeasiblePlanError
from planner.ilp import MAX_INTEGER_STAGES, CoarseSolution, coarse_solutions
from planner.policies.decisions import decisions_of
from planner.policies.predictions import with_predictions
from planner.policies.replayed import (
    ReplayedPlan,
    around_user_code,
    exact_candidates,
    replayed,
    with_other_blocks,
    with_other_tiers,
)
from planner.problem import DEFAULT_WRITE_WEIGHT, Decisions, Problem, SolverSettings, build_plan, user_stages
from planner.schedule import update_exchanges
from planner.schema import Plan, SolverReport

__all__ = ["optimise"]

_CLOSE = 1.005
"""A long iteration's plan within this factor of the lower bound is good enough."""
_CLOSE_VERY_LONG = 1.01
_VERY_LONG_STAGES = 500
"""Above this, programs take long, and find little that is better within that factor."""
_MISSED = 1.02
"""Only beyond this factor, other blocks are tried in long iterations: dozens of replays, which take seconds."""
_MAX_UPDATE_SETS = 8
"""Sets of subgroups to update on the host that are planned in place of the program's."""
_WORTH_AN_EXCHANGE = 0.999
_MAX_AROUND_USER_CODE = 3
"""Candidates that are improved around user code, in short iterations; in long ones, only the best."""


def optimise(
    problem: Problem,
    *,
    policy: str,
    rivals: Sequence[Callable[[Problem], Decisions]],
    settings: SolverSettings,
    on_host: Collection[int] | None = None,
    integer: bool = True,
    known_bound: float = 0.0,
    rivals_beyond: float = 0.0,
) -> Plan:
    """Return the plan of the integer program, made exact, or that of a rival policy where it is better.

    on_host: the subgroups that update on the host, if the program need not decide that. The host tier must have room for them.
    integer: solve an integer program where it is small; otherwise only its relaxation, which is faster. known_bound: seconds that
    no plan can beat, if that is known; without rivals, no other bound is worked out. rivals_beyond: ask rivals only if the plan
    takes more seconds.
    Where any plan exists, one is found. Up to the default weight of writes, the plan is never slower than a rival's. Raises
    InfeasiblePlanError where the lower tiers are too small.
    """
    if problem.everything_fits and not (problem.may_update_on_host if on_host is None else on_host):
        return with_predictions(problem, build_plan(problem, {}, policy=policy))
    others = [] if rivals_beyond else _rival_candidates(problem, rivals, settings.write_weight)
    bound = _Bound(problem, settings, wanted=integer and bool(rivals), seconds=known_bound)
    own: list[ReplayedPlan] = []
    reports: list[SolverReport] = []
    too_full: InfeasiblePlanError | None = None
    for start, report in _starts(problem, settings, on_host, integer=integer):
        reports += [report] if report else []
        try:
            own += exact_candidates(*start, settings.write_weight)
        except InfeasiblePlanError as error:
            too_full = error
        if problem.stage_count > MAX_INTEGER_STAGES and bound.is_close(own + others):
            break
    if rivals_beyond and all(each.timeline.iteration_seconds > rivals_beyond for each in own):
        others = _rival_candidates(problem, rivals, settings.write_weight)
    if not own and not others:
        assert too_full is not None  # otherwise there would be a candidate
        raise too_full
    first = min(own + others, key=lambda candidate: candidate.cost)
    if integer and on_host is None and problem.may_update_on_host and not bound.is_close(own + others):
        own.append(_with_other_updates(problem, first, settings))
    if user_stages(problem.trace):
        most = _MAX_AROUND_USER_CODE if problem.stage_count <= MAX_INTEGER_STAGES else 1
        cheapest = sorted(own + others, key=lambda candidate: candidate.cost)[:most]
        own += [around_user_code(candidate, settings.write_weight) for candidate in cheapest]
    if (integer or problem.stage_count <= MAX_INTEGER_STAGES) and not bound.is_close(own + others):
        last = min(own + others, key=lambda candidate: candidate.cost)
        starts = [first, last] if first.problem.on_host != last.problem.on_host else [last]
        own += [with_other_tiers(each, settings.write_weight) for each in starts]
        if integer and not bound.is_close(own + others, _MISSED if problem.stage_count > MAX_INTEGER_STAGES else 1.0):
            own += [with_other_blocks(each, settings.write_weight) for each in _cheapest(own + others)]
    best = _choose(own, others, settings.write_weight)
    made = best.plan.model_copy(update={"solver": _together(reports), "policy": policy})
    return with_predictions(problem, made, best.timeline, lower_bound_seconds=bound.seconds)


class _Bound:
    """Tells when no further search is worth its time, if that is `wanted`.

    `seconds`: the lower bound; 0 if it is not known and nobody needed it so far.
    """

    def __init__(self, problem: Problem, settings: SolverSettings, *, wanted: bool, seconds: float) -> None:
        self._problem, self._threads, self._wanted = problem, settings.threads, wanted
        self._close = _CLOSE if problem.stage_count <= _VERY_LONG_STAGES else _CLOSE_VERY_LONG
        self.seconds = seconds

    def is_close(self, found: Sequence[ReplayedPlan], factor: float = 1.0) -> bool:
        """Whether some plan takes little longer than the lower bound, or than `factor` times that, if it is larger."""
        least = min((each.timeline.iteration_seconds for each in found), default=inf)
        if self._wanted and least < inf and self.seconds == 0.0:
            enough = least / self._close
            self.seconds = lower_bound_seconds(self._problem, threads=self._threads, enough_seconds=enough)
        return least <= self.seconds * max(self._close, factor)


def _starts(
    problem: Problem, settings: SolverSettings, on_host: Collection[int] | None, *, integer: bool
) -> Iterator[tuple[tuple[Problem, Decisions], SolverReport | None]]:
    """What the coarse solutions choose, and for short iterations two simple starts. Each is worked out when it is asked for.

    Without a solution, only where updates run is decided, and a greedy plan takes the place of the program's.
    """
    solved = False
    for solution in coarse_solutions(problem, settings, on_host, integer=integer):
        solved = True
        yield decisions_of(problem, solution), solution.report
    if not solved:
        yield _undecided(problem, on_host or ()), None
    if on_host is None and problem.stage_count <= MAX_INTEGER_STAGES:
        for start in _extremes(problem):
            yield start, None


def _together(reports: Sequence[SolverReport]) -> SolverReport:
    """The first report, with the time of all of them. Without a report, one that says "failed"."""
    if not reports:
        return SolverReport(name="none", status="failed")
    times = {name: sum(getattr(report, name) for report in reports) for name in ("build_seconds", "solve_seconds")}
    return reports[0].model_copy(update=times)


def _with_other_updates(problem: Problem, best: ReplayedPlan, settings: SolverSettings) -> ReplayedPlan:
    """Let other subgroups update on the host, as long as that makes the plan better. Each set is planned anew."""
    tried = {frozenset(best.problem.on_host)}
    better: ReplayedPlan | None = best
    while better is not None:
        best, better = better, None
        for on_host in update_exchanges(best.problem, best.plan, best.timeline):
            if len(tried) > _MAX_UPDATE_SETS:
                return best
            if on_host in tried:
                continue
            tried.add(on_host)
            planned = _planned(problem, settings, sorted(on_host))
            if planned is not None and planned.cost < best.cost * _WORTH_AN_EXCHANGE:
                better = planned
                break
    return best


def _planned(problem: Problem, settings: SolverSettings, on_host: Collection[int]) -> ReplayedPlan | None:
    """The best plan of the relaxed program in which these subgroups update on the host; None if the host tier is too small."""
    try:
        starts = [start for start, _ in _starts(problem, settings, on_host, integer=False)]
        found = [each for start in starts for each in exact_candidates(*start, settings.write_weight)]
    except InfeasiblePlanError:
        return None
    return min(found, key=lambda candidate: candidate.cost)


def _extremes(problem: Problem) -> list[tuple[Problem, Decisions]]:
    """All updates on the host, if any can run there; and no decisions at all.

    These starts are cheap for small iterations, where coarse time says too little.
    """
    everything = [subgroup.id for subgroup in problem.may_update_on_host]
    return [_undecided(problem, everything), (problem, {})] if everything else [(problem, {})]


def _undecided(problem: Problem, on_host: Collection[int]) -> tuple[Problem, Decisions]:
    """Only where updates run is decided."""
    return decisions_of(problem, CoarseSolution(tiers={}, on_host=frozenset(on_host), report=SolverReport()))


def _cheapest(candidates: Sequence[ReplayedPlan]) -> list[ReplayedPlan]:
    """The cheapest plan; in short iterations, the cheapest for each choice of updates on the host."""
    found: dict[tuple[int, ...], ReplayedPlan] = {}
    for each in sorted(candidates, key=lambda candidate: candidate.cost):
        found.setdefault(each.problem.on_host, each)
    return list(found.values()) if candidates[0].problem.stage_count <= MAX_INTEGER_STAGES else list(found.values())[:1]


def _rival_candidates(
    problem: Problem, rivals: Sequence[Callable[[Problem], Decisions]], write_weight: float
) -> list[ReplayedPlan]:
    """The plans of the other policies, unchanged."""
    found = []
    for rival in rivals:
        try:
            found.append(replayed(problem, rival(problem), write_weight))
        except InfeasiblePlanError:
            continue  # this policy finds no plan; others may
    return found


def _choose(candidates: list[ReplayedPlan], others: list[ReplayedPlan], write_weight: float) -> ReplayedPlan:
    """The cheapest plan. Up to the default weight of writes, the cheapest of those that are no slower than any rival."""
    pool = [*candidates, *others]
    if others and write_weight <= DEFAULT_WRITE_WEIGHT:
        limit = min(other.timeline.iteration_seconds for other in others)
        pool = [candidate for candidate in pool if candidate.timeline.iteration_seconds <= limit]
    return min(pool, key=lambda candidate: candidate.cost)
