"""Prefetches that start earlier: how far, in which order, how often; then with a real pager in virtual time."""

from __future__ import annotations

import pytest

from planner import Move, Offload, Prefetch
from teraio.following.corrections import Corrections, corrected_starts, lay_out_starts, planned_starts
from teraio.following.drift import Expectation

COUNT = 10
ONE_SECOND_STAGES = [1.0] * COUNT


def move(block: int, start: int, before: int, *, after: int = 0, out_until: int | None = None) -> Move:
    """Dropped after `after`, or copied out until `out_until`."""
    offload = None if out_until is None else Offload(start=after, free_after=out_until)
    return Move(
        block=block,
        after=after,
        before=before,
        tier="storage",
        offload=offload,
        prefetch=Prefetch(start=start, ready_by=before),
    )


def expected(*, stalls: dict[int, float] | None = None) -> Expectation:
    return Expectation(
        iteration_seconds=float(COUNT),
        ideal_seconds=float(COUNT),
        link_seconds_per_byte={},
        stall_seconds=tuple((stalls or {}).get(stage, 0.0) for stage in range(COUNT)),
    )


# -- how far


@pytest.mark.parametrize(("shift", "start"), [(0.0, 7), (0.01, 6), (1.0, 6), (1.01, 5), (2.5, 4)])
def test_as_many_stages_as_cover_the_shift(shift: float, start: int) -> None:
    assert corrected_starts([move(0, 7, 8)], {0: shift}, ONE_SECOND_STAGES) == {0: start}


def test_long_stages_cover_more() -> None:
    seconds = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 0.1, 1.0, 1.0, 1.0]
    assert corrected_starts([move(0, 7, 8)], {0: 0.05}, seconds) == {0: 6}
    assert corrected_starts([move(0, 7, 8)], {0: 3.0}, seconds) == {0: 5}


def test_not_before_the_copy_out_may_have_ended_or_the_use_before() -> None:
    assert corrected_starts([move(0, 7, 8, after=2, out_until=4)], {0: 9.0}, ONE_SECOND_STAGES) == {0: 5}
    assert corrected_starts([move(0, 7, 8, after=2)], {0: 9.0}, ONE_SECOND_STAGES) == {0: 3}
    late_out = move(0, 7, 8, after=2, out_until=7)  # the plan itself asks for it before the copy out has ended
    assert corrected_starts([late_out], {0: 9.0}, ONE_SECOND_STAGES) == {0: 7}


def test_over_the_iteration_s_end() -> None:
    over = move(0, 11, 12, after=5)
    starts = corrected_starts([over], {0: 2.5}, ONE_SECOND_STAGES)
    assert starts == {0: 8}
    laid = lay_out_starts([over], starts, COUNT)
    assert [p for p, ids in enumerate(laid.fetch_at) if ids] == [8] and laid.due == (0,)


def test_without_shifts_nothing_changes() -> None:
    moves = [move(2, 4, 5), move(0, 4, 6), move(1, 7, 8), move(3, 13, 14, after=9)]
    assert corrected_starts(moves, {}, ONE_SECOND_STAGES) == {0: 4, 1: 4, 2: 7, 3: 13}
    assert planned_starts(moves, COUNT) == lay_out_starts(moves, {0: 4, 1: 4, 2: 7, 3: 13}, COUNT)


# -- in which order


def test_what_is_ahead_in_the_queue_moves_along() -> None:
    moves = [move(0, 6, 8), move(1, 7, 9)]
    starts = corrected_starts(moves, {1: 3.0}, ONE_SECOND_STAGES)
    assert starts == {0: 4, 1: 4}
    assert lay_out_starts(moves, starts, COUNT).fetch_at[4] == (0, 1)


def test_what_can_not_move_along_holds_back_what_is_behind() -> None:
    moves = [move(0, 6, 8, after=4, out_until=4), move(1, 7, 9)]
    assert corrected_starts(moves, {1: 4.0}, ONE_SECOND_STAGES) == {0: 5, 1: 5}


def test_the_queue_goes_on_over_the_iteration_s_end() -> None:
    """Block 1 of this iteration is ahead of block 0 of the next one."""
    moves = [move(0, 11, 12, after=2), move(1, 9, 9)]
    starts = corrected_starts(moves, {0: 4.0}, ONE_SECOND_STAGES)
    assert starts == {0: 7, 1: 7}
    assert lay_out_starts(moves, starts, COUNT).fetch_at[7] == (1, 0), "block 1 was asked for first"


def test_other_tiers_have_links_of_their_own() -> None:
    other = move(0, 6, 8).model_copy(update={"tier": "host"})
    assert corrected_starts([other, move(1, 7, 9)], {1: 3.0}, ONE_SECOND_STAGES) == {0: 6, 1: 4}


def test_what_is_due_is_in_order_of_need() -> None:
    moves = [move(0, 3, 4), move(1, 10, 17, after=5), move(2, 9, 12, after=5), move(3, 11, 12, after=5)]
    assert planned_starts(moves, COUNT).due == (2, 1), "the others' starts are still to come, or belong to this iteration"


# -- how often


def corrections() -> Corrections:
    return Corrections([move(0, 7, 8), move(1, 12, 13, after=5)], COUNT)


def test_late_once_is_not_corrected() -> None:
    found = corrections()
    assert not found.note({(0, 8): 3.0}, 3.0, expected())
    assert not found.note({}, 0.0, expected())
    assert not found.note({(0, 8): 3.0}, 3.0, expected())
    assert found.shifts == {}


def test_half_of_the_smaller_lateness() -> None:
    found = corrections()
    found.note({(0, 8): 3.0}, 3.0, expected())
    assert found.note({(0, 8): 1.0, (1, 3): 1.0}, 2.0, expected())
    assert found.shifts == {0: 0.5}
    assert found.note({(0, 8): 0.5, (1, 3): 0.6}, 1.0, expected())
    assert found.shifts == {0: 0.75, 1: 0.3}
    assert not found.note({}, 0.0, expected()), "what is in time stays where it is"
    assert found.starts(ONE_SECOND_STAGES).fetch_at[6] == (0,)


def test_predicted_waiting_and_trifles_are_not_lateness() -> None:
    found = corrections()
    for _ in range(3):
        assert not found.note({(0, 8): 2.0, (1, 3): 0.009}, 2.0, expected(stalls={8: 2.0}))
    for _ in range(2):
        found.note({(0, 8): 3.0}, 3.0, expected(stalls={8: 2.0}))
    assert found.shifts == {0: 0.5}


def test_a_block_that_the_plan_does_not_fetch_there() -> None:
    found = corrections()
    for _ in range(3):
        assert not found.note({(0, 5): 2.0, (7, 8): 2.0}, 4.0, expected())


def test_shifts_are_bounded() -> None:
    found = corrections()
    for waited in range(100, 80, -1):
        found.note({(0, 8): 9.0}, float(waited), expected())
    assert found.shifts == {0: 2.5}


def test_corrections_that_do_not_help_are_dropped_for_good() -> None:
    found = corrections()
    changed = [found.note({(0, 8): 3.0}, 3.0, expected()) for _ in range(12)]
    assert changed[1:3] == [True, True] and found.shifts == {}
    assert found.starts(ONE_SECOND_STAGES).fetch_at[7] == (0,)
    assert changed[9] and not any(changed[10:]), "given up after eight iterations that waited as long as before"


def test_corrections_that_help_stay() -> None:
    found = corrections()
    for waited in (3.0, 3.0, *[2.0] * 30):
        found.note({(0, 8): waited}, waited, expected())
    assert found.shifts == {0: 2.5}
