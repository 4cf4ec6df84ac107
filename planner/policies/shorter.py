"""Plans for shorter inputs: a plan without the moves that shorter inputs have room for.

[Note: Thinned plans]
A plan is made for the longest inputs. Shorter ones run the same stages over the same blocks, which are smaller: so the plan holds
for them, but moves blocks for which there would be room. The trace says how sizes and times depend on the length. At each length
the plan is replayed with fewer and fewer moves, the largest left out first, as long as it fits and ends no later. What moves over
the end of an iteration does so as ever, so that each iteration finds blocks where any of these plans expects them.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.errors import TeraioError
from planner.policies.predictions import prediction
from planner.problem import recompute_seconds
from planner.schema import Plan, Shorter, Trace
from planner.simulator import Timeline, simulate

_ROUNDING = 1 + 1e-9  # sums of times differ by less


def with_shorter(plan: Plan, trace: Trace, lengths: Iterable[int] | None = None) -> Plan:
    """Return the plan with what is followed for shorter inputs. lengths: by default, some that cover the range of the trace.

    Leaves out a length at which the plan does not come to an end even with all moves. Waits for about ten replays for each
    length. Raises OptionsError where the trace does not know a length.
    """
    known = trace.lengths.descending() if trace.lengths is not None else ()
    wanted = known if lengths is None else sorted({length for length in lengths if trace.at(length) is not trace}, reverse=True)
    count = len(trace.stages) + len(plan.recompute)
    inside = [number for number, move in enumerate(plan.moves) if move.before < count]
    found: list[Shorter] = []
    for length in wanted:
        shorter = _shorter(plan, trace.at(length), length, inside)
        found += [] if shorter is None else [shorter]
        if lengths is None and shorter is not None and len(shorter.left_out) == len(inside):
            break  # even shorter inputs cannot do with less
    return plan.model_copy(update={"shorter": tuple(found)})


def _shorter(plan: Plan, trace: Trace, length: int, inside: Iterable[int]) -> Shorter | None:
    """Return what is followed at a length. trace: at this length. inside: moves that do not go over the iteration's end."""
    blocks = [trace.blocks[move.block] for move in plan.moves]
    # What is too small to move at this length does not.
    order = sorted(inside, key=lambda number: (blocks[number].movable, -blocks[number].size_bytes))
    fewest = sum(not blocks[number].movable for number in order)
    best = _replayed(plan, trace, order[:fewest])
    if best is None:
        return None
    whole, most, tried = best.iteration_seconds * _ROUNDING, len(order), len(order)  # all at once: it often suffices
    while fewest < most:
        replayed = _replayed(plan, trace, order[:tried])
        if replayed is not None and replayed.iteration_seconds <= whole:
            fewest, best = tried, replayed
        else:
            most = tried - 1
        tried = (fewest + most + 1) // 2
    predicted = prediction(trace, best).model_copy(update={"recompute_seconds": recompute_seconds(trace, plan.recompute)})
    return Shorter(length=length, left_out=tuple(sorted(order[:fewest])), predicted=predicted)


def _replayed(plan: Plan, trace: Trace, left_out: list[int]) -> Timeline | None:
    """Return the replay without these moves; None if that does not fit."""
    try:
        return simulate(trace, plan.thinned(left_out, trace))
    except TeraioError:
        return None
