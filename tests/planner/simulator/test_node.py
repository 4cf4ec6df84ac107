"""The ranks of a machine, replayed together: the numbers that are worked out by hand, and what must be equal to a rank alone."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import (
    Budgets,
    InfeasiblePlanError,
    Node,
    NodeRate,
    Plan,
    PlanError,
    Prefetch,
    Timeline,
    Trace,
    plan,
    simulate,
    simulate_node,
)

from ..strategies import random_plan, training_problems

HAND = Path(__file__).parents[3] / "traces" / "hand"
TIGHT = {"chain": 10, "swap": 30, "two_tiers": 20, "host_update": 40, "user_code": 15, "one_drive": 20, "wrap": 20}
TIGHT["recompute"] = 50
NAMES = tuple(TIGHT)


def machine(ranks: int, **rates: float) -> Node:
    """A node whose ranks share the links that are named, such as `device_storage=10.0`."""
    shared = [{"name": name, "links": (name.replace("_", "->"),), "bytes_per_second": rate} for name, rate in rates.items()]
    return Node(name="made up", ranks=ranks, shared=tuple(NodeRate.model_validate(each) for each in shared))


@pytest.fixture(scope="module")
def hand_made() -> dict[str, tuple[Trace, Plan, Timeline]]:
    found = {}
    for name in NAMES:
        trace = Trace.load(HAND / f"{name}.json")
        made = plan(trace, Budgets(device_bytes=TIGHT[name]), lower_bound=False)
        found[name] = (trace, made, simulate(trace, made))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_replayed_as_ever(hand_made: dict[str, tuple[Trace, Plan, Timeline]], name: str) -> None:
    trace, made, alone = hand_made[name]
    assert simulate_node(machine(1), [trace], [made]).ranks == (alone,)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_share_nothing_are_as_fast_as_each_alone(
    hand_made: dict[str, tuple[Trace, Plan, Timeline]], name: str
) -> None:
    trace, made, alone = hand_made[name]
    assert simulate_node(machine(3), [trace] * 3, [made] * 3).ranks == (alone,) * 3


@pytest.mark.parametrize("name", ["chain", "swap"])
def test_equal_ranks_on_one_drive_have_half_its_rate(hand_made: dict[str, tuple[Trace, Plan, Timeline]], name: str) -> None:
    """Both copy at the same times, so each gets 5 of 10 bytes per second: as one rank on links that are half as fast."""
    trace, made, alone = hand_made[name]
    both = machine(2, device_storage=10.0, storage_device=10.0)
    timeline = simulate_node(both, [trace] * 2, [made] * 2)
    links = tuple(link.model_copy(update={"bytes_per_second": 5.0}) for link in trace.hardware.links)
    slow = trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": links}))
    expected = simulate(slow, made.model_copy(update={"trace_fingerprint": slow.fingerprint}))
    assert [rank.iteration_seconds for rank in timeline.ranks] == pytest.approx([expected.iteration_seconds] * 2)
    assert timeline.iteration_seconds > alone.iteration_seconds


def test_chain_on_one_drive(hand_made: dict[str, tuple[Trace, Plan, Timeline]]) -> None:
    """Four copies of 10 bytes that nothing hides, at 5 bytes per second: 6 + 8 s."""
    trace, made, _ = hand_made["chain"]
    timeline = simulate_node(machine(2, device_storage=10.0, storage_device=10.0), [trace] * 2, [made] * 2)
    assert timeline.iteration_seconds == pytest.approx(14.0)
    assert timeline.moved_bytes("device->storage") == 2 * 20


def test_a_faster_rank_waits_for_the_slower_one(hand_made: dict[str, tuple[Trace, Plan, Timeline]]) -> None:
    trace, made, alone = hand_made["chain"]  # 10 s
    quick = trace.rebuilt(stages=[stage.model_copy(update={"duration_seconds": 0.5}) for stage in trace.stages])
    theirs = plan(quick, Budgets(device_bytes=30), lower_bound=False)  # 3 s, no copies
    timeline = simulate_node(machine(2, device_storage=10.0), [trace, quick], [made, theirs])
    assert timeline.iteration_seconds == pytest.approx(10.0) == alone.iteration_seconds
    assert (timeline.own_seconds(0), timeline.own_seconds(1)) == pytest.approx((10.0, 3.0))
    assert [rank.iteration_seconds for rank in timeline.ranks] == pytest.approx([10.0, 10.0])
    assert timeline.ranks[1].stall_seconds == 0.0


def test_copies_run_while_a_rank_waits_for_the_others(hand_made: dict[str, tuple[Trace, Plan, Timeline]]) -> None:
    """The states of `swap` need 12 s beside 2 s of stages; 6 of them at the iteration's end, which a slower rank hides."""
    trace, made, alone = hand_made["swap"]
    assert alone.iteration_seconds == pytest.approx(14.0)
    slow = trace.rebuilt(stages=[stage.model_copy(update={"duration_seconds": 20.0}) for stage in trace.stages])
    theirs = plan(slow, Budgets(device_bytes=60), lower_bound=False)
    timeline = simulate_node(machine(2), [trace, slow], [made, theirs])
    assert timeline.iteration_seconds == pytest.approx(40.0)
    assert timeline.own_seconds(0) == pytest.approx(8.0)


def test_a_link_that_was_measured_alone_has_that_rate(hand_made: dict[str, tuple[Trace, Plan, Timeline]]) -> None:
    trace, made, _ = hand_made["chain"]
    links = tuple(
        link.model_copy(update={"bytes_per_second": 5.0, "alone_bytes_per_second": 10.0}) for link in trace.hardware.links
    )
    measured = trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": links}))
    theirs = made.model_copy(update={"trace_fingerprint": measured.fingerprint})
    assert simulate_node(machine(1), [measured], [theirs]).iteration_seconds == pytest.approx(10.0)
    assert simulate(measured, theirs).iteration_seconds == pytest.approx(14.0)


def test_what_does_not_fit_is_refused_with_its_rank(hand_made: dict[str, tuple[Trace, Plan, Timeline]]) -> None:
    trace, made, _ = hand_made["chain"]
    with pytest.raises(PlanError, match="2 ranks, found 1 traces and 1 plans"):
        simulate_node(machine(2), [trace], [made])
    little = machine(2).model_copy(update={"storage_bytes": 30})
    with pytest.raises(InfeasiblePlanError, match="storage tiers of the 2 ranks hold 40 bytes together; made up has 30"):
        simulate_node(little, [trace] * 2, [made] * 2)
    slow = trace.rebuilt(stages=[stage.model_copy(update={"duration_seconds": 2.0}) for stage in trace.stages])
    # Activation 0 comes back during stage 1, when there is room; then stage 2 has none for its output.
    move = next(each for each in made.moves if each.block == 0)
    early = move.model_copy(update={"prefetch": Prefetch(start=1, ready_by=5)})
    fields = {"moves": (early,), "budgets": Budgets(device_bytes=20), "trace_fingerprint": slow.fingerprint}
    stuck = made.model_copy(update=fields)
    fine = plan(slow, Budgets(device_bytes=30), lower_bound=False)
    with pytest.raises(InfeasiblePlanError, match="rank 1: stage .* waits for ever"):
        simulate_node(machine(2), [slow, slow], [fine, stuck])


@given(training_problems(), st.integers(0, 99))
def test_any_rank_is_the_same_alone_and_beside_others(case: tuple[Trace, Budgets], seed: int) -> None:
    trace, budgets = case
    try:
        made = random_plan(trace, budgets, random.Random(seed))
    except InfeasiblePlanError:  # the host tier is too small
        return
    alone = rounded(simulate(trace, made))
    for count in (1, 2):
        together = simulate_node(machine(count), [trace] * count, [made] * count)
        assert [rounded(timeline) for timeline in together.ranks] == [alone] * count


def rounded(timeline: Timeline) -> dict[str, Any]:
    """The same up to rounding, and the order of changes of memory at the same moment: a link and the processor may swap."""

    def times(each: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(round(value, 9) if isinstance(value, float) else value for value in each)

    found = {field.name: getattr(timeline, field.name) for field in dataclasses.fields(timeline)}
    found |= {name: [times(each) for each in found[name]] for name in ("stages", "transfers", "updates", "memory")}
    return {**found, "memory": sorted(found["memory"]), "iteration_seconds": round(timeline.iteration_seconds, 9)}
