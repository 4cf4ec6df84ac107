"""Coarse time: runs of neighbouring stages that the integer program treats as one segment."""

from __future__ import annotations

from dataclasses import dataclass

from planner.problem import Problem

__all__ = ["Segment", "segments_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Stages `first` to `last` (both within); `seconds`: the sum of their durations. `user`: all of them are user code."""

    first: int
    last: int
    seconds: float
    user: bool = False


def segments_of(problem: Problem, most: int) -> tuple[Segment, ...]:
    """Merge neighbouring stages, cheapest pair first, until at most `most` segments are left.

    The cost of a merged segment is its share of the iteration's time plus its share of the budget in bytes
    that come into being in it. Borders between phases stay where there are few of them.
    """
    stages = problem.trace.stages
    total = max(problem.trace.ideal_seconds, 1e-12)
    budget = max(problem.budgets.device_bytes, 1)
    weight = [stage.duration_seconds / total for stage in stages]
    for block in problem.trace.blocks:
        weight[block.uses[0]] += block.size_bytes / budget / 4
    firsts = list(range(len(stages)))
    weights = list(weight)
    fixed = {i for i in range(1, len(stages)) if stages[i].phase != stages[i - 1].phase}
    if len(fixed) >= most // 2:
        fixed = set()
    while len(firsts) > most:
        best = min(
            (i for i in range(1, len(firsts)) if firsts[i] not in fixed),
            key=lambda i: weights[i - 1] + weights[i],
        )
        weights[best - 1] += weights.pop(best)
        firsts.pop(best)
    borders = [*firsts, len(stages)]
    return tuple(
        Segment(
            first=first,
            last=end - 1,
            seconds=sum(stage.duration_seconds for stage in stages[first:end]),
            user=all(stage.phase == "user" for stage in stages[first:end]),
        )
        for first, end in zip(borders, borders[1:], strict=False)
    )
