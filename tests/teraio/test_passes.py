"""Traces of steps in several passes, made from that of one pass."""

from __future__ import annotations

import pytest

import planner
from planner.problem import live_bytes
from planner.schema import Budgets
from teraio.passes import with_passes

from ..planner.traces import block, staged, trace
from .test_advice import STAGES, training

FORWARD, BACKWARD = STAGES[:2], STAGES[2:4]


def test_passes_follow_one_another_and_add_their_gradients_up() -> None:
    traced = with_passes(training(), 3)
    assert [stage.name for stage in traced.stages] == [*(*FORWARD, *BACKWARD) * 3, STAGES[4]]
    assert sorted(group.stage for group in traced.recompute) == [0, 1, 4, 5, 8, 9]
    gradient = next(block for block in traced.blocks if block.name == "gradient4")
    assert gradient.writes == (2, 6, 10) and gradient.reads == (6, 10, 12)
    assert [(b.writes, b.reads) for b in traced.blocks if b.name == "activation2"] == [((0,), (3,)), ((4,), (7,)), ((8,), (11,))]
    assert traced.subgroups[0].stage == 12
    adds = 3 * 8 / (2 * 2 * 8 + 2 * 8 + 2 * 32)  # of what the update reads and writes in its second
    assert [s.duration_seconds for s in traced.stages[:8]] == pytest.approx([1, 1, 1, 1, 1, 1, 1 + adds, 1 + adds])
    budgets = Budgets(device_bytes=planner.floor(traced)[0])
    made = planner.plan(traced, budgets, policy="belady")
    assert planner.simulate(traced, made).iteration_seconds >= traced.ideal_seconds


def test_layer_by_layer_all_passes_use_a_parameter_one_after_the_other() -> None:
    plain, layered = with_passes(training(), 4), with_passes(training(), 4, "layer by layer")
    assert [stage.name for stage in layered.stages] == [name for name in STAGES[:4] for _ in range(4)] + [STAGES[4]]
    assert layered.ideal_seconds == pytest.approx(plain.ideal_seconds)
    assert max(live_bytes(layered)) > max(live_bytes(plain)), "what all passes keep is there at once"
    parameter = next(block for block in layered.blocks if block.name == "parameter0")
    assert parameter.reads == (0, 1, 2, 3, 12, 13, 14, 15, 16)
    gradient = next(block for block in layered.blocks if block.name == "gradient5")
    assert gradient.writes == (12, 13, 14, 15) and gradient.reads == (13, 14, 15, 16)


def test_what_outlives_the_passes_is_of_the_last_one() -> None:
    """Such as a loss that user code keeps, or reads after the update."""
    blocks = [block(8, [0], [1], dies_after=3), block(8, [1], [3]), block(8, [0], [1], dies_after=2)]
    traced = with_passes(trace(staged("fbou"), blocks), 2)
    assert [(b.uses, b.dies_after) for b in traced.blocks] == [
        ((0, 1), None),
        ((2, 3), 5),
        ((1,), None),
        ((3, 5), None),
        ((0, 1), None),
        ((2, 3), 4),
    ]


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(planner.UnsupportedError, match="updated between the stages of a pass"):
        with_passes(trace(staged("fbobo"), [block(8, [0], [1])]), 2)
    with pytest.raises(planner.UnsupportedError, match="do not tell layers apart"):
        with_passes(trace(staged(["forward/root", "backward/root", "optimizer/0"]), [block(8, [0], [1])]), 2, "layer by layer")
