"""A lower bound on the iteration time that holds for every plan.

[Note: why it is a bound] Take any plan and its steady state, one iteration of it, and in it the instants at
which stage s starts (S_s) and ends (E_s, before anything is freed). Let δ be the stalls. From the replay's
rules ([Note: execution semantics] in `planner.simulator.simulate`), with p = (after, before) a time between two
consecutive uses of a block and t a lower tier:

1. *Memory.* At S_s and E_s alike, live_s less the blocks that are absent is within the budget. A block is
   absent only strictly inside a p, so from S_(after+1) to E_(before−1); its copy out has then ended, or a copy
   of an earlier p of the same epoch was still valid (read_only blocks: always); and its copy in has not begun.
   (A block that outlives its last use has a p from there to its death, stage before − 1, in which nothing comes in.)
   Let O be the share of the copy's time out that has passed, I that of its copy in, d whether the block was
   dropped. Then absent ≤ d + O − I, for a whole block as for any share of one, and I ends at d + O.
2. *Copies.* O begins at E_after at the earliest and I ends at S_before at the latest. d of one p is at most the
   sum of the O of the earlier ones in its epoch: each of them has copied the block out and, since a use
   follows, in again. Between uses in neighbouring stages there is a stall at most, which must hold both copies.
   A block waits in one tier at a time. A copy has its place below from its begin until the block dies, so
   d + O of all blocks with a place is within the lower tier's budget.
3. *Links.* A link carries one block at a time, latency + size / rate each, so between two instants it is busy
   for no longer than the stages' durations in between plus δ.

4. *Updates on the host.* Let h be whether a subgroup updates there ([Note: updates on the host] in `planner.problem`),
   U the share of the update's time that has passed. Then its states are absent at all instants; its parameters
   between the uses around its stage but for I, its gradients from their last use before it on, by O, and its stage's
   workspace. Each of copies out, update and copies in begins when the one before has ended, so I ≤ U ≤ O, all up to h,
   and the gradients that are there last, the update and the parameters that are needed first take no less than the
   sum of their times. U begins when the update may; I ends before the next use. Where user code follows, U has ended
   when that starts ([Note: user code] in `planner.problem.user_code`; the rest of that note only makes plans slower). The host's
   processor is a link like others. The stage, and so the iteration, is shorter by the update's time on the device.
   Moves to or from the stage need 1 − h; where h, a valid copy of the parameters waits in the host tier. All blocks
   have their place there.
5. *Shared rates.* What links carry together between two instants is within the shared rate · (durations + δ).

All of this is linear, and the iteration time is Σ durations + Σ δ: its minimum is a bound. (Where a plan has
no steady state, the mean over many iterations fulfils the same: the rows are linear.) What makes it cheap only
takes rows away or adds up rows, so that the bound can only fall:

* Only some instants are looked at: memory rows of the others are left out, link rows between them summed, and
  every p rounded outward to instants: its copies may use all of the spans in which it begins and ends.
* Blocks with equal windows are one class: the sum of their variables by size, at the seconds per byte of the
  largest member (latency weighs the least on it). Subgroups likewise, if their sizes are proportional, with the
  least time on the host and the most on the device by size among them.
* d + O − I ≥ 0 is not asked for, and memory rows that hold without any move are left out. Windows in which no
  instant exceeds the budget, and that no later one profits from, are left out too: to move there only costs.

What it does not see: that a copy in takes all of its room when it begins, and a copy out gives it back when it
ends. Where whole blocks change places in one stall, the plans take longer (trace `swap`: 14 s, bound 8 s).

Where there are few blocks, shares of a block would make the bound weak. Then absent is 0 or 1, block by block:
an integer program, of which the solver's dual bound counts. Fewer instants never raise the bound, nor does
more budget: the rows only loosen, and neither decides whether blocks are whole.

Floating point: of a linear program, what counts is what the solver's row prices prove by weak duality, however
inexact they are (`planner.bound.model`); of an integer program, the dual bound of the solver, whose tolerances
(1e-7 on numbers near one, since time is counted in hundredths of the ideal iteration and bytes in budgets) and
all rounding are covered by taking off 1e-6 of the bound.
"""

from __future__ import annotations

from dataclasses import replace

from planner.bound.host_updates import update_classes
from planner.bound.model import build_bound
from planner.bound.solve import least_stall
from planner.bound.windows import Instants, copy_classes
from planner.errors import SolverError
from planner.lp import host_update_candidates
from planner.problem import DEFAULT_THREADS, Problem, SolverSettings, in_units

__all__ = ["lower_bound_seconds"]

_INSTANTS = 16
_INSTANTS_SHORT = 32  # in iterations of at most _SHORT stages: there they cost little, and 16 say too little
_SHORT = 64
_UNITS_PER_ITERATION = 100.0
_MARGIN = 1e-6
_MAX_WHOLE = 32  # stages in which blocks are idle, by tier; beyond, whole blocks may take seconds to prove


def lower_bound_seconds(
    problem: Problem,
    *,
    max_instants: int | None = None,
    time_limit_seconds: float = 10.0,
    threads: int = DEFAULT_THREADS,
) -> float:
    """Seconds that an iteration takes at the least, whatever the plan; see [Note: why it is a bound].

    `max_instants`: how many instants of the iteration to look at; more may raise the bound, and cost time (None: 32 for
    short iterations, 16 for others).
    Blocks for about `time_limit_seconds` at the most. At least the simple bound, also where the solver fails,
    is missing or does not finish: the sum of the stage durations, and what must cross the links.
    """
    updatable = host_update_candidates(problem)
    saved = sum(subgroup.device_seconds for subgroup in updatable)
    simple = max(problem.trace.ideal_seconds - saved, 0.0) if updatable else _simple_seconds(problem)
    settings = SolverSettings(time_limit_seconds=time_limit_seconds, gap=0.0, threads=threads)
    if not updatable and (not problem.routes or problem.everything_fits):
        return simple
    unit = problem.trace.ideal_seconds / _UNITS_PER_ITERATION or 1.0
    if max_instants is None:
        max_instants = _INSTANTS_SHORT if problem.stage_count <= _SHORT else _INSTANTS
    instants = Instants.of(problem, max_instants)
    idle = sum(period.gap for period in problem.periods) * len(problem.routes)
    whole = idle <= _MAX_WHOLE
    scaled = in_units(problem, unit)
    updates = update_classes(scaled, instants, apart=whole, unit_seconds=unit)
    program = build_bound(
        scaled,
        replace(instants, span_seconds=tuple(seconds / unit for seconds in instants.span_seconds)),
        copy_classes(problem, instants, [update.subgroups for update in updates], apart=whole),
        updates,
        whole=whole,
    )
    try:
        stall = least_stall(program, whole=whole, settings=settings)
    except SolverError:
        return simple
    return max(simple, (problem.trace.ideal_seconds + stall * unit) * (1 - _MARGIN))


def _simple_seconds(problem: Problem) -> float:
    """The largest of: the sum of the stage durations, and what must cross the links in one iteration.

    At a stage whose live bytes exceed the budget by x, at least x bytes of idle blocks must be absent. Each
    is copied in once before its next use, so x bytes less those of blocks that are not used again cross the inward links;
    and those that some stage writes are also copied out at least once between two writes, so x less the bytes of
    never-written blocks around the stage cross the outward links. Several tiers work side by side: their rates add up.
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
        clean = sum(period.size_bytes for period in periods if period.read_only)
        final = sum(period.size_bytes for period in periods if period.final)
        worst = max(worst, (absent - final) / inward, (absent - clean) / outward)
    return worst
