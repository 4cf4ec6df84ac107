"""Plans for a machine: never slower than plans that the ranks make for themselves, one for equal ranks, made once."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from planner import Budgets, Node, NodeRate, OptionsError, Plan, PlanError, Trace, node_of, plan, plan_node, simulate_node
from planner.problem import live_bytes

from ..strategies import hardware, transformer_trace

HAND = Path(__file__).parents[3] / "traces" / "hand"


def hand(name: str) -> Trace:
    return Trace.load(HAND / f"{name}.json")


class Maker:
    """Makes plans and counts them."""

    def __init__(self) -> None:
        self.made: list[tuple[Trace, Budgets]] = []

    def __call__(self, trace: Trace, budgets: Budgets, known: Sequence[Plan]) -> Plan:
        self.made.append((trace, budgets))
        return plan(trace, budgets, policy="teraio", incumbents=known, lower_bound=False)


def shared_drives(traces: Sequence[Trace]) -> Node:
    return node_of(traces, ["storage"])


def test_one_rank_gets_the_plan_that_it_makes_for_itself() -> None:
    trace = hand("chain")
    found = plan_node(Node(name="m", ranks=1), [trace], [Budgets(device_bytes=10)])
    expected = plan(trace, Budgets(device_bytes=10))
    assert [(made.moves, made.predicted) for made in found.plans] == [(expected.moves, expected.predicted)]
    assert found.way == "apart" and found.alone_seconds == (10.0,)


def test_equal_ranks_get_one_plan_that_is_made_once() -> None:
    trace, maker = hand("chain"), Maker()
    own = plan_node(Node(name="m", ranks=8), [trace] * 8, [Budgets(device_bytes=10)] * 8, make=maker)
    assert len(maker.made) == 1 and len(set(map(str, own.plans))) == 1
    assert own.timeline.iteration_seconds == own.alone_seconds[0] == 10.0
    maker = Maker()
    together = plan_node(shared_drives([trace] * 2), [trace] * 2, [Budgets(device_bytes=10)] * 2, make=maker)
    rates = [made.hardware.links[0].bytes_per_second for made, _ in maker.made]
    assert rates[:2] == [10.0, 5.0]  # for itself, with a fair share
    assert together.timeline.iteration_seconds == 14.0
    predicted = together.plans[0].predicted
    assert predicted is not None and predicted.iteration_seconds == 14.0
    assert all(made.trace_fingerprint == trace.fingerprint for made in together.plans)


@pytest.mark.parametrize("policy", ["ilp", "teraio", "belady"])
@pytest.mark.parametrize("unequal", [False, True])
def test_planned_together_is_never_slower_than_apart(policy: str, unequal: bool) -> None:
    trace = hand("two_tiers") if policy == "ilp" else transformer_trace(layers=2, rate=4e9)
    other = trace.rebuilt(stages=[s.model_copy(update={"duration_seconds": 0.4 * s.duration_seconds}) for s in trace.stages])
    traces = [trace, other if unequal else trace]
    size = int(0.5 * max(live_bytes(trace)))

    def make(each: Trace, budgets: Budgets, known: Sequence[Plan]) -> Plan:
        return plan(each, budgets, policy=policy, incumbents=known, lower_bound=False)

    node = shared_drives(traces)
    found = plan_node(node, traces, [Budgets(device_bytes=size)] * 2, make=make)
    alone = plan_node(Node(name="m", ranks=2), traces, [Budgets(device_bytes=size)] * 2, make=make)
    assert found.apart is not None
    assert found.timeline.iteration_seconds <= found.apart.iteration_seconds
    assert found.timeline.iteration_seconds >= alone.timeline.iteration_seconds * (1 - 1e-9)
    assert simulate_node(node, traces, found.plans) == found.timeline


def test_planning_together_gains_where_a_rank_has_another_way() -> None:
    """Two ranks share a drive and have host tiers of their own. For itself, a rank would use both tiers."""
    trace = hand("two_tiers")
    node = shared_drives([trace] * 2)
    slow = node.model_copy(update={"shared": tuple(rate.model_copy(update={"bytes_per_second": 2.0}) for rate in node.shared)})
    found = plan_node(slow, [trace] * 2, [Budgets(device_bytes=20)] * 2)
    assert found.apart is not None and found.apart.iteration_seconds == pytest.approx(23.0)  # 3 + 2 x 10 bytes at 1 byte/s
    assert found.timeline.iteration_seconds == pytest.approx(7.0)  # both blocks to the host tier
    assert found.way == "fair shares"


def test_host_memory_goes_to_the_rank_that_wants_it() -> None:
    trace = hand("chain").rebuilt(hardware=hardware(host=True, rate=2.5))
    small = trace.rebuilt(blocks=[b.model_copy(update={"size_bytes": 1}) for b in trace.blocks])
    node = Node(name="m", ranks=2, host_memory_bytes=20)
    found = plan_node(node, [trace, small], [Budgets(device_bytes=10)] * 2)
    assert found.plans[0].budgets.host_bytes is not None and found.plans[0].budgets.host_bytes > 10
    sums = [made.budgets.host_bytes or 0 for made in found.plans]
    assert sum(sums) <= 20
    assert found.apart is not None and found.timeline.iteration_seconds < found.apart.iteration_seconds


def test_numbers_that_do_not_fit_are_refused() -> None:
    trace = hand("chain")
    with pytest.raises(PlanError, match="2 ranks, found 1 traces"):
        plan_node(Node(name="m", ranks=2), [trace], [Budgets(device_bytes=10)])
    node = Node(name="m", ranks=2, storage_bytes=30)
    with pytest.raises(OptionsError, match="storage budgets of the 2 ranks are 40 bytes together; the machine has 30"):
        plan_node(node, [trace] * 2, [Budgets(device_bytes=10, storage_bytes=20)] * 2)


def test_what_a_slow_rank_leaves_goes_to_the_other() -> None:
    """A rank that copies little leaves most of the drive to the other: the others' rest is more than half."""
    trace, maker = hand("chain"), Maker()
    idle = trace.rebuilt(blocks=[b.model_copy(update={"size_bytes": 1}) for b in trace.blocks])
    node = Node(
        name="m",
        ranks=2,
        shared=(NodeRate(name="drive", links=("device->storage",), bytes_per_second=10.0),),
    )
    plan_node(node, [trace, idle], [Budgets(device_bytes=10)] * 2, make=maker)
    rates = [made.hardware.links[0].bytes_per_second for made, _ in maker.made if made.blocks[0].size_bytes == 10]
    assert rates[:2] == [10.0, 5.0] and all(5.0 < rate <= 10.0 for rate in rates[2:])
