"""A lower bound on the iteration time that holds for every plan: `docs/lower-bound.md` proves it, and says what it does not see.

Rows may be left out or added up: the bound can only fall. A row that some plan breaks would make it wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum, inf

import numpy as np

from planner.bound.classes import rerun_classes, visits
from planner.bound.formulation import build_bound
from planner.bound.windows import Instants, copy_classes
from planner.errors import SolverError
from planner.lp import Program, host_update_classes, solve_program
from planner.problem import (
    DEFAULT_THREADS,
    InactivePeriod,
    Problem,
    SolverSettings,
    bytes_by_stage,
    in_units,
    made_by,
    out_of_time,
    repeats_of,
)

_INSTANTS = 16
_INSTANTS_FIRST = 8  # for long iterations: a fifth of the time of 16, and often as good
_INSTANTS_REPEATED = 20  # where passes repeat: three of them and the step share the instants. 24 take three times as long.
_INSTANTS_SHORT = 32  # for iterations of at most _SHORT_STAGES stages: there they cost little time, and 16 give a weak bound
_SHORT_STAGES = 64
_INSTANTS_MORE = 64  # for iterations of about a hundred stages; 128 give the same bound. See docs/policies.md
_MARGIN = 1e-6
_SECONDS = 10.0  # for each number of instants
# Stages in which blocks are idle, summed over blocks and tiers, up to which blocks count as whole. More may take seconds to
# solve.
MAX_WHOLE = 32


def lower_bound_seconds(
    problem: Problem,
    *,
    max_instants: int | None = None,
    max_whole: int = MAX_WHOLE,
    threads: int = DEFAULT_THREADS,
    enough_seconds: float = inf,
) -> float:
    """Return the seconds that an iteration takes at least, under any plan; see `docs/lower-bound.md`.

    `max_instants`: number of instants of the iteration to consider. More instants may raise the bound and take longer. None: 32
    for short iterations, 20 where passes repeat; for others 8 and, if the bound is below `enough_seconds` then, 16.
    `max_whole`: up to how many stages of idle blocks, summed over blocks and tiers, blocks count as whole.

    Waits for at most about ten seconds for each number of instants, and no longer than planning may take. The simple
    bound holds where the solver fails or does not finish: the sum of the stage durations, and the time to move over the links
    what must cross them.
    """
    updatable = problem.may_update_on_host
    saved = sum(subgroup.device_seconds for subgroup in updatable)
    best = max(problem.trace.ideal_seconds - saved, 0.0) if updatable else _simple_seconds(problem)
    settings = SolverSettings(time_limit_seconds=_SECONDS, gap=0.0, threads=threads)
    if not updatable and (not problem.routes or problem.everything_fits):
        return best
    if max_instants is not None:
        tried: tuple[int, ...] = (max_instants,)
    elif problem.stage_count <= _SHORT_STAGES:
        tried = (_INSTANTS_SHORT,)
    else:
        tried = (_INSTANTS_FIRST, _INSTANTS) if repeats_of(problem.trace) is None else (_INSTANTS_REPEATED,)
    for most in tried:
        if out_of_time():
            break
        try:
            best = max(best, _proved_seconds(problem, most, max_whole, settings))
        except SolverError:
            break
        if best >= enough_seconds:
            break
    return best


def more_instants(stages: int) -> tuple[int, ...]:
    """Return numbers of instants beyond the usual ones that may raise the bound of an iteration of so many stages, in seconds.

    In iterations of about a hundred stages, 64 raise it by up to 4 %.
    """
    return (_INSTANTS_MORE,) if _SHORT_STAGES < stages <= 200 else ()


def _proved_seconds(problem: Problem, max_instants: int, max_whole: int, settings: SolverSettings) -> float:
    """The bound with so many instants. Raises SolverError where the solver fails or does not finish."""
    idle = sum(period.gap for period in problem.periods) * len(problem.routes)
    whole = idle <= max_whole
    instants = Instants.of(problem, max_instants, None if whole else repeats_of(problem.trace))
    scaled = in_units(problem)
    unit = scaled.unit_seconds
    updates = host_update_classes(scaled, instants, problem.may_update_on_host, apart=whole)
    reruns = rerun_classes(scaled, instants, apart=whole)
    program = build_bound(
        scaled,
        replace(instants, span_seconds=tuple(seconds / unit for seconds in instants.span_seconds)),
        copy_classes(
            problem,
            instants,
            [update.subgroups for update in updates],
            apart=whole,
            made_by=made_by(problem.source, [each.groups for each in reruns]),
            visits=visits(problem.source),
        ),
        updates,
        reruns,
        whole=whole,
    )
    stall = _least_stall(program, whole=whole, simplex=max_instants < _INSTANTS_MORE, settings=settings)
    return (problem.trace.ideal_seconds + stall * unit) * (1 - _MARGIN)


def _simple_seconds(problem: Problem) -> float:
    """The larger of two times: the sum of the stage durations, and the time to move what must cross the links in one iteration.

    Where a stage's live bytes exceed the budget by x, at least x bytes of idle blocks must be absent. Each of these blocks is
    copied in once before its next use. So x minus the bytes of blocks that are not used again cross the inward links. A block
    that some stage writes is also copied out at least once between two writes. So x minus the bytes of never-written blocks
    around the stage cross the outward links. What a recompute group can make is taken off x. Several tiers work at the same time:
    their rates add up.
    """
    inward = sum(route.inward.bytes_per_second for route in problem.routes)
    outward = sum(route.outward.bytes_per_second for route in problem.routes)
    made = {block for group in problem.source.recompute for block in group.blocks}

    def idle(counts: Callable[[InactivePeriod], bool]) -> list[int]:
        periods = (period for period in problem.periods if counts(period))
        return bytes_by_stage(((p.after + 1, p.before, p.size_bytes) for p in periods), problem.stage_count)

    made_anew, clean, final = idle(lambda p: p.block in made), idle(lambda p: p.read_only), idle(lambda p: p.final)
    worst = problem.trace.ideal_seconds
    for stage, live in enumerate(problem.live_bytes):
        absent = live - problem.budgets.device_bytes
        if absent > 0:  # then there are links
            absent -= made_anew[stage]
            worst = max(worst, (absent - final[stage]) / inward, (absent - clean[stage]) / outward)
    return worst


def _least_stall(program: Program, *, whole: bool, simplex: bool, settings: SolverSettings) -> float:
    """Return the proved lower bound on the program's objective.

    `whole`: it is an integer program. `simplex`: a linear one is tried by that method first; where instants are many, the
    interior point method is two to seven times as fast. Raises SolverError when the solver fails, and when a linear program is
    not solved in time.
    """
    # With steepest edges, the bound takes half of the time or less; the coarse program takes a third longer.
    solved = solve_program(program, settings, linear=not whole, vertex=False, simplex=simplex, devex=False)
    if not whole and not solved.optimal:  # the interior point method got stuck
        solved = solve_program(program, settings, linear=True)
    # After a time limit the bound is valid even where no solution was found.
    if solved.bound is not None:
        return solved.bound
    if not solved.optimal:
        raise SolverError(f"HiGHS proved no lower bound in {settings.time_limit_seconds} s; the simple bound holds")
    return solved.objective if whole else _weak_dual(program, solved.prices)


def _weak_dual(program: Program, given: Sequence[float]) -> float:
    """Return the bound that the solver's row prices π prove by weak duality, however inexact they are.

    For rows a·x ≥ b, costs c of shares x ∈ [0, 1], and stalls ≥ 0 of cost 1: π b + Σ over the shares of min(0, c − π a).
    """
    least, most = np.array(program.least), np.array(program.most)
    at_least = np.isfinite(least)
    # π ≥ 0 for a·x ≥ b, π ≤ 0 for a·x ≤ b: with other signs, a price proves nothing.
    prices = np.where(at_least, np.maximum(given, 0.0), np.minimum(given, 0.0))
    right = fsum(prices * np.where(at_least, least, most))
    terms = np.repeat(prices, np.diff(program.starts)) * np.array(program.factors)
    load = np.bincount(program.columns, weights=terms, minlength=len(program.costs))
    costs, shares = np.array(program.costs), np.isfinite(program.upper)
    # So that no stall is worth more than its cost (π a ≤ 1), however long it is.
    scale: float = 1.0 / max(1.0, *load[~shares].tolist())
    return scale * right + fsum(np.minimum(0.0, costs - scale * load)[shares])
