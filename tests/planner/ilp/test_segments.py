"""Coarse time: the segments cover all stages, and blocks are needed at the peaks that their uses surround."""

from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, Trace
from planner.ilp.classes import SegmentGrid, segments_of
from planner.problem import Problem

from ..strategies import problems


@given(problems(most_stages=30), st.integers(1, 12))
def test_a_block_is_idle_at_the_peaks_within_its_period(case: tuple[Trace, Budgets], most: int) -> None:
    problem = Problem.of(*case)
    segments, stages = segments_of(problem, most), problem.stage_count
    grid = SegmentGrid(segments)
    assert [stage for segment in segments for stage in range(segment.first, segment.last + 1)] == list(range(stages))
    assert all(problem.live_bytes[s.peak] == max(problem.live_bytes[s.first : s.last + 1]) for s in segments)
    for period in problem.periods:
        idle = range(grid.end_of(period.after) + 1, grid.start_of(period.before))
        peaks = [segments[k % len(segments)].peak + k // len(segments) * stages for k in range(2 * len(segments))]
        assert list(idle) == [k for k, peak in enumerate(peaks) if period.after < peak < period.before]
