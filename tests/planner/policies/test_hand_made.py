"""Plans meet optima that are known: those of hand-made traces, which `traces/README.md` works out, and one in closed form."""

import pytest

from planner import Budgets, Trace, floor, plan, simulate

from ..traces import HAND, hand, links, staged, subgroup, trace, trained

# name, device budget, optimum in seconds, bytes out, bytes in
OPTIMA = [
    ("chain", 30, 6.0, 0, 0),
    ("chain", 20, 6.0, 10, 10),
    ("chain", 10, 10.0, 20, 20),
    ("diamond", 30, 4.0, 0, 0),
    ("diamond", 20, 6.0, 10, 10),
    ("wrap", 25, 4.0, 0, 0),
    ("wrap", 20, 4.0, 10, 10),
    ("clean_and_dirty", 25, 4.0, 0, 10),
    ("clean_and_dirty", 20, 5.0, 10, 20),
    ("swap", 30, 14.0, 60, 60),
    ("copy_stays_valid", 15, 8.0, 10, 20),
    ("gradient_outlives_update", 20, 5.0, 0, 0),
    ("gradient_outlives_update", 15, 7.0, 10, 10),
    ("one_drive", 30, 4.0, 0, 0),
    ("one_drive", 20, 6.0, 20, 20),
    ("two_tiers", 40, 3.0, 0, 0),
    ("two_tiers", 20, 5.0, 20, 20),
    ("host_update", 60, 3.0, 0, 0),
    ("host_update", 40, 5.0, 10, 10),
    ("user_code", 25, 6.0, 0, 0),
    ("user_code", 20, 6.0, 10, 10),
    ("user_code", 15, 6.0, 10, 10),
    ("recompute", 70, 6.0, 0, 0),
    ("recompute", 50, 7.0, 0, 0),
    ("no_way_back", 20, 3.0, 0, 0),
]

MET = ("chain", "diamond", "wrap", "clean_and_dirty", "copy_stays_valid")
"""Traces of which the lower bound is the optimum."""


@pytest.mark.parametrize(("name", "budget", "seconds", "out", "into"), OPTIMA)
def test_the_optimum_is_found(name: str, budget: int, seconds: float, out: int, into: int) -> None:
    trace = hand(name)
    made = plan(trace, Budgets(device_bytes=budget))
    timeline = simulate(trace, made)
    assert timeline.iteration_seconds == pytest.approx(seconds)
    moved = timeline.moved_bytes
    assert sum(moved.get(f"device->{tier}", 0) for tier in ("host", "storage")) == out
    assert sum(moved.get(f"{tier}->device", 0) for tier in ("host", "storage")) == into
    assert timeline.storage_written_bytes == moved.get("device->storage", 0)
    assert made.predicted is not None
    bound = made.predicted.lower_bound_seconds
    assert bound == pytest.approx(seconds, rel=2e-6) if name in MET else bound <= seconds
    saved = sum(trace.subgroups[update.subgroup].device_seconds for update in made.updates)
    needed = trace.ideal_seconds - saved + made.predicted.recompute_seconds
    assert made.predicted.stall_seconds == pytest.approx(seconds - needed)


@pytest.mark.parametrize(
    ("name", "smallest", "stage"),
    [
        ("chain", 10, 0),
        ("diamond", 20, 1),
        ("wrap", 15, 0),
        ("clean_and_dirty", 20, 0),
        ("swap", 30, 0),
        ("copy_stays_valid", 10, 0),
        ("one_drive", 20, 0),
        ("two_tiers", 20, 0),
        ("host_update", 40, 0),
        ("user_code", 15, 2),
        ("recompute", 50, 1),
        ("no_way_back", 20, 1),
    ],
)
def test_floor(name: str, smallest: int, stage: int) -> None:
    trace = hand(name)
    assert floor(trace) == (smallest, stage)
    assert plan(trace, Budgets(device_bytes=smallest)).predicted is not None


@pytest.mark.parametrize("policy", ["ilp", "belady"])
def test_a_plan_without_its_lower_bound_is_the_same_plan(policy: str) -> None:
    trace = hand("chain")
    bounded, plain = (plan(trace, Budgets(device_bytes=10), policy=policy, lower_bound=wanted) for wanted in (True, False))
    assert bounded.predicted is not None and bounded.predicted.lower_bound_seconds == pytest.approx(10.0, rel=2e-6)
    without = bounded.predicted.model_copy(update={"lower_bound_seconds": 0.0})
    assert plain.moves == bounded.moves and plain.predicted == without


def test_every_hand_made_trace_is_used_here() -> None:
    assert {path.stem for path in HAND.glob("*.json")} == {row[0] for row in OPTIMA}


# -- a step whose optimum is known in closed form

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


@pytest.mark.parametrize(
    ("host_rate", "link_rate"),
    [(1.5e9, 50e9), *(pytest.param(*rates, marks=pytest.mark.long) for rates in ((5e9, 50e9), (1e9, 25e9)))],
)
def test_the_share_on_the_host_has_a_closed_form(host_rate: float, link_rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interleaved optimizer step of Maurya et al., Deep Optimizer States, 2024.

    With a share f of the elements updated on the device, U elements per second on the host, B bytes per second in each direction,
    12 bytes of states and 2 of a parameter or gradient per element, and a device that is much faster, a step takes
    max((1 - f) / U, (12 (f - r) + 2 (1 - f)) / B) per element, where the states of a share r stay on the device: least where both
    are equal.
    """
    monkeypatch.setattr("planner.policies.predictions.more_instants", lambda stages: ())  # take 10 s, and change nothing here
    # Room for all parameters and gradients, and for the states of six subgroups, of which two or so are on their way.
    step = step_trace(host_rate, link_rate)
    made = plan(step, Budgets(device_bytes=ELEMENTS * (4 * SUBGROUPS + 6 * 12)), time_limit_seconds=10)
    host, link, stay = 1 / host_rate, 1 / link_rate, 4 / SUBGROUPS
    on_host = 1 - (host - 2 * link + 12 * stay * link) / (host + 10 * link)
    assert len(made.updates) / SUBGROUPS == pytest.approx(on_host, abs=1.5 / SUBGROUPS)
    seconds = SUBGROUPS * ELEMENTS * on_host * host
    assert simulate(step, made).iteration_seconds == pytest.approx(seconds, rel=0.05)
    # The bound takes subgroups that are alike together.
    assert made.predicted is not None
    assert 0.5 * seconds < made.predicted.lower_bound_seconds <= made.predicted.iteration_seconds * (1 + 1e-9)
