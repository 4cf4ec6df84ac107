"""What traces tell of what their ranks share, and how memory is divided."""

from pathlib import Path

import pytest

from planner import Budgets, Link, Node, OptionsError, Trace, TraceError, divided_budgets, node_of

HAND = Path(__file__).parents[3] / "traces" / "hand"


def measured(together: float, alone: float | None) -> Trace:
    trace = Trace.load(HAND / "chain.json")
    links = tuple(
        link.model_copy(update={"bytes_per_second": together, "alone_bytes_per_second": alone}) for link in trace.hardware.links
    )
    return trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": links}))


def test_without_a_word_nothing_is_shared() -> None:
    assert node_of([measured(10.0, None)] * 2).shared == ()


def test_a_tier_that_is_shared_has_the_rate_of_the_fastest_rank() -> None:
    node = node_of([measured(10.0, None), measured(8.0, None)], ["storage"])
    assert [(rate.links, rate.bytes_per_second, rate.ranks) for rate in node.shared] == [
        (("device->storage",), 10.0, (0, 1)),
        (("storage->device",), 10.0, (0, 1)),
    ]
    assert node_of([measured(10.0, None)] * 2, ["host"]).shared == ()  # there is no such link


def test_a_drive_that_both_directions_share_stays_one() -> None:
    drive = Trace.load(HAND / "one_drive.json")
    last = node_of([drive] * 2, ["storage"]).shared[-1]
    assert set(last.links) == {"device->storage", "storage->device"} and last.bytes_per_second == 10.0


def test_rates_measured_alone_and_together_tell_what_is_shared() -> None:
    node = node_of([measured(6.0, 10.0), measured(5.0, 10.0)], ["storage"])
    assert [rate.bytes_per_second for rate in node.shared] == [11.0, 11.0]
    assert node_of([measured(9.8, 10.0)] * 2).shared == ()  # noise
    with pytest.raises(TraceError, match="1 of 2 traces give the rate of device->storage alone"):
        node_of([measured(6.0, 10.0), measured(6.0, None)])


def test_the_rate_alone_changes_neither_old_files_nor_fingerprints() -> None:
    trace = Trace.load(HAND / "chain.json")
    assert "alone_bytes_per_second" not in trace.hardware.links[0].model_dump(by_alias=True)
    assert measured(10.0, None).fingerprint == trace.fingerprint
    assert isinstance(trace.hardware.links[0], Link) and trace.hardware.links[0].own_bytes_per_second == 10.0


def machine(host: int | None, storage: int | None = None, ranks: int = 2) -> Node:
    return Node(name="m", ranks=ranks, host_memory_bytes=host, storage_bytes=storage)


def hosts(found: tuple[Budgets, ...]) -> list[int | None]:
    return [each.host_bytes for each in found]


def test_memory_is_divided_equally_or_by_what_ranks_want() -> None:
    free = Budgets(device_bytes=1)
    assert hosts(divided_budgets(machine(None), [free] * 2)) == [None, None]
    assert hosts(divided_budgets(machine(100), [free] * 2)) == [50, 50]
    wants = [{"host": 90, "storage": 0}, {"host": 10, "storage": 0}]
    assert hosts(divided_budgets(machine(60), [free] * 2, wants)) == [50, 10]
    assert hosts(divided_budgets(machine(120), [free] * 2, wants)) == [100, 20]
    given = Budgets(device_bytes=1, host_bytes=30)
    assert hosts(divided_budgets(machine(100, ranks=3), [given, free, free])) == [30, 35, 35]
    with pytest.raises(OptionsError, match="host budgets of the 2 ranks are 60 bytes together; the machine has 50"):
        divided_budgets(machine(50), [given, given])
