"""Solve the program over coarse time: as an integer program where it is small, otherwise relaxed first.

Reports have exactly what the solver proved. The program also says which recompute groups should run again.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.errors import SolverError
from planner.ilp.formulation import Resolution, coarse_program
from planner.ilp.model import CoarseModel
from planner.lp import solve_program
from planner.problem import Problem, RerunPlaces, SolverSettings, host_bytes, needed_again, out_of_time
from planner.schema import SolverReport, Subgroup, WaitingTier

# Longer iterations begin with the linear relaxation: a whole integer program often finds nothing within the limit.
MAX_INTEGER_STAGES = 64
MANY_STAGES = 900  # longer iterations get fewer classes of blocks, and no integer program: each would take ten seconds
_FEW_CLASSES = 120

# For one lower tier. With 64 segments, plans of long iterations are up to 3 % slower; with 250, they are no faster, and take
# twice as long.
_FINE = Resolution(max_segments=140, window=6)
_SEVERAL_TIERS = Resolution(max_segments=64, window=4)  # here more segments gain little, and take much longer
# To decide what updates on the host. A finer program often decides better, by up to 5 %, but takes 20 s where stages are many.
_ROUGH = Resolution(max_segments=24, window=3, classes_at_peak=_FEW_CLASSES)
_LESS_ROUGH = Resolution(max_segments=96, window=4, classes_at_peak=_FEW_CLASSES)
_LESS_ROUGH_STAGES = 500  # the most for which it decides, with one lower tier
_RERUNS = Resolution(max_segments=140, window=4, classes_at_peak=200)
_RERUNS_ROUGH = Resolution(max_segments=64, window=3, classes_at_peak=100)
_LARGE = 0.05  # of the budget. With smaller blocks, plans are no faster for the room of one.
_ROUNDED_WELL = 1.005  # of the shares of updates, what whole ones may take longer: about the model's own error
_ROUNDING = 1e-3  # solvers return shares with errors of about this size
# Nodes of the search tree of an integer program. A whole one of 61 stages takes 120 s else, and leaves none to make its solution
# exact. With twice as many, plans are as often worse as better.
_MAX_NODES = 100
_MAX_NODES_COMPLETING = 5  # where the program completes a relaxed solution. Fifty find no better ones.


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseSolution:
    """Tiers by period index, subgroups that update on the host, and the solver's report. `values`: of the program's variables.

    reserve_bytes: what the program left free, see `room_bytes`.
    """

    tiers: dict[int, WaitingTier]
    on_host: frozenset[int]
    report: SolverReport
    values: Sequence[float] = ()
    reserve_bytes: int = 0


def coarse_solutions(
    problem: Problem,
    settings: SolverSettings,
    on_host: Collection[int] | None = None,
    *,
    reserve_bytes: int | None = None,
) -> Iterator[CoarseSolution]:
    """Yield solutions to make exact, the first ones first. Each is worked out when it is asked for.

    Short iterations: the integer program's, and the relaxed one's, rounded, unless the first is proved optimal. Long iterations:
    the relaxed one's, rounded; then what was not whole as an integer program. The relaxed program is solved once more with
    `room_bytes`, and comes before what follows from it. All this also without updates on the host, where that looks better.
    With `reserve_bytes`: relaxed programs only, which leave so much of the budget free.

    on_host: the subgroups that update on the host, if that is already decided. If not, the relaxed program decides it at a low
    resolution first. Yields nothing where all runs of the solver fail, or no time is left.
    """
    if out_of_time():
        return
    decided = on_host is not None
    subgroups = [subgroup for subgroup in problem.may_update_on_host if on_host is None or subgroup.id in on_host]
    short = problem.stage_count <= MAX_INTEGER_STAGES
    with contextlib.suppress(SolverError):
        if short and reserve_bytes is None:
            model = coarse_program(
                problem, _resolution(problem), subgroups, write_weight=settings.write_weight, apart=True, decided=decided
            )
            whole = solve(model, relaxed=False, vertex=True, settings=settings, max_nodes=_MAX_NODES)
            yield whole
            if whole.report.status == "optimal":
                return
    with contextlib.suppress(SolverError):
        rough: CoarseSolution | None = None
        if not decided and subgroups:
            rough = _rough(problem, settings, subgroups, decided=False)
            chosen = in_order_of_need(problem, rough.on_host)
            # Fixed from here on: rounded at the end, the moves of a subgroup that is half here and half there would fit neither.
            subgroups = [subgroup for subgroup in subgroups if subgroup.id in chosen]
        yield from _refined(problem, settings, subgroups, rough, reserve_bytes)
        if not short and rough is not None and subgroups:
            # Shares of updates may fit where whole ones do not: near the floor, none at all may be better.
            some = _relaxed_seconds(_rough(problem, settings, subgroups, decided=True))
            if some <= _relaxed_seconds(rough) * _ROUNDED_WELL:
                return  # no choice of updates is better than `rough`
            none = _rough(problem, settings, (), decided=True)
            if _relaxed_seconds(none) < some:
                yield from _refined(problem, settings, (), none, reserve_bytes)


def room_bytes(problem: Problem) -> int:
    """Return how much of the budget a relaxed program should leave free: the bytes of the largest block that can leave.

    The program divides blocks, so its solutions fill the device; where blocks are large, no whole one then finds room to come in.
    0 where that block is a small share of the budget, and for short iterations, whose integer program has whole blocks.
    """
    return max((problem.periods[index].size_bytes for index in large_periods(problem)), default=0)


def large_periods(problem: Problem) -> list[int]:
    """Return the periods of blocks that are a large share of the budget; none in short iterations, see `room_bytes`."""
    if problem.stage_count <= MAX_INTEGER_STAGES:
        return []
    large = _LARGE * problem.budgets.device_bytes
    return [index for index, period in enumerate(problem.periods) if period.size_bytes > large]


def _refined(
    problem: Problem,
    settings: SolverSettings,
    subgroups: Sequence[Subgroup],
    rough: CoarseSolution | None,
    reserve_bytes: int | None,
) -> Iterator[CoarseSolution]:
    """Solutions in which exactly `subgroups` update on the host. rough: what decided that; the first report counts its time."""
    integer = reserve_bytes is None
    for reserve in (reserve_bytes,) if reserve_bytes is not None else dict.fromkeys((0, room_bytes(problem))):
        if reserve and integer and out_of_time():
            return
        model = coarse_program(
            problem, _resolution(problem), subgroups, write_weight=settings.write_weight, decided=True, reserve_bytes=reserve
        )
        relaxed = replace(_relaxed(problem, model, settings, vertex=True), reserve_bytes=reserve)
        yield relaxed if rough is None else _with_time_of(rough, relaxed)
        if integer and MAX_INTEGER_STAGES < problem.stage_count <= MANY_STAGES and not out_of_time():
            yield replace(_complete(model, relaxed, settings), reserve_bytes=reserve)


def _resolution(problem: Problem) -> Resolution:
    resolution = _FINE if len(problem.routes) == 1 else _SEVERAL_TIERS
    return resolution if problem.stage_count <= MANY_STAGES else replace(resolution, classes_at_peak=_FEW_CLASSES)


def _rough(problem: Problem, settings: SolverSettings, subgroups: Sequence[Subgroup], *, decided: bool) -> CoarseSolution:
    """Solve the relaxed program at a low resolution. subgroups: those that may update on the host, or (decided) that do."""
    fine = len(problem.routes) == 1 and problem.stage_count <= _LESS_ROUGH_STAGES
    resolution = _LESS_ROUGH if fine else _ROUGH
    model = coarse_program(problem, resolution, subgroups, write_weight=settings.write_weight, decided=decided)
    return _relaxed(problem, model, settings, vertex=False)


def _relaxed(problem: Problem, model: CoarseModel, settings: SolverSettings, *, vertex: bool) -> CoarseSolution:
    """Solve the relaxed program, once for each problem: a plan is drafted first, and then made well."""
    key = (model.asked, vertex)
    if key not in problem.memo:
        problem.memo[key] = solve(model, relaxed=True, vertex=vertex, settings=settings)
    found: CoarseSolution = problem.memo[key]
    return found


def rerun_shares(
    problem: Problem, places: RerunPlaces, settings: SolverSettings, *, reserve_bytes: int = 0
) -> tuple[float, dict[int, float]]:
    """Solve the relaxed coarse program in which groups may run again. Return its cost and how much of each group (id) does.

    Costs of one problem with other places are comparable. Groups of which nothing runs again are left out; a rough program tells
    first whether there are others, and with several lower tiers that is all. Groups that are alike and in the same segments have
    the same share. Raises SolverError where the solver fails.
    """
    cost, shares = 0.0, dict[int, float]()
    for resolution in (_RERUNS_ROUGH, _RERUNS):
        if out_of_time():
            break
        updates = problem.may_update_on_host
        model = coarse_program(
            problem, resolution, updates, write_weight=settings.write_weight, places=places, reserve_bytes=reserve_bytes
        )
        solved = solve_program(model.program, settings, linear=True, vertex=False)
        if not solved.optimal:
            raise SolverError(f"HiGHS did not solve the program for re-runs in {settings.time_limit_seconds} s")
        cost = solved.objective
        shares = {group: solved.values[r] for each, r in zip(model.reruns, model.again, strict=True) for group in each.groups}
        shares = {group: share for group, share in shares.items() if share > _ROUNDING}
        if not shares or len(problem.routes) > 1 or problem.stage_count <= _RERUNS_ROUGH.max_segments:
            break
    return cost, shares


def in_order_of_need(problem: Problem, on_host: Collection[int]) -> list[int]:
    """Sort subgroups by the stage that first needs their parameters again; return as many as fit into the host tier."""
    limit = next((route.budget_bytes for route in problem.routes if route.tier == "host"), None)
    trace, fitting, filled = problem.source, list[int](), 0
    for number in sorted(on_host, key=lambda number: (needed_again(trace, trace.subgroups[number]), number)):
        size = host_bytes(trace, trace.subgroups[number])
        if limit is None or filled + size <= limit:
            fitting.append(number)
            filled += size
    return fitting


def _relaxed_seconds(solution: CoarseSolution) -> float:
    """The objective of a relaxed solution."""
    assert solution.report.bound_seconds is not None  # relaxed programs are solved to the optimum
    return solution.report.bound_seconds


def _with_time_of(first: CoarseSolution, second: CoarseSolution) -> CoarseSolution:
    """The second solution, whose report counts the time of both."""
    report = second.report.model_copy(
        update={
            "bound_seconds": None,  # the second bound holds for these updates only
            "build_seconds": first.report.build_seconds + second.report.build_seconds,
            "solve_seconds": first.report.solve_seconds + second.report.solve_seconds,
        }
    )
    return replace(second, report=report)


def solve(
    model: CoarseModel, *, relaxed: bool, vertex: bool, settings: SolverSettings, max_nodes: int | None = None
) -> CoarseSolution:
    """Solve a coarse program.

    relaxed: solve the linear relaxation and round it. The report then has a bound, the relaxation's objective; it has no
    objective of its own and no gap. vertex: end in a vertex, which has few fractions; takes more time.

    Waits for about the time limit at most. The objective includes the ideal iteration time. The report is in seconds. Raises
    SolverError when the solver fails, or when the limit passes with no solution.
    """
    began = time.perf_counter()
    solved = solve_program(model.program, settings, linear=relaxed, vertex=vertex, max_nodes=max_nodes)
    seconds = time.perf_counter() - began
    if not solved.values:
        raise SolverError(f"HiGHS found no solution in {settings.time_limit_seconds} s; give a longer solver_time_limit")
    objective = max(solved.objective * model.problem.unit_seconds, 0.0)
    proved = solved.objective if relaxed else solved.bound
    bound = None if proved is None else proved * model.problem.unit_seconds
    report = SolverReport(
        name="HiGHS",
        status="optimal" if solved.optimal and not relaxed else "feasible",
        objective_seconds=None if relaxed else objective,
        bound_seconds=None if bound is None else max(bound, 0.0) if relaxed else bound,
        gap=None if relaxed or bound is None else max(0.0, (objective - bound) / max(abs(objective), 1e-12)),
        build_seconds=model.build_seconds,
        solve_seconds=seconds,
    )
    tiers, on_host = _chosen_tiers(model, solved.values), _on_host(model, solved.values)
    return CoarseSolution(tiers=tiers, on_host=on_host, report=report, values=solved.values)


def _complete(model: CoarseModel, relaxed: CoarseSolution, settings: SolverSettings) -> CoarseSolution:
    """Solve the integer program in which all that is whole in a relaxed solution stays as it is. Changes the program.

    The bound in the report is the relaxed program's. Raises SolverError where no solution is found.
    """
    program = model.program
    # Few choices are left, so that this is possible for long iterations.
    for entry in model.periods:
        value = relaxed.values[entry.chosen]
        program.lower[entry.chosen] = float(value > 1 - _ROUNDING)
        program.upper[entry.chosen] = float(value > _ROUNDING)
    whole = solve(model, relaxed=False, vertex=False, settings=settings, max_nodes=_MAX_NODES_COMPLETING)
    bound, objective = relaxed.report.bound_seconds, whole.report.objective_seconds
    assert bound is not None and objective is not None  # the one was relaxed, the other not
    changed = {"status": "feasible", "bound_seconds": bound, "gap": max(0.0, (objective - bound) / max(objective, 1e-12))}
    # The relaxed solution counts the time to build it.
    return replace(whole, report=whole.report.model_copy(update={**changed, "build_seconds": 0.0}))


def _chosen_tiers(model: CoarseModel, values: Sequence[float]) -> dict[int, WaitingTier]:
    """Read the tier of each period from a solution."""
    found: list[tuple[tuple[int, int, int, tuple[int, ...]], dict[WaitingTier, float]]] = []
    for entries in model.by_period():
        shares = {entry.route.tier: values[entry.chosen] for entry in entries if values[entry.chosen] > _ROUNDING}
        period, size = entries[0].period, entries[0].block_class.size_bytes
        found += [((period.begin, period.end, size, period.indices), shares)] if shares else []
    tiers: dict[int, WaitingTier] = {}
    # Around any time each tier gets about as many bytes as in the solution: what rounding leaves is carried on.
    carried: dict[WaitingTier, float] = defaultdict(float)
    for (_, _, size, indices), shares in sorted(found, key=lambda each: each[0]):
        best = max(shares, key=shares.__getitem__)
        if shares[best] <= 1 - _ROUNDING:
            for tier, share in shares.items():
                carried[tier] += share * size
            best = max(shares, key=carried.__getitem__)
            if carried[best] < size / 2:
                continue
            carried[best] -= size
        tiers.update(dict.fromkeys(indices, best))
    return tiers


def _on_host(model: CoarseModel, values: Sequence[float]) -> frozenset[int]:
    """Read the subgroups that update on the host; fractions are rounded in the same way."""
    trace, chosen, carried = model.problem.trace, set[int](), 0.0
    shares = {number: values[update.chosen] for update in model.updates for number in update.windows.subgroups}
    for number, share in sorted(shares.items()):
        size = host_bytes(trace, trace.subgroups[number])
        carried += share * size
        if share > _ROUNDING and carried >= size / 2:
            chosen.add(number)
            carried -= size
    return frozenset(chosen)
