"""What was measured against what was predicted, and prefetches that start earlier for it: made-up numbers with known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner import Move
from planner.simulator import StageTimes, Timeline, Transfer
from teraio.following import schedule
from teraio.following.drift import Expectation, Observation, drift_of, remeasured

from ...planner.traces import IN, OUT, block, group, links, shared_rate, staged, subgroup, trace, varying
from ...planner.traces import move as planned_move


def measured(*, shared: float | None = None) -> planner.Trace:
    """Two stages of 1 and 3 s; links of 100 and 50 bytes a second with a latency of 0.1 s; an update in the second."""
    rates = [] if shared is None else [shared_rate("drive", shared, OUT, IN)]
    return trace(
        staged("fo", [1.0, 3.0]),
        [block(200, [1], [0, 1], "parameter"), block(1, [0], [1])],
        links({OUT: 100.0, IN: 50.0}, latency=0.1, shared=rates),
        subgroups=[subgroup(1, [0], 2.0, None, elements=50)],
        recompute=[group(0, [1], [0], 0.5)],
    )


def replayed(*, out_seconds: float = 2.1, in_seconds: float = 4.1) -> Timeline:
    """The block leaves and comes back once; the second stage waits for 1 s."""
    return Timeline(
        iteration_seconds=5.0,
        stages=(
            StageTimes(reached_seconds=0.0, start_seconds=0.0, end_seconds=1.0),
            StageTimes(reached_seconds=1.0, start_seconds=2.0, end_seconds=5.0),
        ),
        transfers=tuple(
            Transfer(move=0, block=0, link=link, queued_seconds=0.0, start_seconds=0.0, end_seconds=seconds)
            for link, seconds in ((OUT, out_seconds), (IN, in_seconds))
        ),
        peak_bytes={},
        moved_bytes={OUT: 200, IN: 200},
        storage_written_bytes=200,
    )


EXPECTED = Expectation.of(measured(), replayed())
AS_EXPECTED = Observation(
    iteration_seconds=5.0,
    waited_seconds=1.0,
    stage_seconds=(1.0, 3.0),
    moved_bytes={OUT: 200, IN: 200},
    busy_seconds={OUT: 2.1, IN: 4.1},
)


@pytest.mark.parametrize(
    ("seen", "iteration", "stages", "of_links", "is_found"),
    [
        ({}, 0.0, 0.0, {OUT: 0.0, IN: 0.0}, False),
        ({"iteration_seconds": 5.6, "waited_seconds": 1.6}, 0.12, 0.0, {OUT: 0.0, IN: 0.0}, True),
        ({"waited_seconds": 0.4}, 0.0, 0.15, {OUT: 0.0, IN: 0.0}, True),
        ({"busy_seconds": {OUT: 2.1 * 0.8, IN: 4.1}}, 0.0, 0.0, {OUT: -0.2, IN: 0.0}, True),
        (
            {"iteration_seconds": 5.4, "waited_seconds": 1.1, "busy_seconds": {OUT: 2.289, IN: 3.731}},
            0.08,
            0.075,
            {OUT: 0.09, IN: -0.09},
            False,
        ),
        ({"moved_bytes": {OUT: 0, IN: 200}, "busy_seconds": {OUT: 0.0, IN: 8.2}}, 0.0, 0.0, {IN: 1.0}, True),
    ],
    ids=["none", "longer", "works more", "a faster link", "up to a tenth", "an idle link"],
)
def test_each_part_is_drift_by_itself(seen: dict, iteration: float, stages: float, of_links: dict, is_found: bool) -> None:  # type: ignore[type-arg]
    found = drift_of(EXPECTED, [replace(AS_EXPECTED, **seen)])
    assert (found.iteration, found.stages) == pytest.approx((iteration, stages))
    assert found.links == pytest.approx(of_links) and found.found is is_found


# -- a trace of what was measured


def seconds_of(after: planner.Trace) -> list[float]:
    return [stage.duration_seconds for stage in after.stages]


def test_the_measured_trace_predicts_what_was_measured() -> None:
    """Stage times are medians; what lies between stages is spread over them; subgroups and groups go along."""
    seen = replace(AS_EXPECTED, iteration_seconds=9.4, waited_seconds=1.4, stage_seconds=(2.0, 5.0))
    before = measured()
    after = remeasured(before, EXPECTED, [replace(seen, stage_seconds=(7.0, 5.0)), seen, seen])
    assert seconds_of(after) == pytest.approx([2.5, 5.5])
    assert after.subgroups[0].device_seconds == pytest.approx(2.0 * 5.5 / 3.0)
    assert after.recompute[0].duration_seconds == pytest.approx(0.5 * 2.5)
    assert after.blocks == before.blocks and after.fingerprint != before.fingerprint
    assert after.ideal_seconds == pytest.approx(8.0)
    planner.Trace.model_validate(after.model_dump(by_alias=True))


def test_a_trace_that_is_measured_again_knows_lengths_work_and_tiles_as_before() -> None:
    tiled = [{"what": "forward/head", "tiles": 4, "whole_bytes": 9, "again_seconds": 0.5}]
    before = varying(measured()).rebuilt(work={"tokens": 5}, tiled=tiled)
    after = remeasured(before, EXPECTED, [replace(AS_EXPECTED, stage_seconds=(2.0, 3.0), iteration_seconds=6.0)])
    assert (after.lengths, after.work, after.tiled) == (before.lengths, before.work, before.tiled) and after.lengths is not None
    assert after.at(5).stages[0].duration_seconds == pytest.approx(1.0), "half of what was measured"


def test_what_is_no_time_of_stages_does_not_reach_them() -> None:
    """Nor does a pause in each iteration, in another stage each time or between two: as of a process that is stopped."""
    paused = [
        replace(AS_EXPECTED, iteration_seconds=25.0, stage_seconds=stages)
        for stages in ((21.0, 3.0), (1.0, 23.0), (1.0, 3.0), (21.0, 3.0), (1.0, 23.0))
    ]
    assert drift_of(EXPECTED, paused).found
    rerun = replace(AS_EXPECTED, iteration_seconds=6.0, rerun_seconds=1.0)
    for seen in ([AS_EXPECTED], paused, [rerun]):
        after = remeasured(measured(), EXPECTED, seen)
        assert seconds_of(after) == pytest.approx([1.0, 3.0])
        assert [link.bytes_per_second for link in after.hardware.links] == pytest.approx([100.0, 50.0])


@pytest.mark.parametrize(("on_host", "device_seconds", "host_seconds"), [(3, 2.0, 0.5), (2, 4.0, 9.0)])
def test_what_is_left_of_an_update_on_the_host_is_not_what_the_device_takes(
    on_host: int, device_seconds: float, host_seconds: float
) -> None:
    """Where some updates came too late for it, those count that the device made; else it keeps what was measured before."""
    before = measured()
    subgroup = before.subgroups[0].model_copy(update={"host_seconds": 9.0})
    before = before.model_copy(update={"subgroups": (subgroup,)})
    there = replace(AS_EXPECTED, stage_seconds=(1.0, 0.0), iteration_seconds=2.0, host_seconds={1: 0.5})
    here = replace(AS_EXPECTED, stage_seconds=(1.0, 6.0), iteration_seconds=8.0)
    after = remeasured(before, EXPECTED, [there] * on_host + [here] * (4 - on_host))
    assert after.subgroups[0].device_seconds == pytest.approx(device_seconds)
    assert after.subgroups[0].host_seconds == host_seconds


CONTENDED = Expectation.of(measured(shared=75.0), replayed(out_seconds=4.0, in_seconds=8.0))
"""In the replay, links that share a rate halve each other's."""


@pytest.mark.parametrize(
    ("shared", "expected", "moved_bytes", "busy_seconds", "rate"),
    [
        (120.0, EXPECTED, (200, 200), (4.2, 8.2), 60.0),  # scaled by what its links lose
        (75.0, CONTENDED, (200, 200), (2.0, 8.0), 200 / 2.0 + 200 / 8.0),  # what they carried together
        (75.0, EXPECTED, (0, 0), (0.0, 0.0), 75.0),  # idle
    ],
)
def test_a_rate_that_links_share(
    shared: float, expected: Expectation, moved_bytes: tuple[int, int], busy_seconds: tuple[float, float], rate: float
) -> None:
    assert CONTENDED.contended == {OUT, IN}
    moved, busy = (dict(zip((OUT, IN), figures, strict=True)) for figures in (moved_bytes, busy_seconds))
    seen = replace(AS_EXPECTED, moved_bytes=moved, busy_seconds=busy)
    (found,) = remeasured(measured(shared=shared), expected, [seen]).hardware.shared
    assert found.bytes_per_second == pytest.approx(rate)


# -- prefetches that start earlier

COUNT = 10
SECONDS = [1.0] * COUNT


def move(number: int, start: int, before: int, *, after: int = 0, out_until: int | None = None, tier: str = "storage") -> Move:
    """Dropped after `after`, or copied out until `out_until`."""
    fields = planned_move(number, after, before, start, out=out_until is not None, tier=tier)
    if out_until is not None:
        fields["offload"]["free_after"] = out_until
    return Move.model_validate(fields)


UNEVEN = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 0.1, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("moves", "shifts", "seconds", "starts"),
    [
        # as many stages as cover the shift
        *(([move(0, 7, 8)], {0: shift}, SECONDS, [start]) for shift, start in ((0.0, 7), (1.0, 6), (1.01, 5))),
        ([move(0, 7, 8)], {0: 3.0}, UNEVEN, [5]),
        # not before the copy out may have ended, or the use before; the plan itself may ask for it before that
        ([move(0, 7, 8, after=2, out_until=4)], {0: 9.0}, SECONDS, [5]),
        ([move(0, 7, 8, after=2, out_until=7)], {0: 9.0}, SECONDS, [7]),
        # what is ahead in the queue moves along, or holds back what is behind; other tiers have links of their own
        ([move(0, 6, 8), move(1, 7, 9)], {1: 3.0}, SECONDS, [4, 4]),
        ([move(0, 6, 8, tier="host"), move(1, 7, 9)], {1: 3.0}, SECONDS, [6, 4]),
        # over the iteration's end, and so does the queue: block 1 of this iteration is ahead of block 0 of the next one
        ([move(0, 11, 12, after=2), move(1, 9, 9)], {0: 4.0}, SECONDS, [7, 7]),
        ([move(2, 4, 5), move(0, 4, 6), move(1, 7, 8), move(3, 13, 14, after=9)], {}, SECONDS, [4, 4, 7, 13]),
    ],
)
def test_where_prefetches_start(moves: list[Move], shifts: dict[int, float], seconds: list[float], starts: list[int]) -> None:
    assert schedule.corrected_starts(moves, shifts, seconds) == dict(enumerate(starts))


TEN_SECONDS = replace(EXPECTED, iteration_seconds=float(COUNT), stall_seconds=(0.0,) * COUNT)


@pytest.fixture
def found() -> schedule.Corrections:
    return schedule.Corrections([move(0, 7, 8), move(1, 12, 13, after=5)], COUNT)


def test_half_of_the_smaller_lateness_is_made_up_for(found: schedule.Corrections) -> None:
    """What was late once is not."""
    for late in ({(0, 8): 3.0}, {}, {(0, 8): 3.0}):
        assert not found.note(late, sum(late.values()), TEN_SECONDS) and found.shifts == {}
    assert found.note({(0, 8): 1.0, (1, 3): 1.0}, 2.0, TEN_SECONDS)
    assert found.shifts == {0: 0.5}
    assert found.note({(0, 8): 0.5, (1, 3): 0.6}, 1.0, TEN_SECONDS)
    assert found.shifts == {0: 0.75, 1: 0.3}
    assert not found.note({}, 0.0, TEN_SECONDS), "what is in time stays where it is"
    assert found.starts(SECONDS).fetch_at[6] == (0,)


def test_corrections_that_do_not_help_are_dropped_for_good(found: schedule.Corrections) -> None:
    changed = [found.note({(0, 8): 3.0}, 3.0, TEN_SECONDS) for _ in range(12)]
    assert changed[1:3] == [True, True] and found.shifts == {}
    assert found.starts(SECONDS).fetch_at[7] == (0,)
    assert changed[9] and not any(changed[10:]), "given up after eight iterations that waited as long as before"
