"""What was measured against what was predicted: made-up numbers with known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner import Hardware, Link, SharedRate, Stage
from planner.simulator import StageTimes, Timeline, Transfer
from teraio.following.drift import Expectation, Observation, drift_of, remeasured

OUT, IN = "device->storage", "storage->device"


def trace(*, shared: float | None = None) -> planner.Trace:
    """Two stages of 1 and 3 s; links of 100 and 50 bytes a second with a latency of 0.1 s; an update in the second."""
    links = (
        Link(from_tier="device", to_tier="storage", bytes_per_second=100.0, latency_seconds=0.1),
        Link(from_tier="storage", to_tier="device", bytes_per_second=50.0, latency_seconds=0.1),
    )
    rates = () if shared is None else (SharedRate(name="drive", links=(OUT, IN), bytes_per_second=shared),)
    return planner.Trace(
        name="two",
        hardware=Hardware(name="made up", device_memory_bytes=1000, links=links, shared=rates),
        stages=(
            Stage(id=0, name="a", phase="forward", duration_seconds=1.0),
            Stage(id=1, name="b", phase="optimizer", duration_seconds=3.0),
        ),
        blocks=(
            planner.Block(id=0, name="w", kind="parameter", size_bytes=200, persistent=True, reads=(0, 1), writes=(1,)),
            planner.Block(id=1, name="a", kind="activation", size_bytes=1, persistent=False, reads=(1,), writes=(0,)),
        ),
        subgroups=(planner.Subgroup(id=0, stage=1, blocks=(0,), elements=50, device_seconds=2.0),),
        recompute=(planner.RecomputeGroup(id=0, stage=0, blocks=(1,), reads=(0,), duration_seconds=0.5),),
    )


def replayed(*, out_seconds: float = 2.1, in_seconds: float = 4.1) -> Timeline:
    """The block leaves and comes back once; the second stage waits for 1 s."""
    transfers = [(OUT, 0.0, out_seconds), (IN, 0.0, in_seconds)]
    return Timeline(
        iteration_seconds=5.0,
        stages=(
            StageTimes(reached_seconds=0.0, start_seconds=0.0, end_seconds=1.0),
            StageTimes(reached_seconds=1.0, start_seconds=2.0, end_seconds=5.0),
        ),
        transfers=tuple(
            Transfer(move=0, block=0, link=link, queued_seconds=0.0, start_seconds=a, end_seconds=b) for link, a, b in transfers
        ),
        peak_bytes={},
        moved_bytes={},
        storage_written_bytes=200,
    )


EXPECTED = Expectation.of(trace(), replayed())
AS_EXPECTED = Observation(
    iteration_seconds=5.0,
    waited_seconds=1.0,
    stage_seconds=(1.0, 3.0),
    moved_bytes={OUT: 200, IN: 200},
    busy_seconds={OUT: 2.1, IN: 4.1},
)


def test_what_is_expected() -> None:
    assert EXPECTED.iteration_seconds == 5.0 and EXPECTED.ideal_seconds == 4.0
    assert EXPECTED.stall_seconds == (0.0, 1.0)
    assert EXPECTED.link_seconds_per_byte == pytest.approx({OUT: 2.1 / 200, IN: 4.1 / 200})
    assert EXPECTED.contended == frozenset()


def test_as_expected_is_no_drift() -> None:
    drift = drift_of(EXPECTED, [AS_EXPECTED])
    assert not drift.found
    assert (drift.iteration, drift.stages) == pytest.approx((0.0, 0.0)) and drift.links == pytest.approx({OUT: 0, IN: 0})


def test_each_part_is_drift_by_itself() -> None:
    slower = replace(AS_EXPECTED, iteration_seconds=5.6, waited_seconds=1.6)
    assert drift_of(EXPECTED, [slower]).iteration == pytest.approx(0.12)
    assert drift_of(EXPECTED, [slower]).stages == pytest.approx(0.0) and drift_of(EXPECTED, [slower]).found
    working = replace(AS_EXPECTED, waited_seconds=0.4)
    assert drift_of(EXPECTED, [working]).stages == pytest.approx(0.15) and drift_of(EXPECTED, [working]).found
    link = replace(AS_EXPECTED, busy_seconds={OUT: 2.1 * 0.8, IN: 4.1})
    assert drift_of(EXPECTED, [link]).links == pytest.approx({OUT: -0.2, IN: 0.0}) and drift_of(EXPECTED, [link]).found


def test_up_to_a_tenth_is_no_drift() -> None:
    near = replace(AS_EXPECTED, iteration_seconds=5.4, waited_seconds=1.1, busy_seconds={OUT: 2.1 * 1.09, IN: 4.1 * 0.91})
    assert not drift_of(EXPECTED, [near]).found


def test_a_minority_of_outliers_is_no_drift() -> None:
    wild = Observation(
        iteration_seconds=500.0,
        waited_seconds=0.0,
        stage_seconds=(99.0, 99.0),
        moved_bytes={OUT: 1, IN: 1},
        busy_seconds={OUT: 99.0, IN: 99.0},
    )
    assert not drift_of(EXPECTED, [AS_EXPECTED, wild, AS_EXPECTED]).found
    assert drift_of(EXPECTED, [wild, AS_EXPECTED, wild]).found


def test_a_link_that_moved_nothing_tells_nothing() -> None:
    idle = replace(AS_EXPECTED, moved_bytes={OUT: 0, IN: 200}, busy_seconds={OUT: 0.0, IN: 8.2})
    assert drift_of(EXPECTED, [idle]).links == pytest.approx({IN: 1.0})
    links = {link.name: link for link in remeasured(trace(), EXPECTED, [idle]).hardware.links}
    assert links[OUT] == trace().hardware.links[0]
    assert links[IN].bytes_per_second == pytest.approx(25.0) and links[IN].latency_seconds == pytest.approx(0.2)


def test_how_drift_reads() -> None:
    seen = replace(AS_EXPECTED, iteration_seconds=6.0, waited_seconds=1.6, busy_seconds={OUT: 2.1, IN: 2.05})
    assert str(drift_of(EXPECTED, [seen])) == "iteration +20%, stages +10%, device->storage +0%, storage->device -50%"


def test_the_measured_trace_predicts_what_was_measured() -> None:
    """Stage times are medians; what lies between stages is spread over them; subgroups and groups go along."""
    seen = replace(AS_EXPECTED, iteration_seconds=9.4, waited_seconds=1.4, stage_seconds=(2.0, 5.0))
    before = trace()
    after = remeasured(before, EXPECTED, [replace(seen, stage_seconds=(7.0, 5.0)), seen, seen])
    assert [s.duration_seconds for s in after.stages] == pytest.approx([2.5, 5.5])
    assert after.subgroups[0].device_seconds == pytest.approx(2.0 * 5.5 / 3.0)
    assert after.recompute[0].duration_seconds == pytest.approx(0.5 * 2.5)
    assert after.blocks == before.blocks and after.fingerprint != before.fingerprint
    assert after.ideal_seconds == pytest.approx(8.0)
    planner.Trace.model_validate(after.model_dump(by_alias=True))


def test_a_trace_of_what_was_predicted_is_the_same_trace() -> None:
    after = remeasured(trace(), EXPECTED, [AS_EXPECTED])
    assert [s.duration_seconds for s in after.stages] == pytest.approx([1.0, 3.0])
    assert [link.bytes_per_second for link in after.hardware.links] == pytest.approx([100.0, 50.0])


# -- updates on the host


@pytest.mark.parametrize(
    ("on_host", "device_seconds", "host_seconds"), [(3, 2.0, 0.5), (2, 4.0, 9.0), (1, 4.0, 9.0), (0, 4.0, 9.0)]
)
def test_what_is_left_of_an_update_on_the_host_is_not_what_the_device_takes(
    on_host: int, device_seconds: float, host_seconds: float
) -> None:
    """Where some updates came too late for it, those count that the device made; else it keeps what was measured before."""
    before = trace()
    subgroup = before.subgroups[0].model_copy(update={"host_seconds": 9.0})
    before = before.model_copy(update={"subgroups": (subgroup,)})
    there = replace(AS_EXPECTED, stage_seconds=(1.0, 0.0), iteration_seconds=2.0, host_seconds={1: 0.5})
    here = replace(AS_EXPECTED, stage_seconds=(1.0, 6.0), iteration_seconds=8.0)
    after = remeasured(before, EXPECTED, [there] * on_host + [here] * (4 - on_host))
    assert after.subgroups[0].device_seconds == pytest.approx(device_seconds)
    assert after.subgroups[0].host_seconds == host_seconds


# -- links that share a rate


def test_a_pause_in_each_iteration_reaches_no_stage() -> None:
    """As of a process that is stopped and continued: it lies in another stage each time, or between two."""
    paused = [
        replace(AS_EXPECTED, iteration_seconds=25.0, stage_seconds=stages)
        for stages in ((21.0, 3.0), (1.0, 23.0), (1.0, 3.0), (21.0, 3.0), (1.0, 23.0))
    ]
    assert drift_of(EXPECTED, paused).found
    assert [s.duration_seconds for s in remeasured(trace(), EXPECTED, paused).stages] == pytest.approx([1.0, 3.0])


def test_a_shared_rate_is_scaled_by_what_its_links_lose() -> None:
    slower = replace(AS_EXPECTED, busy_seconds={OUT: 4.2, IN: 8.2})
    (rate,) = remeasured(trace(shared=120.0), EXPECTED, [slower]).hardware.shared
    assert rate.bytes_per_second == pytest.approx(60.0)


def test_what_contended_links_carried_together_a_shared_rate_carries() -> None:
    """In the replay they halve each other's rate; measured, they do not."""
    expected = Expectation.of(trace(shared=75.0), replayed(out_seconds=4.0, in_seconds=8.0))
    assert expected.contended == {OUT, IN}
    free = replace(AS_EXPECTED, busy_seconds={OUT: 2.0, IN: 8.0})
    (rate,) = remeasured(trace(shared=75.0), expected, [free]).hardware.shared
    assert rate.bytes_per_second == pytest.approx(200 / 2.0 + 200 / 8.0)


def test_a_shared_rate_of_idle_links_stays() -> None:
    idle = replace(AS_EXPECTED, moved_bytes={OUT: 0, IN: 0}, busy_seconds={OUT: 0.0, IN: 0.0})
    (rate,) = remeasured(trace(shared=75.0), EXPECTED, [idle]).hardware.shared
    assert rate.bytes_per_second == 75.0


def test_reruns_are_not_spread_over_the_stages() -> None:
    again = replace(AS_EXPECTED, iteration_seconds=6.0, rerun_seconds=1.0)
    after = remeasured(trace(), EXPECTED, [again])
    assert [stage.duration_seconds for stage in after.stages] == pytest.approx([1.0, 3.0])


def test_the_time_in_collectives_is_measured_again() -> None:
    """Half of the first stage was; now it is most of it, and never more than the stage takes."""
    stages = (trace().stages[0].model_copy(update={"collective_seconds": 0.5}), trace().stages[1])
    before = trace().rebuilt(stages=stages)
    again = [replace(AS_EXPECTED, collective_seconds=(inside, 0.0)) for inside in (0.25, 0.75, 9.0)]
    assert [stage.collective_seconds for stage in remeasured(before, EXPECTED, again).stages] == [0.75, 0.0]
    assert remeasured(before, EXPECTED, again[2:]).stages[0].collective_seconds == pytest.approx(1.0)
