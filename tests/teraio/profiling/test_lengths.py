"""Sizes and times as functions of the length, from profiles at several lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import planner
from runtime.execution import SizedGraph
from teraio.profiling import Iteration, Profile, Region, StageRecord, with_lengths

from ...planner.traces import block, staged, trace

Sizes = Sequence[tuple[int, ...]]


def profile(
    sizes: Sizes, *, bytes_at: Callable[[int], int] = lambda n: 8 * n + 8, seconds_at: Callable[[int], float] = float
) -> Profile:
    """Two stages and the user code before them for each of `sizes`, with a block that the first of them makes."""
    regions = [
        Region(identity=SizedGraph(0, each), first=3 * number, stages=[StageRecord(name="x", phase="forward")] * 3)
        for number, each in enumerate(sizes)
    ]
    times = [1.0 if stage % 3 != 1 else seconds_at(sizes[stage // 3][-1]) for stage in range(3 * len(sizes))]
    blocks = [block(bytes_at(each[-1]), [3 * number + 1], [3 * number + 2]) for number, each in enumerate(sizes)]
    made = trace(staged("uff" * len(sizes), times), blocks)
    return Profile(trace=made, iteration=Iteration(number=0, regions=regions), ids={})


def test_sizes_are_exact_and_times_fitted_by_parts_that_are_not_negative() -> None:
    def seconds(length: int) -> float:
        return 0.5 + 0.01 * length + 1e-5 * length**2

    def size(length: int) -> int:
        return length * (length + 1) // 2 + 3

    found = with_lengths([profile([(4, n)], bytes_at=size, seconds_at=seconds) for n in (10, 50, 200, 101)][:-1])
    assert found.trace.lengths is not None and (found.trace.lengths.lowest, found.trace.lengths.places) == ((10,), (1,))
    for length in (10, 37, 101, 199):
        there = found.trace.at(length)
        assert there.blocks[0].size_bytes == size(length)
        assert there.stages[1].duration_seconds == pytest.approx(seconds(length)) and there.stages[2].duration_seconds == 1.0
    falling = with_lengths([profile([(4, n)], seconds_at=lambda n: 300.0 - n) for n in (10, 100, 200)]).trace
    (times,) = falling.lengths.stage_seconds if falling.lengths else ()
    assert times.coefficients == (pytest.approx(590 / 3), 0.0, 0.0), "disturbed: no time falls with the length"


def test_sizes_that_are_no_polynomial_are_below_none_that_was_seen() -> None:
    def padded(length: int) -> int:
        return length * (-(-length // 8) * 8)

    found = with_lengths([profile([(n,)], bytes_at=padded) for n in (9, 16, 33, 41, 57, 100)]).trace
    for length in (9, 16, 33, 41, 57, 100):
        assert padded(length) <= found.at(length).blocks[0].size_bytes <= padded(length) + 800


def test_a_trace_has_all_microbatches_as_long_as_the_longest() -> None:
    samples = [profile([(4, a), (4, b)]) for a, b in ((10, 30), (70, 20), (60, 50))]
    found = with_lengths(samples)
    assert [each.size_bytes for each in found.trace.blocks] == [8 * 70 + 8] * 2
    assert [found.trace.stages[number].duration_seconds for number in (1, 4)] == [pytest.approx(70.0)] * 2
    assert found.samples == tuple(samples) and found.iteration is samples[-1].iteration
    assert [each.size_bytes for each in found.trace.at(20).blocks] == [168, 168]


def test_sizes_that_follow_from_the_length_are_no_others() -> None:
    """Such as the stride of `tokens[:, :-1]`: the first of them counts."""
    found = with_lengths([profile([(4, n + 1, n)]) for n in (10, 20, 30)]).trace
    assert found.lengths is not None and found.lengths.places == (1,) and found.at(16).blocks[0].size_bytes == 8 * 15 + 8


def test_where_the_number_of_inputs_varies_too_all_depends_on_both() -> None:
    """As in the last batch of a data set, which says little of the length. Blocks grow with what is in the batch, or in a row."""

    def of(number: int, length: int) -> Profile:
        return profile([(number, length)], bytes_at=lambda n: 8 * n * number + 4 * n, seconds_at=lambda n: 0.5 + n * number)

    found = with_lengths([of(3, 10), of(8, 20), of(8, 15), of(8, 30), of(5, 12), of(8, 40)]).trace
    assert found.lengths is not None and (found.lengths.lowest, found.lengths.highest) == ((10, 3), (40, 8))
    for length, number in ((40, 8), (17, 8), (25, 4), (11, 3)):
        assert found.at(length, number).blocks[0].size_bytes == 8 * length * number + 4 * length
        assert found.at(length, number).stages[1].duration_seconds == pytest.approx(0.5 + length * number)
    assert found.at(17) == found.at(17, 8), "the highest number, if none is said"


@pytest.mark.parametrize(
    "sizes",
    [([(4, 9)],), ([(4, 9, 2)], [(3, 7, 5)], [(4, 5, 1)], [(6, 5, 4)]), ([(4, 9)], [(4, 9)]), ([(4, 9)], [(4, 9), (4, 9)])],
)
def test_what_does_not_tell_enough_leaves_the_trace_as_it_is(sizes: tuple[Sizes, ...]) -> None:
    """One length, three sizes that vary by themselves, and other stages."""
    found = with_lengths([profile(each) for each in sizes])
    assert found.trace.lengths is None and isinstance(found.trace, planner.Trace)
