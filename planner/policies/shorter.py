"""Plans for shorter inputs: a plan without the moves and re-runs that shorter inputs have room for.

[Note: Thinned plans]
A plan is made for the longest inputs. Shorter ones run the same stages over the same blocks, which are smaller: so the plan holds
for them, but moves, or drops and makes again, blocks for which there would be room. The trace says how sizes and times depend on
the length. At each length the plan is replayed with fewer and fewer re-runs, the longest for what they spare left out first, and
then with fewer and fewer moves, the largest first, as long as it fits and ends no later. Blocks that are away when an iteration
ends are away as ever, so that each iteration finds blocks where any of these plans expects them.

Where stages still wait for much then, the moves are made anew for that length, with the same re-runs and the same blocks away
when an iteration ends: copies begin earlier where there is room. Such moves are kept where they end clearly earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from planner.errors import TeraioError
from planner.policies.optimise import exact_candidates
from planner.policies.predictions import prediction, with_predictions
from planner.problem import DEFAULT_WRITE_WEIGHT, Problem, decisions_of, folded, made_bytes, recompute_seconds, spelled_out
from planner.schema import Plan, Shorter, Trace
from planner.simulator import Timeline, simulate

_ROUNDING = 1 + 1e-9  # sums of times differ by less
_MUCH = 1.02  # of the time without waiting: then other moves are made
_CLEARLY = 0.99  # of the time with fewer moves: then they are kept


def with_shorter(plan: Plan, trace: Trace, lengths: Iterable[int] | None = None) -> Plan:
    """Return the plan with what is followed for shorter inputs. lengths: by default, sizes that cover the range of the trace.

    Leaves out sizes at which the plan does not come to an end even with all moves. Waits for about ten replays for each, twice
    that where stages run again. Raises OptionsError where the trace does not know a length.
    """
    rows: Iterable[list[tuple[int, ...]]] = trace.lengths.descending() if trace.lengths is not None else ()
    if lengths is not None:
        known = trace.lengths.highest[1:] if trace.lengths is not None else ()
        rows = ([(length, *known)] for length in sorted(set(lengths)) if trace.at(length) is not trace)
    inside = _inside(plan, trace)
    found: list[Shorter] = []
    for row in rows:
        for sizes in row:
            shorter = _shorter(plan, trace.at(*sizes), sizes)
            found += [] if shorter is None else [shorter]
            if shorter is not None and len(shorter.left_out) == len(inside) and len(shorter.skipped) == len(plan.recompute):
                break  # even shorter inputs cannot do with less
    return plan.model_copy(update={"shorter": tuple(sorted(found, key=lambda each: each.sizes, reverse=True))})


def _inside(plan: Plan, trace: Trace) -> list[int]:
    """Return the moves, by number, but for those of blocks that are away when the iteration ends."""
    away = {placement.block for placement in plan.initial if placement.tier != "device"}
    count = len(trace.stages) + len(plan.recompute)
    return [number for number, move in enumerate(plan.moves) if move.before < count or move.block not in away]


def _shorter(plan: Plan, trace: Trace, sizes: tuple[int, ...]) -> Shorter | None:
    """Return what is followed at these sizes. trace: at these."""
    blocks = [trace.blocks[move.block] for move in plan.moves]
    # What is too small to move at this length does not.
    moves = sorted(_inside(plan, trace), key=lambda number: (blocks[number].movable, -blocks[number].size_bytes))
    small = sum(not blocks[number].movable for number in moves)

    def seconds_per_byte(number: int) -> float:
        group = trace.recompute[plan.recompute[number].group]
        return group.duration_seconds / max(made_bytes(trace, group), 1)

    reruns = sorted(range(len(plan.recompute)), key=seconds_per_byte, reverse=True)

    def replayed(left_out: Sequence[int], skipped: Sequence[int]) -> Timeline | None:
        try:
            return simulate(trace, plan.thinned(left_out, skipped, trace))
        except TeraioError:  # does not fit
            return None

    skipped, whole = _most(len(reruns), 0, lambda fewest: replayed(moves[:small], reruns[:fewest]))
    left_out, best = _most(len(moves), small, lambda fewest: replayed(moves[:fewest], reruns[:skipped]), whole)
    thinned = plan.thinned((), reruns[:skipped], trace)
    anew = _with_other_moves(thinned, trace) if best is None or best.iteration_seconds > _MUCH * trace.ideal_seconds else None
    if anew is not None and (best is None or anew.replayed.iteration_seconds < _CLEARLY * best.iteration_seconds):
        return Shorter(sizes=sizes, skipped=tuple(sorted(reruns[:skipped])), moves=anew.moves, predicted=anew.replayed)
    if best is None:
        return None
    predicted = prediction(trace, best).model_copy(update={"recompute_seconds": recompute_seconds(trace, thinned.recompute)})
    return Shorter(
        sizes=sizes, left_out=tuple(sorted(moves[:left_out])), skipped=tuple(sorted(reruns[:skipped])), predicted=predicted
    )


def _with_other_moves(plan: Plan, trace: Trace) -> Plan | None:
    """Return the plan with moves made for this trace, and the same blocks away when an iteration ends; None if none are found."""
    border = {placement.block: placement.tier for placement in plan.initial}
    try:
        derived, spelled = spelled_out(trace, plan)
        problem = Problem.of(derived, plan.budgets, plan.on_host, border)
        candidates = exact_candidates(problem, decisions_of(problem, spelled), DEFAULT_WRITE_WEIGHT)
    except TeraioError:
        return None
    best = min(candidates, key=lambda candidate: candidate.cost)
    return folded(trace, plan.recompute, with_predictions(problem, best.plan, best.timeline))


def _most(
    most: int, least: int, replayed: Callable[[int], Timeline | None], best: Timeline | None = None
) -> tuple[int, Timeline | None]:
    """Return how many can go, at most `most`, so that the replay still ends no later than with `least` gone, and that replay.

    best: the replay with `least` gone, if it is known.
    """
    best = best or replayed(least)
    if best is None:
        return least, None
    tried = most  # all at once: it often suffices
    while least < most:
        found = replayed(tried)
        if found is not None and found.iteration_seconds <= best.iteration_seconds * _ROUNDING:
            least, best = tried, found
        else:
            most = tried - 1
        tried = (least + most + 1) // 2
    return least, best
