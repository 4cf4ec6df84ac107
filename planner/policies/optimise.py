"""From the coarse solutions to an exact plan: schedule them, replay them, improve them, and keep the best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from planner.bound import lower_bound_seconds
from planner.errors import InfeasiblePlanError
from planner.ilp import CoarseSolution, coarse_solutions, in_order_of_need, large_periods, room_bytes
from planner.policies.effort import effort_of
from planner.policies.predictions import with_predictions
from planner.problem import (
    DEFAULT_WRITE_WEIGHT,
    Decision,
    Decisions,
    Problem,
    SolverSettings,
    TierCapacity,
    build_plan,
    copies_out,
    out_of_time,
    user_stages,
)
from planner.schedule import (
    ReplayedPlan,
    StageClock,
    block_exchanges,
    evict_furthest,
    on_demand,
    prefetch_from,
    prune,
    schedule,
    tier_exchanges,
    update_exchanges,
    user_code_proposals,
)
from planner.schema import Plan, SolverReport, WaitingTier

Start = tuple[Problem, Decisions]  # decisions that are made exact, and the problem with its updates on the host
Variant = tuple[Problem, Decisions, float]  # the last is the reserve of prefetches, see `schedule`


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to optimise by.

    rivals: policies whose plans are candidates too. on_host: the subgroups that update on the host, if the program need not
    decide that; the host tier must have room for them. draft: only relaxed programs and little improvement, to compare
    iterations. part: of an iteration, to be made exact there; what gains little is left out. known_bound: seconds that no plan
    can beat, 0 if not known. rivals_beyond: ask rivals only if the plan takes more seconds.
    """

    policy: str
    settings: SolverSettings
    rivals: Sequence[Callable[[Problem], Decisions]] = ()
    on_host: Collection[int] | None = None
    draft: bool = False
    part: bool = False
    known_bound: float = 0.0
    rivals_beyond: float = 0.0


def optimise(problem: Problem, task: Task) -> Plan:
    """Return the plan of the integer program, made exact, or that of a rival policy where it is better.

    Where any plan exists, one is found. Up to the default weight of writes, the plan is never slower than a rival's, but for the
    hundredth that drives are spared for. Raises InfeasiblePlanError where the lower tiers are too small.
    """
    updates = problem.may_update_on_host if task.on_host is None else task.on_host
    if problem.everything_fits and not updates:
        return with_predictions(problem, build_plan(problem, {}, policy=task.policy))
    search = _Search(problem, task)
    search.begin()
    for step in _STEPS:
        search.own += [] if out_of_time() else step(search)
    best = search.choose()
    best = best if task.draft or not task.settings.write_weight else without_needless_writes(best)
    made = best.plan.model_copy(update={"solver": _together(search.reports), "policy": task.policy})
    return with_predictions(problem, made, best.timeline, lower_bound_seconds=search.bound_seconds)


class _Search:
    """The candidates so far: the program's `own`, and the rivals'. `first`: the cheapest one before any improvement.

    `bound_seconds`: the lower bound; 0 if it is not known and nobody needed it so far.
    """

    def __init__(self, problem: Problem, task: Task) -> None:
        self.problem, self.task, self.effort = problem, task, effort_of(problem.stage_count)
        self.own: list[ReplayedPlan] = []
        self.rivals: list[ReplayedPlan] = []
        self.reports: list[SolverReport] = []
        self.reserve_bytes = room_bytes(problem)  # what the program whose plan was the cheapest one left free
        self.bound_seconds = task.known_bound

    def begin(self) -> None:
        """Make the coarse solutions exact, and ask the rivals. Raises InfeasiblePlanError where there is no plan."""
        task, weight = self.task, self.task.settings.write_weight
        if not task.rivals_beyond:
            self.rivals = self._plans_of_rivals()
        too_full: InfeasiblePlanError | None = None
        reserve = self.reserve_bytes if task.draft or task.part else None
        for start, solution in _starts(self.problem, task.settings, task.on_host, reserve):
            self.reports += [solution.report] if solution else []
            try:
                made = exact_candidates(*start, weight)
            except InfeasiblePlanError as error:
                too_full = error
            else:
                least = min((each.cost for each in self.own), default=inf)
                if solution and min(each.cost for each in made) < least:
                    self.reserve_bytes = solution.reserve_bytes
                self.own += made
            if (self.own and out_of_time()) or (self.effort.until_close and self.is_close()):
                break
        if task.rivals_beyond and all(each.timeline.iteration_seconds > task.rivals_beyond for each in self.own):
            self.rivals = self._plans_of_rivals()
        if not self.own and not self.rivals:
            assert too_full is not None  # otherwise there would be a candidate
            raise too_full
        self.first = self.cheapest[0]

    @property
    def cheapest(self) -> list[ReplayedPlan]:
        """All candidates, the cheapest first."""
        return sorted(self.own + self.rivals, key=lambda candidate: candidate.cost)

    def is_close(self, beyond: float = 1.0) -> bool:
        """Whether some plan takes little longer than the lower bound, or than `beyond` times that, if it is larger.

        Tells when no further search is worth its time. Drafts, and plans without rivals, are not worth a bound of their own.
        """
        least = min((each.timeline.iteration_seconds for each in self.own + self.rivals), default=inf)
        if self.bound_seconds == 0.0 and least < inf and self.task.rivals and not self.task.draft:
            threads, enough = self.task.settings.threads, least / self.effort.close
            self.bound_seconds = lower_bound_seconds(self.problem, threads=threads, enough_seconds=enough)
        return least <= self.bound_seconds * max(self.effort.close, beyond)

    def choose(self) -> ReplayedPlan:
        """Return the cheapest plan; up to the default weight of writes, of those that are no slower than any rival."""
        pool = [*self.own, *self.rivals]
        if self.rivals and self.task.settings.write_weight <= DEFAULT_WRITE_WEIGHT:
            limit = min(rival.timeline.iteration_seconds for rival in self.rivals)
            pool = [candidate for candidate in pool if candidate.timeline.iteration_seconds <= limit]
        return min(pool, key=lambda candidate: candidate.cost)

    def _plans_of_rivals(self) -> list[ReplayedPlan]:
        """The plans of the other policies, unchanged."""
        found: list[ReplayedPlan] = []
        for rival in self.task.rivals if self.effort.refined_drafts or not self.task.draft else ():
            if found and out_of_time():
                break
            try:
                found.append(ReplayedPlan.of(self.problem, rival(self.problem), self.task.settings.write_weight))
            except InfeasiblePlanError:
                continue  # this policy finds no plan; others may
        return found


# -- improvements: more candidates, where they are wanted


def _other_updates(search: _Search) -> list[ReplayedPlan]:
    """Let other subgroups update on the host, as long as that makes the plan better. Each set is planned anew."""
    best, problem, effort, task = search.first, search.problem, search.effort, search.task
    if task.draft or task.on_host is not None or not problem.may_update_on_host or search.is_close():
        return []
    tried = {frozenset(best.problem.on_host)}
    better: ReplayedPlan | None = best
    while better is not None:
        best, better = better, None
        for on_host in update_exchanges(best):
            if len(tried) > effort.update_sets or out_of_time():
                return [best]
            if on_host in tried:
                continue
            tried.add(on_host)
            planned = _planned(problem, task.settings, sorted(on_host), search.reserve_bytes)
            if planned is not None and planned.cost < best.cost * effort.worth_an_update_set:
                better = planned
                break
    return [best]


def _around_user_code(search: _Search) -> list[ReplayedPlan]:
    """Look for better starts of the copies that user code waits for, as long as some are found."""

    def variants(best: ReplayedPlan) -> Iterator[Variant]:
        for lead in search.effort.all_leads:
            yield best.problem, schedule(best.problem, best.decisions, best.clock, lead=lead), best.lead
        yield from ((*each, best.lead) for each in user_code_proposals(best))

    if (search.task.draft and search.task.part) or not user_stages(search.problem.trace):
        return []
    return [_improved(each, variants) for each in search.cheapest[: search.effort.around_user_code]]


def _other_large_blocks(search: _Search) -> list[ReplayedPlan]:
    if search.is_close():
        return []
    return [with_other_large_blocks(each) for each in search.cheapest[: search.effort.large_blocks]]


def _other_tiers(search: _Search) -> list[ReplayedPlan]:
    """Try other reserves, and other tiers for blocks for which stages wait, as long as that makes the plan better."""

    def variants(best: ReplayedPlan) -> Iterator[Variant]:
        leads = [(best.decisions, lead) for lead in search.effort.all_leads]
        for decisions, lead in (*leads, *((decisions, best.lead) for decisions in tier_exchanges(best))):
            yield best.problem, schedule(best.problem, decisions, best.clock, lead=lead), lead

    if (search.task.draft and not search.effort.refined_drafts) or search.is_close():
        return []
    first, last = search.first, search.cheapest[0]
    starts = [first, last] if first.problem.on_host != last.problem.on_host else [last]
    return [_improved(each, variants) for each in starts]


def _other_blocks(search: _Search) -> list[ReplayedPlan]:
    """For the cheapest plan; in short iterations, for the cheapest with each choice of updates on the host."""
    if search.task.draft or search.task.part or search.is_close(search.effort.blocks_beyond):
        return []
    found: dict[tuple[int, ...], ReplayedPlan] = {}
    for each in search.cheapest:
        found.setdefault(each.problem.on_host, each)
    return [with_other_blocks(each) for each in list(found.values())[: None if search.effort.each_placement else 1]]


# What is tried, in this order, beyond the coarse solutions.
_STEPS = (_other_updates, _around_user_code, _other_large_blocks, _other_tiers, _other_blocks)


def _starts(
    problem: Problem, settings: SolverSettings, on_host: Collection[int] | None, reserve_bytes: int | None
) -> Iterator[tuple[Start, CoarseSolution | None]]:
    """What the coarse solutions choose, and for short iterations two simple starts. Each is worked out when it is asked for.

    Without a solution, only where updates run is decided, and a greedy plan takes the place of the program's.
    """
    solved = False
    for solution in coarse_solutions(problem, settings, on_host, reserve_bytes=reserve_bytes):
        solved = True
        yield start_of(problem, solution.tiers, solution.on_host), solution
    if not solved:
        yield start_of(problem, {}, on_host or ()), None
    if on_host is None and effort_of(problem.stage_count).simple_starts:
        everything = [subgroup.id for subgroup in problem.may_update_on_host]
        if everything:
            yield start_of(problem, {}, everything), None
        yield (problem, {}), None


def start_of(problem: Problem, tiers: Mapping[int, WaitingTier], on_host: Collection[int]) -> Start:
    """What a solution chooses (tiers by period, and subgroups), and the problem that is left when these update on the host."""
    chosen = {(problem.periods[i].block, problem.periods[i].after): tier for i, tier in tiers.items()}
    on_host = in_order_of_need(problem, on_host)
    left = problem if tuple(on_host) == problem.on_host else Problem.of(problem.source, problem.budgets, on_host)
    room = TierCapacity(left, {})
    decisions: Decisions = {}
    for index, period in enumerate(left.periods):
        tier = "host" if index in left.updated else chosen.get((period.block, period.after))
        # Rounding may overfill a tier. The period then gets the fastest other tier with room, or stays.
        if tier is not None and not room.fits(index, tier):
            tier = room.best(index)
        if tier is not None:
            room.take(index, tier)
            decisions[index] = Decision(tier=tier, leave=period.after, start=period.before)
    return left, decisions


def _planned(problem: Problem, settings: SolverSettings, on_host: Collection[int], reserve_bytes: int) -> ReplayedPlan | None:
    """The best plan of the relaxed program in which these subgroups update on the host; None if the host tier is too small."""
    try:
        starts = [start for start, _ in _starts(problem, settings, on_host, reserve_bytes)]
        found = [each for start in starts for each in exact_candidates(*start, settings.write_weight)]
    except InfeasiblePlanError:
        return None
    best = min(found, key=lambda candidate: candidate.cost)
    return with_other_large_blocks(best) if effort_of(problem.stage_count).large_blocks else best


def _together(reports: Sequence[SolverReport]) -> SolverReport:
    """The first report, with the time of all of them. Without a report, one that says "failed"."""
    if not reports:
        return SolverReport(name="none", status="failed")
    times = {name: sum(getattr(report, name) for report in reports) for name in ("build_seconds", "solve_seconds")}
    return reports[0].model_copy(update=times)


def exact_candidates(problem: Problem, start: Decisions, write_weight: float) -> list[ReplayedPlan]:
    """The decisions made feasible: once with all the moves that they ask for, once with only the moves that the budget needs.

    Raises InfeasiblePlanError where the lower tiers are too small.
    """
    filled = evict_furthest(problem, start, early=True, spread=True)
    pruned = prune(problem, filled, _copy_costs(problem, filled))
    first = _best_schedule(problem, filled, write_weight, effort_of(problem.stage_count).leads)
    return [first] if pruned == filled else [first, _best_schedule(problem, pruned, write_weight, (first.lead,))]


def exact_with_starts(problem: Problem, start: Decisions, write_weight: float) -> ReplayedPlan:
    """The decisions made feasible, with prefetches where they say; then by the clock of the replay, as long as that is better.

    Raises InfeasiblePlanError where the lower tiers are too small.
    """
    filled = evict_furthest(problem, on_demand(problem, start), early=True, spread=True)
    given = prefetch_from(problem, filled, {index: decision.start for index, decision in start.items()})
    effort, best = effort_of(problem.stage_count), ReplayedPlan.of(problem, given, write_weight)
    for _ in range(effort.rounds):
        if out_of_time():
            break
        tried = ReplayedPlan.of(problem, schedule(problem, filled, best.clock, lead=0.0), write_weight)
        if tried.cost >= best.cost * effort.better:
            break
        best = tried
    return best


def _best_schedule(problem: Problem, decisions: Decisions, write_weight: float, leads: Sequence[float]) -> ReplayedPlan:
    """Schedule by the ideal clock, replay, schedule again by the replayed clock, and so on. Keep the best."""
    best: ReplayedPlan | None = None
    known: set[tuple[tuple[int, int], ...]] = set()
    # Longer leads come first, and of equal plans the first is kept: a lead absorbs delays that were not measured.
    for lead in leads:
        clock = StageClock.ideal(problem)
        for _ in range(effort_of(problem.stage_count).rounds):
            if best is not None and out_of_time():
                break
            scheduled = schedule(problem, decisions, clock, lead=lead)
            starts = tuple((index, decision.start) for index, decision in scheduled.items())
            if starts in known:
                break  # the replay would give the same clock again
            known.add(starts)
            candidate = ReplayedPlan.of(problem, scheduled, write_weight)
            if best is None or candidate.cost < best.cost:
                best = replace(candidate, lead=lead)
            if candidate.timeline.stall_seconds <= 1e-6 * candidate.timeline.iteration_seconds:
                break
            clock = candidate.clock
    assert best is not None  # there is at least one lead and one round
    return best


def _copy_costs(problem: Problem, decisions: Decisions) -> dict[int, float]:
    """Return the seconds of each copy in, by period; those of the copy out for a final period, which has no copy in."""
    copied_out, costs = copies_out(problem, decisions), dict.fromkeys(decisions, 0.0)
    for index, decision in decisions.items():
        route, period = problem.route(decision.tier), problem.periods[index]
        if not period.final or index in copied_out:
            costs[index] = (route.outward if period.final else route.inward).seconds(period.size_bytes)
    return costs


def without_needless_writes(best: ReplayedPlan) -> ReplayedPlan:
    """Let blocks wait in host memory where that has room, and not on drives, as far as it takes at most 1 % longer."""
    if all(route.tier != "host" for route in best.problem.routes):
        return best
    effort, room = effort_of(best.problem.stage_count), TierCapacity(best.problem, best.decisions)
    movable: list[list[int]] = []  # periods, by block
    for periods in _written(best.problem, best.decisions):
        if all(room.fits(index, "host") for index in periods):
            movable.append(periods)
            for index in periods:
                room.take(index, "host")
    limit, least, most, tried = best.timeline.iteration_seconds * effort.worth_a_write, 0, len(movable), len(movable)
    found = best
    while least < most and not out_of_time():
        others = [index for periods in movable[:tried] for index in periods]
        decisions = best.decisions | {index: replace(best.decisions[index], tier="host") for index in others}
        try:
            each = _best_schedule(best.problem, decisions, best.write_weight, (best.lead,))
            enough = each.timeline.iteration_seconds <= limit
        except InfeasiblePlanError:
            enough = False
        found, least, most = (each, tried, most) if enough else (found, least, tried - 1)
        tried = (least + most + 1) // 2
    return found


def _written(problem: Problem, decisions: Decisions) -> list[list[int]]:
    """The periods that blocks spend on a drive, by block, of those that are written there; the largest blocks come first."""
    written = {problem.periods[index].block for index in copies_out(problem, decisions) if decisions[index].tier == "storage"}
    found: dict[int, list[int]] = {block: [] for block in written}
    for index, decision in decisions.items():
        if decision.tier == "storage" and problem.periods[index].block in written:
            found[problem.periods[index].block].append(index)
    return [found[block] for block in sorted(written, key=lambda block: (-problem.trace.blocks[block].size_bytes, block))]


def with_other_large_blocks(best: ReplayedPlan) -> ReplayedPlan:
    """Let one large block more leave or stay, as long as that makes the plan better. Room is then made by Belady's rule.

    The relaxed program divides blocks, so that it says little about these.
    """

    def variants(best: ReplayedPlan) -> Iterator[Variant]:
        problem, room = best.problem, TierCapacity(best.problem, best.decisions)
        for index in (each for each in large_periods(problem) if each not in problem.updated):
            changed = {each: decision for each, decision in best.decisions.items() if each != index}
            if index not in best.decisions:
                period, tier = problem.periods[index], room.best(index)
                if tier is None:
                    continue
                changed[index] = Decision(tier=tier, leave=period.after, start=period.before)
            try:
                filled = evict_furthest(problem, changed, early=True, spread=True)
            except InfeasiblePlanError:
                continue  # nothing else can leave
            yield problem, schedule(problem, filled, best.clock, lead=best.lead), best.lead

    return _improved(best, variants)


def _improved(best: ReplayedPlan, variants: Callable[[ReplayedPlan], Iterator[Variant]]) -> ReplayedPlan:
    """Replay all variants, go on from the best of them, and end when none is better than that."""
    effort = effort_of(best.problem.stage_count)
    for _ in range(effort.improvements):
        better = best
        for problem, decisions, lead in variants(best):
            if out_of_time():
                break
            try:
                tried = ReplayedPlan.of(problem, decisions, best.write_weight)
            except InfeasiblePlanError:
                continue  # a lower tier is too full
            if tried.cost < better.cost:
                better = replace(tried, lead=lead)
        if better.cost >= best.cost * effort.better:
            break
        best = better
    return best


def with_other_blocks(best: ReplayedPlan) -> ReplayedPlan:
    """Try other blocks around the copies that the iteration waits for, and go on from each variant that is better.

    Ends when none is, or after a counted number of replays.
    """
    effort = effort_of(best.problem.stage_count)
    left = min(effort.exchanges, effort.exchanged_stages // best.problem.stage_count)
    known = {frozenset(best.decisions.items())}
    better: ReplayedPlan | None = best
    while better is not None:
        best, better = better, None
        for decisions in block_exchanges(best, effort.breadth):
            key = frozenset(decisions.items())
            if key in known:
                continue
            if left == 0 or out_of_time():
                break
            left -= 1
            known.add(key)
            try:
                tried = ReplayedPlan.of(best.problem, decisions, best.write_weight)
            except InfeasiblePlanError:
                continue  # a lower tier is too full
            if tried.cost < best.cost * effort.better:
                better = replace(tried, lead=best.lead)
                break
    return best
