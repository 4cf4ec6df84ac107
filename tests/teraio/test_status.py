"""What of the time in collectives is waiting, worked out by hand."""

from __future__ import annotations

import pytest

from teraio.watching import waited_for_ranks


def test_the_shortest_time_of_each_stage_is_work_and_the_rest_is_waiting() -> None:
    """The ranks take turns in being late."""
    one, two = {"a": 1.0, "b": 5.0}, {"a": 4.0, "b": 2.0}
    assert waited_for_ranks([one, two]) == (3.0, 3.0)
    assert waited_for_ranks([one, one, two]) == (3.0, 3.0, 3.0)
    assert waited_for_ranks([{"a": 1.0}, {"a": 1.5}]) == (0.0, 0.5)


@pytest.mark.parametrize("seconds", [[], [{"a": 1.0}], [{}, {}], [{"a": 1.0}, {"b": 1.0}], [{"a": 1.0}, {"a": 1.0, "b": 1.0}]])
def test_without_the_same_collectives_nothing_can_be_told(seconds: list[dict[str, float]]) -> None:
    assert waited_for_ranks(seconds) is None
