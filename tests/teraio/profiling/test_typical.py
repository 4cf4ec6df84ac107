"""What a stage takes while nothing disturbs it, and whether enough measurements say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teraio.profiling import Iteration, Region, StageRecord, times_agree
from teraio.profiling.profiler import _stage_seconds as stage_seconds


def iterations(*seconds: tuple[float, ...], phase: str = "forward") -> list[Iteration]:
    """One iteration for each tuple, which has the seconds of its stages."""
    return [
        Iteration(
            number=number,
            regions=[Region(identity=0, first=0, stages=[StageRecord(name="s", phase=phase, seconds=each) for each in times])],
        )
        for number, times in enumerate(seconds)
    ]


def test_like_measurements_give_their_median() -> None:
    assert stage_seconds(iterations((1.0, 4.0), (1.2, 5.0), (1.1, 4.1))) == [1.1, 4.1]


def test_disturbed_measurements_do_not_count() -> None:
    """Each stage by itself: a disturbance may begin and end within an iteration."""
    assert stage_seconds(iterations((1.0, 9.0), (7.0, 4.0), (1.2, 4.4))) == pytest.approx([1.1, 4.2])
    assert stage_seconds(iterations((8.0,), (1.0,), (7.0,))) == [1.0]


def test_user_code_does_not_do_the_same_each_time() -> None:
    assert stage_seconds(iterations((0.1,), (7.0,), (8.0,), phase="user")) == [7.0]


def test_clocks_of_little_precision() -> None:
    assert stage_seconds(iterations((0.0, -1e-9), (0.0, 0.0), (1.0, 1e-9))) == [0.0, -1e-9]


@given(st.lists(st.floats(0.9, 1.1), min_size=2, max_size=9), st.lists(st.floats(2.0, 1e6), max_size=9), st.randoms())
def test_any_number_of_disturbed_measurements(alike: list[float], disturbed: list[float], random: object) -> None:
    """However many: the result lies between the undisturbed ones. Two of these are enough to be sure."""
    times = [*alike, *disturbed]
    random.shuffle(times)  # type: ignore[attr-defined]
    measured = iterations(*[(seconds,) for seconds in times])
    (found,) = stage_seconds(measured)
    assert min(alike) <= found <= max(alike)
    assert times_agree(measured)


def test_measurements_that_nothing_confirms() -> None:
    """1 s of 11 may be in doubt, not 2 of 12."""
    assert times_agree(iterations((10.0, 1.0), (10.0, 9.0), (10.0, 0.1)))
    assert not times_agree(iterations((10.0, 2.0), (10.0, 9.0), (10.0, 0.1)))
    assert not times_agree(iterations((1.0,), (2.0,), (4.0,)))
    assert times_agree(iterations((1.0,), (2.0,), (4.0,), (1.1,)))


def test_user_code_is_not_asked_to_agree() -> None:
    assert times_agree(iterations((1.0,), (2.0,), (4.0,), phase="user"))


def test_who_asks_for_two_iterations_gets_two() -> None:
    assert times_agree(iterations((1.0,), (9.0,)))
