"""What links that share rates can carry together: facets worked out by hand, and no set of busy links outside of them."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Hardware, Link, SharedRate
from planner.problem.shared_limits import max_min_rates, shared_limits

LINKS = (("device", "host"), ("host", "device"), ("device", "storage"), ("storage", "device"))
OUT, IN, WRITE, READ = ("->".join(ends) for ends in LINKS)


def machine(rates: list[float], *shared: tuple[float, list[str]]) -> Hardware:
    links = tuple(
        Link.model_validate({"from": ends[0], "to": ends[1], "bytes_per_second": rate})
        for ends, rate in zip(LINKS, rates, strict=True)
    )
    together = tuple(SharedRate(name=str(n), links=tuple(names), bytes_per_second=rate) for n, (rate, names) in enumerate(shared))
    return Hardware(name="made up", device_memory_bytes=100, links=links, shared=together)


def test_a_drive_takes_its_fair_share_of_the_bus() -> None:
    """50 to the host alone; 31 and 24 together: so each byte to the drive costs the host 19 / 24 of a byte, not 5 / 24."""
    hardware = machine([50.0, 50.0, 24.0, 26.0], (55.0, [OUT, WRITE]))
    (limit,) = shared_limits(hardware, hardware.links)
    assert limit.seconds_per_byte == pytest.approx({OUT: 1 / 50, WRITE: 19 / 24 / 50})
    assert shared_limits(hardware, hardware.links[2:]) == ()


def test_a_shared_rate_that_never_binds_limits_nothing() -> None:
    hardware = machine([10.0, 10.0, 5.0, 5.0], (15.0, [OUT, WRITE]))
    assert shared_limits(hardware, hardware.links) == ()


def test_three_links_keep_the_row_of_their_sum() -> None:
    hardware = machine([10.0, 10.0, 10.0, 1.0], (15.0, [OUT, IN, WRITE]))
    sums = [limit for limit in shared_limits(hardware, hardware.links) if len(limit.seconds_per_byte) == 3]
    assert [limit.seconds_per_byte for limit in sums] == [pytest.approx(dict.fromkeys((OUT, IN, WRITE), 1 / 15))]


rates = st.floats(0.1, 100.0)


@given(st.lists(rates, min_size=4, max_size=4), rates, rates, rates)
def test_every_set_of_busy_links_is_within_all_limits(each: list[float], out: float, into: float, drive: float) -> None:
    shared = [(out, [OUT, WRITE]), (into, [IN, READ]), (drive, [WRITE, READ])]
    hardware = machine(each, *shared)
    limits = shared_limits(hardware, hardware.links)
    names = [link.name for link in hardware.links]
    for busy in (chosen for size in (1, 2, 3, 4) for chosen in combinations(range(4), size)):
        groups = [(rate, [n for n, number in enumerate(busy) if names[number] in members]) for rate, members in shared]
        carried = dict(zip((names[n] for n in busy), max_min_rates([each[n] for n in busy], groups), strict=True))
        for limit in limits:
            assert sum(s * carried.get(name, 0.0) for name, s in limit.seconds_per_byte.items()) <= 1 + 1e-6
