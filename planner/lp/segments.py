"""Coarse time: neighbouring stages that the integer program treats as one segment."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from planner.problem import Problem, stage_floors

__all__ = ["Segment", "SegmentGrid", "segments_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Stages `first` to `last`, both included.

    `seconds`: the sum of their durations. `peak`: the stage whose memory counts for the segment. `user`: all of them are user
    code.
    """

    first: int
    last: int
    peak: int
    seconds: float
    user: bool = False


class SegmentGrid:
    """Spans of time that are segments, see `SpanGrid`. Stages and segments are numbered on over the iteration's end."""

    at_instants = False

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segment_of = [number for number, s in enumerate(segments) for _ in range(s.first, s.last + 1)]
        self._peaks = [segment.peak for segment in segments]

    def span_of(self, stage: int) -> int:
        """Return the segment of a stage."""
        turns, rest = divmod(stage, len(self._segment_of))
        return self._segment_of[rest] + turns * len(self._peaks)

    update_begin = span_of

    def start_of(self, stage: int) -> int:
        """Return the first segment whose peak is at or after the stage: there a block that the stage uses is back."""
        turns, rest = divmod(stage, len(self._segment_of))
        return bisect_left(self._peaks, rest) + turns * len(self._peaks)

    def end_of(self, stage: int) -> int:
        """Return the last segment whose peak is at or before the stage: there a block that the stage uses is still needed."""
        turns, rest = divmod(stage, len(self._segment_of))
        return bisect_right(self._peaks, rest) - 1 + turns * len(self._peaks)


def segments_of(problem: Problem, max_segments: int) -> tuple[Segment, ...]:
    """Merge neighbouring stages, cheapest pair first, until at most `max_segments` are left.

    The cost of a merged segment is its share of the iteration's time, plus a quarter of the bytes first used in it as a share of
    the budget. Borders between phases stay unless they would take half of the segments.
    """
    stages = problem.trace.stages
    total = max(problem.trace.ideal_seconds, 1e-12)
    budget = max(problem.budgets.device_bytes, 1)
    weight = [stage.duration_seconds / total for stage in stages]
    for block in problem.trace.blocks:
        weight[block.uses[0]] += block.size_bytes / budget / 4
    firsts = list(range(len(stages)))
    weights = list(weight)
    phases = ["backward" if stage.phase == "recompute" else stage.phase for stage in stages]
    fixed = {i for i in range(1, len(stages)) if phases[i] != phases[i - 1]}
    if len(fixed) >= max_segments // 2:
        fixed = set()
    together = [inf] + [inf if i in fixed else weights[i - 1] + weights[i] for i in range(1, len(stages))]
    while len(firsts) > max_segments:
        best = together.index(min(together))
        weights[best - 1] += weights.pop(best)
        del firsts[best], together[best]
        for i in (best - 1, best):
            if i < len(firsts) and together[i] < inf:
                together[i] = weights[i - 1] + weights[i]
    borders = [*firsts, len(stages)]
    needed = stage_floors(problem.trace)
    return tuple(
        Segment(
            first=first,
            last=end - 1,
            peak=max(range(first, end), key=lambda stage: (problem.live_bytes[stage], needed[stage])),
            seconds=sum(stage.duration_seconds for stage in stages[first:end]),
            user=all(stage.phase == "user" for stage in stages[first:end]),
        )
        for first, end in zip(borders, borders[1:], strict=False)
    )
