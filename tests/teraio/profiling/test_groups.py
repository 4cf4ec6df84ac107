"""Recompute groups of recorded stages: what they make anew, what they read, and which stages have none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import planner
from runtime.paging import Block
from teraio.profiling import StageRecord
from teraio.profiling.profiler import _recompute_groups as recompute_groups

from ...runtime.memory_mover import UNIT, Bench


class Recorded:
    """Stages 0 and 1 forward, 2 backward. 0 makes `x` and `small` of the weight; 1 makes `y`; 2 reads `x` and `y`."""

    def __init__(self) -> None:
        self.bench = Bench(None)
        self.weight, self.x, self.y = (self.bench.make(name, 2) for name in ("weight", "x", "y"))
        self.small = self.bench.make("small", 1)
        self.ids = {self.weight: 0, self.x: 1, self.small: 2, self.y: 3}
        self.stages = [
            self.stage("forward", [self.weight], [self.x, self.small]),
            self.stage("forward", [self.x, self.small], [self.y]),
            self.stage("backward", [self.x, self.y], []),
        ]

    def stage(self, phase: str, read: list[Block], made: list[Block]) -> StageRecord:
        return StageRecord(name=phase, phase=phase, workspace_bytes=5, read=tuple(read), made=tuple(made))

    def found(self, against: str = "", kept: Sequence[Block] = ()) -> tuple[list[planner.RecomputeGroup], list[tuple[int, str]]]:
        blocks = [
            planner.Block(
                id=number,
                name=block.name,
                kind="activation" if number else "parameter",
                size_bytes=block.size_bytes,
                persistent=not number or block in kept,
                reads=tuple(i for i, stage in enumerate(self.stages) if block in stage.read),
                writes=tuple(i for i, stage in enumerate(self.stages) if block in stage.made),
                movable=block.span is not None,
            )
            for block, number in self.ids.items()
        ]
        groups, others = recompute_groups(self.stages, [1.0, 2.0, 3.0], blocks, self.ids, against=against)
        return list(groups), [(each.stage, each.reason) for each in others]


def test_stages_that_make_what_backward_needs() -> None:
    groups, others = Recorded().found()
    assert [(g.id, g.stage, g.blocks, g.reads, g.duration_seconds) for g in groups] == [
        (0, 0, (1,), (0,), 1.0),
        (1, 1, (3,), (1, 2), 2.0),
    ]
    assert [g.workspace_bytes for g in groups] == [5 + UNIT, 5], "with what is too small to move"
    assert not others


def test_a_stage_that_must_not_run_again() -> None:
    recorded = Recorded()
    recorded.stages[1].never_again = "it draws random numbers"
    groups, others = recorded.found()
    assert [g.stage for g in groups] == [0] and others == [(1, "it draws random numbers")]


def test_a_reason_that_holds_for_all() -> None:
    groups, others = Recorded().found("no")
    assert not groups and others == [(0, "no"), (1, "no")]


@pytest.mark.parametrize("what", ["seen by user code", "not needed by backward"])
def test_what_need_not_be_made_anew(what: str) -> None:
    recorded = Recorded()
    if what == "seen by user code":
        recorded.y.user_visible = True
    else:
        recorded.stages[2] = recorded.stage("backward", [recorded.x], [])
    groups, others = recorded.found()
    assert [g.stage for g in groups] == [0] and not others


def test_a_stage_that_makes_a_result_which_is_kept_beyond_the_iteration() -> None:
    """As a loss that the model returns, with the variable `loss` of an ordinary loop."""
    recorded = Recorded()
    loss = recorded.bench.make("loss", 1)
    recorded.ids[loss] = 4
    recorded.stages[1] = recorded.stage("forward", [recorded.x, recorded.small], [recorded.y, loss])
    assert [g.stage for g in recorded.found()[0]] == [0, 1]
    groups, others = recorded.found(kept=[loss])
    assert [g.stage for g in groups] == [0]
    assert others == [(1, "it makes loss, which your code keeps beyond the end of the iteration")]
