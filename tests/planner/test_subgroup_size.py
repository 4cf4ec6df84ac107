"""The size of subgroups, compared with brute force and with the simulator, and without measured figures."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, Hardware, Station, Trace, plan, simulate, stations_of_step, step_seconds, subgroup_bytes
from planner.subgroup_size import UNMEASURED_BYTES, largest_subgroup_bytes

from .traces import block, links, shared_rate, staged, trace

KB, MB, GB = 10**3, 10**6, 10**9


def sizes_between(smallest: int, largest: int, count: int = 400) -> list[float]:
    """Sizes from smallest to largest, both included, evenly spaced in the logarithm."""
    return [smallest * (largest / smallest) ** (number / count) for number in range(count + 1)]


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
    best = min(step_seconds(stations, total_bytes=total, size_bytes=size) for size in sizes_between(smallest, limit))
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


def test_the_rate_of_updates_matters_little() -> None:
    """If it is taken to be that of the links, the step takes at most a tenth longer, whatever it really is."""
    steps = product((3e8, 3e9, 3e10, 3e11), (3e8, 3e9, 5e10), (1e-5, 1e-4, 3e-4), (1e-4, 1e-3, 3e-3), (0.1, 0.3, 1, 3, 10, 1000))
    for total, rate, latency, update, faster in steps:
        known = stations_of_step(hardware(rate, rate, latency=latency), "host", update_seconds=update)
        true = (known[0], Station(fixed_seconds=update, bytes_per_second=rate * faster), known[2])
        limits = {"total_bytes": int(total), "smallest_bytes": 4 * MB, "largest_bytes": GB}
        best = step_seconds(true, total_bytes=total, size_bytes=subgroup_bytes(true, **limits))
        found = step_seconds(true, total_bytes=total, size_bytes=subgroup_bytes(known, **limits))
        assert found <= 1.11 * best, (total, rate, latency, update, faster)


# -- against the simulator


def step_trace(machine: Hardware, *, total: int, part: float, update: Station, activations: int) -> Trace:
    """States of `total` bytes in equal subgroups; activations fill the device before the step. User code precedes the step."""
    count = max(round(total / part), 1)
    seconds = [1.0, 1.0, 0.0, *[update.seconds(total / count)] * count, 0.0]
    states = [block(total // count, [number + 3], [number + 3], "optimizer_state") for number in range(count)]
    return trace(staged("fbu" + "o" * count + "u", seconds), [block(activations, [0], [1]), *states], machine)


@pytest.mark.parametrize(
    ("machine", "update"),
    [
        (hardware(20 * GB, 25 * GB, latency=1e-4), Station(fixed_seconds=2e-3, bytes_per_second=200 * GB)),
        (hardware(2 * GB, 2 * GB, latency=1e-3), Station(fixed_seconds=1e-3, bytes_per_second=8 * GB)),
        (hardware(3 * GB, 2 * GB, shared=3 * GB, latency=5e-3), Station(fixed_seconds=5e-3, bytes_per_second=8 * GB)),
        (hardware(8 * GB, 8 * GB, latency=1e-4), Station(fixed_seconds=5e-3, bytes_per_second=2 * GB)),
    ],
    ids=["the links are slow", "latencies are long", "links share a rate", "updates are slow"],
)
def test_no_other_size_is_much_better_in_the_simulator(machine: Hardware, update: Station) -> None:
    """A plan is made for each size under the same budget."""
    total, room = 2 * GB, 800 * MB
    largest = largest_subgroup_bytes(room)
    chosen = subgroup_bytes(
        stations_of_step(machine, "host", update_seconds=update.fixed_seconds),
        total_bytes=total,
        smallest_bytes=4 * MB,
        largest_bytes=largest,
    )

    def simulated(part: float) -> float:
        step = step_trace(machine, total=total, part=part, update=update, activations=room)
        made = plan(step, Budgets(device_bytes=room), policy="g10", lower_bound=False)
        return simulate(step, made).iteration_seconds - 2.0

    found = simulated(chosen)
    others = [simulated(size * MB) for size in (10, 14, 20, 28, 40, 57, 80, 100)]
    assert found <= 1.05 * min(others)
    assert max(others) > 1.1 * found, "the size matters here"
    way_in, _, way_out = stations_of_step(machine, "host", update_seconds=0.0)
    predicted = step_seconds([way_in, update, way_out], total_bytes=total, size_bytes=total / round(total / chosen))
    assert found == pytest.approx(predicted, rel=0.05)
