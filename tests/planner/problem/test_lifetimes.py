"""How long blocks are used and idle, compared with numbers worked out by hand and by counting stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from planner import Trace, inactive_periods
from planner.problem import block_activities, live_bytes, live_bytes_by_kind, mean_active_fraction

from ..strategies import hardware, traces

HAND = Path(__file__).parents[3] / "traces" / "hand"


def trace_of(seconds: list[float], *blocks: dict[str, Any]) -> Trace:
    stages = [
        {"id": number, "name": f"s{number}", "phase": "forward", "duration_seconds": each} for number, each in enumerate(seconds)
    ]
    common = {"kind": "parameter", "size_bytes": 10, "persistent": True, "reads": [], "writes": []}
    numbered = [{"id": number, "name": f"b{number}", **common, **block} for number, block in enumerate(blocks)]
    return Trace.model_validate({"name": "made", "hardware": hardware(), "stages": stages, "blocks": numbered})


def test_used_and_idle_seconds() -> None:
    trace = trace_of(
        [1.0, 2.0, 4.0, 8.0, 1.0],
        {"reads": [1], "writes": [3]},  # idle in stage 2 (4 s), and in 4 and 0 (2 s) over the end
        {"reads": [1, 2]},  # idle in 3, 4 and 0: 10 s
        {"persistent": False, "reads": [2], "writes": [0]},  # idle in stage 1; there is no block after stage 2
        {"persistent": False, "reads": [], "writes": [4]},
        {"reads": [0, 1, 2, 3, 4]},
    )
    found = block_activities(trace)
    assert [each.block for each in found] == [0, 1, 2, 3, 4]
    assert [each.active_seconds for each in found] == [10.0, 6.0, 5.0, 1.0, 16.0]
    assert [each.active_fraction for each in found] == [10 / 16, 6 / 16, 5 / 16, 1 / 16, 1.0]
    assert [each.idle_seconds for each in found] == [6.0, 10.0, 2.0, 0.0, 0.0]
    assert [each.longest_idle_seconds for each in found] == [4.0, 10.0, 2.0, 0.0, 0.0]
    assert [each.clean for each in found] == [False, True, False, False, True]


def test_a_block_that_lives_for_an_iteration_is_never_clean() -> None:
    """A new block has no copy, even if no stage is known to write it."""
    trace = trace_of([1.0, 1.0, 1.0], {"persistent": False, "reads": [0, 2]})
    assert not block_activities(trace)[0].clean
    assert [period.clean for period in inactive_periods(trace)] == [False]


def test_the_mean_counts_bytes_of_movable_blocks() -> None:
    trace = trace_of(
        [1.0, 3.0],
        {"reads": [0], "size_bytes": 30},
        {"reads": [1], "size_bytes": 10},
        {"reads": [0, 1], "size_bytes": 1000, "movable": False},
    )
    assert mean_active_fraction(trace) == pytest.approx((30 * 1 + 10 * 3) / (40 * 4))
    assert mean_active_fraction(trace_of([1.0])) == 0.0
    assert mean_active_fraction(trace_of([0.0], {"reads": [0]})) == 0.0, "an iteration of no time"


def test_clean_periods_on_the_hand_made_traces() -> None:
    def clean(name: str) -> dict[tuple[int, int], bool]:
        return {(p.block, p.after): p.clean for p in inactive_periods(Trace.load(HAND / f"{name}.json"))}

    assert clean("clean_and_dirty") == {(0, 0): False, (1, 0): True}
    assert clean("copy_stays_valid") == {(0, 0): False, (0, 2): True}
    assert clean("wrap") == {(0, 2): False}


@given(traces())
def test_kinds_and_workspace_make_up_what_is_live(trace: Trace) -> None:
    kinds = live_bytes_by_kind(trace)
    assert set(kinds) == {block.kind for block in trace.blocks}
    for stage, live in zip(trace.stages, live_bytes(trace), strict=True):
        assert sum(sizes[stage.id] for sizes in kinds.values()) + stage.workspace_bytes == live
        for kind, sizes in kinds.items():
            there = [b for b in trace.blocks if b.kind == kind and (b.persistent or b.uses[0] <= stage.id <= b.last_stage)]
            assert sizes[stage.id] == sum(block.size_bytes for block in there)


@given(traces())
def test_used_and_idle_make_up_the_life(trace: Trace) -> None:
    for block, found in zip(trace.blocks, block_activities(trace), strict=True):
        lives = trace.stages if block.persistent else trace.stages[block.uses[0] : block.last_stage + 1]
        life = sum(stage.duration_seconds for stage in lives)
        assert found.active_seconds + found.idle_seconds == pytest.approx(life, abs=1e-9)
        assert 0 <= found.longest_idle_seconds <= found.idle_seconds + 1e-12
        assert 0 <= found.active_fraction <= 1 + 1e-12


@given(traces())
def test_a_clean_period_follows_a_write_or_an_earlier_period(trace: Trace) -> None:
    """The use before a dirty period wrote the block or created it."""
    for period in inactive_periods(trace):
        block = trace.blocks[period.block]
        if period.clean:
            assert period.after not in block.writes or period.read_only
        else:
            assert period.after in block.writes or (not block.persistent and period.after == block.uses[0])
