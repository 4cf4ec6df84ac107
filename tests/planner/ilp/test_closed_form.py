"""Where updates run, against the closed form of the interleaved optimizer step (Maurya et al., Deep Optimizer States, 2024).

With a share f of the elements updated on the device, U elements per second on the host, B bytes per second in each direction, 12
bytes of states and 2 of a parameter or gradient per element, and a device that is much faster, a step takes
max((1 - f) / U, (12 (f - r) + 2 (1 - f)) / B) per element, where the states of a share r stay on the device: least where both
are equal.
"""

import pytest

from planner import Budgets, Trace, plan, simulate

from ...thoroughness import every_other
from ..traces import links, staged, subgroup, trace, trained

SUBGROUPS = 72
ELEMENTS = 1_000_000


def step_trace(host_rate: float, link_rate: float) -> Trace:
    """A step of many subgroups; forward and backward take no time."""
    on_device = ELEMENTS / link_rate / 100
    sizes = 2 * ELEMENTS, 2 * ELEMENTS, 12 * ELEMENTS
    return trace(
        staged("fb" + "o" * SUBGROUPS, [0.0, 0.0, *[on_device] * SUBGROUPS]),
        [each for number in range(SUBGROUPS) for each in trained(sizes, [0, 1], 1, number + 2)],
        links({"device->host": link_rate, "host->device": link_rate}),
        subgroups=[subgroup(n + 2, range(3 * n, 3 * n + 3), on_device, ELEMENTS / host_rate, ELEMENTS) for n in range(SUBGROUPS)],
    )


@pytest.mark.parametrize(("host_rate", "link_rate"), every_other((1.5e9, 50e9), (5e9, 50e9), (1e9, 25e9)))
def test_the_share_on_the_host_is_that_of_the_closed_form(host_rate: float, link_rate: float) -> None:
    # Room for all parameters and gradients, and for the states of six subgroups, of which two or so are on their way.
    step = step_trace(host_rate, link_rate)
    budgets = Budgets(device_bytes=ELEMENTS * (4 * SUBGROUPS + 6 * 12))
    made = plan(step, budgets, time_limit_seconds=10)
    host, link, stay = 1 / host_rate, 1 / link_rate, 4 / SUBGROUPS
    on_host = 1 - (host - 2 * link + 12 * stay * link) / (host + 10 * link)
    assert len(made.updates) / SUBGROUPS == pytest.approx(on_host, abs=1.5 / SUBGROUPS)
    seconds = SUBGROUPS * ELEMENTS * on_host * host
    assert simulate(step, made).iteration_seconds == pytest.approx(seconds, rel=0.05)
    # The bound takes subgroups that are alike together.
    assert made.predicted is not None
    assert 0.5 * seconds < made.predicted.lower_bound_seconds <= made.predicted.iteration_seconds * (1 + 1e-9)
