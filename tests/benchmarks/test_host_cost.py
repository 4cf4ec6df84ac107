"""The iterations without arithmetic that `host_cost` measures: they move what their plan says, under its budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.host_cost import measure_one
from benchmarks.idle_stages import IdleStages
from benchmarks.idle_training import IdleTraining
from runtime.paging import State


@pytest.fixture(params=[IdleStages, IdleTraining])
def moving(request: pytest.FixtureRequest) -> Iterator[IdleStages | IdleTraining]:
    made = request.param(500)
    yield made
    made.close()


def test_an_iteration_moves_what_is_planned(moving: IdleStages | IdleTraining) -> None:
    pager = moving.pager
    moving.iterate()
    before, pager.account.peak_bytes = pager.account.evictions, 0
    moving.iterate()
    assert pager.account.evictions - before == len(moving.moves) >= 1900
    assert pager.account.budget_bytes is not None and 0 < pager.account.peak_bytes <= pager.account.budget_bytes
    assert pager.account.waited_seconds == 0


def test_blocks_that_no_stage_uses_wait_away(moving: IdleStages | IdleTraining) -> None:
    other = type(moving)(2500, moving=False)
    other.iterate()
    assert sum(block.state is State.OFFLOADED for block in other.pager.blocks) >= 500
    assert other.pager.account.evictions >= 500
    other.close()


def test_each_layer_has_its_figures() -> None:
    samples: dict[str, list[float]] = {}
    stage, move, iteration = measure_one("pager", IdleStages, 500, 1, samples)
    assert (stage.unit, move.unit, iteration.unit) == ("µs", "µs", "ms")
    assert "planned" in move.note and "by the clock" in iteration.note
    assert all(len(times) == 1 for times in samples.values()) and len(samples) == 4
