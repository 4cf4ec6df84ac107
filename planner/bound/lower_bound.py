"""A lower bound on the iteration time that holds for every plan.

[Note: why it is a bound] Take any plan, and one iteration of its steady state. Look at the instants at which stage s starts
(S_s) and ends (E_s, before anything is freed). Let δ be the stalls. Let p = (after, before) be the time between two consecutive
uses of a block, and t a lower tier. The replay's rules ([Note: execution semantics] in `planner.simulator.simulate`) say the
following.

1. *Memory.* At S_s and at E_s, live_s minus the absent blocks is within the budget. A block is absent only strictly inside a p,
   so from S_(after+1) to E_(before−1). By then its copy out has ended, or a copy from an earlier p of the same epoch was still
   valid (always so for read_only blocks). And its copy in has not begun. (A block that outlives its last use has a p from that
   use to its death, stage before − 1. In that p nothing comes in.) Let O be the share of the copy out that is done, I that of
   the copy in, and d whether the block was dropped. Then absent ≤ d + O − I. This holds for a whole block and for any share of
   one. I ends at d + O.
2. *Copies.* O begins at E_after or later; I ends at S_before or earlier. d of one p is at most the sum of the O of the earlier
   ones in its epoch: in each of them the block was copied out and, since a use follows, in again. Between uses in neighbouring
   stages there is at most a stall, which must hold both copies. A block waits in one tier at a time. A copy has its place in the
   lower tier from its start until the block dies. So d + O of all blocks with a place is within that tier's budget.
3. *Links.* A link carries one block at a time and takes latency + size / rate for each. So between two instants it is busy for
   at most the durations of the stages in between, plus δ.
4. *Updates on the host.* Let h be whether a subgroup updates there ([Note: updates on the host] in
   `planner.problem.host_updates`), and U the share of the update that is done. If h, the states are absent at all instants. The
   parameters are absent between the uses around the update's stage, except for I. The gradients are absent from their last use
   before it on, by O. The stage's workspace is not needed. Copies out, update and copies in each begin when the one before has
   ended, so I ≤ U ≤ O, all up to h. Three things follow one another and take at least the sum of their times: the gradients that
   are there last, the update, and the parameters that are needed first. U begins when the update may begin; I ends before the
   next use. Where user code follows, U has ended when it starts ([Note: user code] in `planner.problem.host_updates`; the rest of
   that note only makes plans slower). The host's processor behaves like a link. The stage, and so the iteration, is shorter by
   the update's time on the device. Moves to or from that stage need 1 − h. If h, a valid copy of the parameters is in the host
   tier, and all blocks have their place there for good. So these places count h, and what other moves of the blocks need comes on
   top where they exclude h.
5. *Shared rates.* At any instant, the rates of all links are those of some set of busy links, or less. So what links carry
   together between two instants is at most (durations + δ) times a point of the convex hull of these rates: [Note: links that
   share rates] in `planner.problem.shared_limits`.
6. *Recomputation* ([Note: recomputation] in `planner.problem.recompute`). Stages, instants, uses and live bytes are those of
   the source trace, and δ is all time beyond its stages, re-runs included. A group runs again before a backward stage, and no
   later than the last use of what it makes, by a stage or by another re-run. Let R_k say whether it does so between the
   instants k and k + 1; these re-runs take no more than δ_k. A block that a re-run makes anew is away between its last use
   before the re-run and the re-run, which both lie in one p. So at an instant k in p it is absent for that reason only if the
   re-run comes later in p: absent is at most ΣR over the spans of p from k on, + d + O − I, where O and I are of the new block,
   and at most 1. A re-run may also use blocks inside a p. A block then may go and come more than once, in several tiers. For
   each tier, let d and O be those of the first time that it goes and I that of the last time that it comes back: absent is at
   most their sum over the tiers. So for such a p the row of one tier at a time is left out. A block with `dies_after` may die
   at its last use instead, if a re-run that reads it later makes it anew: so a p that ends with a death counts too, where a
   re-run may use the block. All else that a re-run needs (its inputs, blocks that live on, workspace) only makes a plan slower.

All of this is linear, and the iteration time is Σ durations + Σ δ. So the minimum is a bound. (A plan without a steady state is
covered too: the rows are linear, so they hold for the mean over many iterations.) Some steps make the program smaller. Each of
them only removes rows or adds rows up, so the bound can only fall:

* Only some instants are considered. Memory rows of the other instants are left out, and link rows between them are summed. Every
  p is rounded outward to instants: its copies may use all of the spans in which it begins and ends.
* Blocks with equal windows form one class. Its variables are the members' sums by size, at the seconds per byte of the largest
  member, for which latency counts least. Subgroups with proportional sizes form classes too. Such a class counts, by size, the
  least time on the host and the most time on the device among its members.
* Where passes repeat ([Note: iterations that repeat] in `planner.problem.repeats`), the same instants are taken in each of the
  passes, and the rows of like ones are added up. A stall is then the sum of those of all passes; blocks of different passes have
  equal windows, and form classes as above. Like windows of one block between two writes have the mean as their variables, and no
  limit to d. In a p that holds all passes, O and I at an instant of one pass stand for the steps of all; what is absent there is
  at most d + O after the last pass − I before the first, and its place at least d + O before the first.
* d + O − I ≥ 0 is not required, and memory rows that hold without any move are left out. A window is left out if no instant in
  it exceeds the budget and no later window profits from it: a move there only costs time.

The bound does not see that a copy in takes all of its room when it begins, and that a copy out gives its room back only when it
ends. Where whole blocks are exchanged in one stall, plans take longer (trace `swap`: 14 s, bound 8 s).

Where there are few blocks, a bound with shares of blocks is weak. Then absent is 0 or 1 for each block. The program is an
integer program, and the solver's dual bound counts. Fewer instants never raise the bound, and neither does more budget: the rows
only loosen, and neither of them decides whether blocks are whole.

Floating point: for a linear program, the bound is what the solver's row prices prove by weak duality, however inexact they are
(`_weak_dual`). For an integer program it is the solver's dual bound. Its tolerances are 1e-7 on numbers near one, since
time is counted in hundredths of the ideal iteration and bytes in budgets. Subtracting 1e-6 of the bound covers them and all
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum, inf

import numpy as np

from planner.bound.classes import recreatable_bytes, rerun_classes, update_classes, visits
from planner.bound.formulation import build_bound
from planner.bound.windows import Instants, copy_classes
from planner.errors import SolverError
from planner.lp import Program, solve_program
from planner.problem import DEFAULT_THREADS, Problem, SolverSettings, in_units, made_by, out_of_time, repeats_of, solver_unit

_INSTANTS = 16
_INSTANTS_FIRST = 8  # for long iterations: a fifth of the time of 16, and often as good
_INSTANTS_SHORT = 32  # for iterations of at most _SHORT_STAGES stages: there they cost little time, and 16 give a weak bound
_SHORT_STAGES = 64
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
    """Return the seconds that an iteration takes at least, under any plan; see [Note: why it is a bound].

    `max_instants`: number of instants of the iteration to consider. More instants may raise the bound and take longer. None: 32
    for short iterations; for others 8 and, if the bound is below `enough_seconds` then, 16. `max_whole`: up to how many stages of
    idle blocks, summed over blocks and tiers, blocks count as whole.

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
    tried = (_INSTANTS_SHORT,) if problem.stage_count <= _SHORT_STAGES else (_INSTANTS_FIRST, _INSTANTS)
    for most in tried if max_instants is None else (max_instants,):
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

    In iterations of about a hundred stages, 64 raise it by up to 4 %. Where microbatches follow one another, three passes and the
    step share them.
    """
    return (32, 64) if _SHORT_STAGES < stages <= 200 else (24,) if stages > 500 else ()


def _proved_seconds(problem: Problem, max_instants: int, max_whole: int, settings: SolverSettings) -> float:
    """The bound with so many instants. Raises SolverError where the solver fails or does not finish."""
    unit = solver_unit(problem)
    idle = sum(period.gap for period in problem.periods) * len(problem.routes)
    whole = idle <= max_whole
    instants = Instants.of(problem, max_instants, None if whole else repeats_of(problem.trace))
    scaled = in_units(problem, unit)
    updates = update_classes(scaled, instants, apart=whole, unit_seconds=unit)
    reruns = rerun_classes(problem, instants, apart=whole, unit_seconds=unit)
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
    stall = _least_stall(program, whole=whole, settings=settings)
    return (problem.trace.ideal_seconds + stall * unit) * (1 - _MARGIN)


def _simple_seconds(problem: Problem) -> float:
    """The larger of two times: the sum of the stage durations, and the time to move what must cross the links in one iteration.

    Where a stage's live bytes exceed the budget by x, at least x bytes of idle blocks must be absent. Each of these blocks is
    copied in once before its next use. So x minus the bytes of blocks that are not used again cross the inward links. A block
    that some stage writes is also copied out at least once between two writes. So x minus the bytes of never-written blocks
    around the stage cross the outward links. What a recompute group can make is taken off x. Several tiers work at the same time:
    their rates add up.
    """
    compute = problem.trace.ideal_seconds
    if not problem.routes:
        return compute
    inward = sum(route.inward.bytes_per_second for route in problem.routes)
    outward = sum(route.outward.bytes_per_second for route in problem.routes)
    worst = compute
    for stage, live in enumerate(problem.live_bytes):
        absent = live - problem.budgets.device_bytes
        if absent <= 0:
            continue
        periods = [problem.periods[index] for index in problem.covering[stage]]
        absent -= recreatable_bytes(problem, periods)
        clean = sum(period.size_bytes for period in periods if period.read_only)
        final = sum(period.size_bytes for period in periods if period.final)
        worst = max(worst, (absent - final) / inward, (absent - clean) / outward)
    return worst


def _least_stall(program: Program, *, whole: bool, settings: SolverSettings) -> float:
    """Return the proved lower bound on the program's objective.

    `whole`: it is an integer program. Raises SolverError when the solver fails, and when a linear program is not solved in
    time.
    """
    solved = solve_program(program, settings, linear=not whole, vertex=False)
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
