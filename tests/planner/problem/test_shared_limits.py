"""What links that share rates can carry together: facets worked out by hand, and no set of busy links outside of them."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, Hardware, of_equal_ranks
from planner.problem import Problem, SharedLimit, max_min_rates

from ..traces import links, shared_rate, staged, trace

LINKS = OUT, IN, WRITE, READ = "device->host", "host->device", "device->storage", "storage->device"


def machine(rates: list[float], *shared: tuple[float, list[str]]) -> Hardware:
    together = [shared_rate(str(number), rate, *names) for number, (rate, names) in enumerate(shared)]
    return Hardware.model_validate(links(dict(zip(LINKS, rates, strict=True)), shared=together))


def limits(hardware: Hardware, *, host_bytes: int | None = None) -> tuple[SharedLimit, ...]:
    """What the links carry together that a plan may use; without a host budget of 0, these are all."""
    return Problem.of(trace(staged("f"), machine=hardware), Budgets(device_bytes=100, host_bytes=host_bytes)).shared


def test_a_drive_takes_its_fair_share_of_the_bus() -> None:
    """50 to the host alone; 31 and 24 together: so each byte to the drive costs the host 19 / 24 of a byte, not 5 / 24."""
    hardware = machine([50.0, 50.0, 24.0, 26.0], (55.0, [OUT, WRITE]))
    (limit,) = limits(hardware)
    assert limit == pytest.approx({OUT: 1 / 50, WRITE: 19 / 24 / 50})
    assert limits(hardware, host_bytes=0) == ()


def test_a_shared_rate_that_never_binds_limits_nothing() -> None:
    hardware = machine([10.0, 10.0, 5.0, 5.0], (15.0, [OUT, WRITE]))
    assert limits(hardware) == ()


rates = st.floats(0.1, 100.0)


@given(st.lists(rates, min_size=4, max_size=4), rates, rates, rates)
def test_every_set_of_busy_links_is_within_all_limits(each: list[float], out: float, into: float, drive: float) -> None:
    shared = [(out, [OUT, WRITE]), (into, [IN, READ]), (drive, [WRITE, READ])]
    hardware = machine(each, *shared)
    found = limits(hardware)
    names = [link.name for link in hardware.links]
    for busy in (chosen for size in (1, 2, 3, 4) for chosen in combinations(range(4), size)):
        groups = [(rate, [n for n, number in enumerate(busy) if names[number] in members]) for rate, members in shared]
        carried = dict(zip((names[n] for n in busy), max_min_rates([each[n] for n in busy], groups), strict=True))
        for limit in found:
            assert sum(s * carried.get(name, 0.0) for name, s in limit.items()) <= 1 + 1e-6


def test_rates_rise_together_until_each_link_is_held_by_its_own_limit_or_a_group() -> None:
    """All rise together: the first stops at its own 2, the others at what is left of their groups."""
    assert max_min_rates([2.0, 20.0, 20.0], [(10.0, [0, 1, 2])]) == [2.0, 4.0, 4.0]
    assert max_min_rates([20.0, 20.0, 20.0], [(10.0, [0, 1]), (8.0, [1, 2])]) == pytest.approx([6.0, 4.0, 4.0])
    assert max_min_rates([3.0], []) == [3.0]


def test_equal_ranks_divide_links_shared_rates_and_memory() -> None:
    """Four ranks write to one drive, and read it at a rate that was measured while all did. The bus to the host is each one's."""
    hardware = machine([50.0, 50.0, 24.0, 26.0], (40.0, [WRITE, READ]), (55.0, [OUT, WRITE]), (16.0, [WRITE, IN]))
    alone = tuple(
        link.model_copy(update={"alone_bytes_per_second": 90.0}) if link.name == READ else link for link in hardware.links
    )
    made = trace(staged("f"), machine=hardware.model_copy(update={"links": alone}))
    whole = Budgets(device_bytes=100, host_bytes=1000)
    mine, budgets = of_equal_ranks(made, whole, ranks=4, links=(WRITE, READ, IN))
    rates = {link.name: link.bytes_per_second for link in mine.hardware.links}
    assert rates == {OUT: 50.0, IN: 12.5, WRITE: 6.0, READ: 26.0}
    assert [rate.bytes_per_second for rate in mine.hardware.shared] == [40.0, 55.0, 4.0]
    assert budgets == Budgets(device_bytes=100, host_bytes=250, storage_bytes=None)
    assert of_equal_ranks(made, whole, ranks=1) == (made, whole)
