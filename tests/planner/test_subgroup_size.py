"""The size of subgroups, compared with brute force, and without measured figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Hardware, Station, stations_of_step, step_seconds, subgroup_bytes
from planner.subgroup_size import UNMEASURED_BYTES, largest_subgroup_bytes

from .traces import links, shared_rate

KB, MB, GB = 10**3, 10**6, 10**9


stations = st.lists(
    st.builds(
        Station,
        fixed_seconds=st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
        bytes_per_second=st.one_of(st.just(math.inf), st.floats(1e8, 1e12)),
    ),
    min_size=1,
    max_size=4,
)


@given(stations=stations, total=st.integers(1, 10**12), smallest=st.integers(1, 10**8), ratio=st.floats(1, 10**4))
def test_no_size_is_better_than_the_one_that_is_chosen(stations: list[Station], total: int, smallest: int, ratio: float) -> None:
    largest = int(smallest * ratio)
    found = subgroup_bytes(stations, total_bytes=total, smallest_bytes=smallest, largest_bytes=largest)
    assert smallest <= found <= max(largest, smallest)
    limit = max(min(largest, total), smallest)
    sizes = [smallest * (limit / smallest) ** (number / 400) for number in range(401)]  # evenly spaced in the logarithm
    best = min(step_seconds(stations, total_bytes=total, size_bytes=size) for size in sizes)
    rounding = 1 + 2 / smallest
    assert step_seconds(stations, total_bytes=total, size_bytes=found) <= best * rounding * (1 + 1e-9)


def by_hand(parts: int, *times: float) -> float:
    """The time at which the last of `parts` equal jobs leaves the last machine; each machine has one job at a time."""
    free = [0.0] * len(times)
    for _ in range(parts):
        ready = 0.0
        for machine, seconds in enumerate(times):
            ready = free[machine] = max(ready, free[machine]) + seconds
    return free[-1]


@pytest.mark.parametrize("times", [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (1.0, 5.0, 1.0), (2.0, 2.0, 2.0)])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_the_time_of_a_step_is_that_of_a_flow_shop(parts: int, times: tuple[float, ...]) -> None:
    line = [Station(fixed_seconds=seconds / 2, bytes_per_second=200 / seconds) for seconds in times]
    assert step_seconds(line, total_bytes=100 * parts, size_bytes=100) == pytest.approx(by_hand(parts, *times))


def test_where_nothing_costs_or_nothing_is_known() -> None:
    free = [Station(fixed_seconds=0.0, bytes_per_second=GB)] * 3
    assert subgroup_bytes(free, total_bytes=GB, smallest_bytes=MB, largest_bytes=GB) == MB, "nothing speaks against small parts"
    limits = {"total_bytes": 10**12, "smallest_bytes": MB}
    assert subgroup_bytes([], **limits, largest_bytes=10 * MB) == 10 * MB
    assert subgroup_bytes([], **limits, largest_bytes=10**12) == UNMEASURED_BYTES
    assert subgroup_bytes([], **limits, largest_bytes=0) == subgroup_bytes(free, **limits, largest_bytes=0) == MB
    at_once = [Station(fixed_seconds=1.0, bytes_per_second=math.inf)] * 3
    assert (largest_subgroup_bytes(8 * MB), largest_subgroup_bytes(-1)) == (MB, 0)
    assert subgroup_bytes(at_once, total_bytes=GB, smallest_bytes=MB, largest_bytes=2 * GB) == GB, "all in one part"


def hardware(into: float, out: float, *, latency: float = 0.0, shared: float | None = None) -> Hardware:
    """A machine with these rates of its links from and to host memory."""
    rates = {"host->device": into, "device->host": out}
    together = [] if shared is None else [shared_rate("bus", shared, *rates)]
    return Hardware.model_validate(links(rates, latency=latency, shared=together))


def test_figures_of_the_hardware() -> None:
    way_in, update, way_out = stations_of_step(hardware(3 * GB, 2 * GB, latency=1e-4), "host", update_seconds=1e-3)
    assert way_in == Station(fixed_seconds=1e-4, bytes_per_second=3 * GB)
    assert way_out == Station(fixed_seconds=1e-4, bytes_per_second=2 * GB)
    assert update == Station(fixed_seconds=1e-3, bytes_per_second=2 * GB)
    slowed = stations_of_step(hardware(3 * GB, 1 * GB, shared=3 * GB), "host", update_seconds=0.0)
    assert [station.bytes_per_second for station in slowed] == [1.5 * GB, GB, GB]
    assert stations_of_step(hardware(GB, GB), "storage", update_seconds=0.0) == ()
