"""How long blocks are used, idle and alive, compared with numbers worked out by hand and by counting stages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from planner import Budgets, InfeasiblePlanError, Trace, floor, inactive_periods, plan, simulate
from planner.problem import Problem, block_activities, host_updatable, live_bytes

from ..strategies import traces
from ..traces import Entry, block, by_hand, hand, hardware, move, staged, subgroup, trace, trained


def test_used_and_idle_seconds() -> None:
    made = trace(
        staged("fffff", [1.0, 2.0, 4.0, 8.0, 1.0]),
        [
            block(10, [3], [1], "parameter"),  # idle in stage 2 (4 s), and in 4 and 0 (2 s) over the end
            block(10, [], [1, 2], "parameter"),  # idle in 3, 4 and 0: 10 s
            block(10, [0], [2]),  # idle in stage 1; there is no block after stage 2
            block(10, [4]),
            block(10, [], range(5), "parameter"),
        ],
    )
    found = block_activities(made)
    assert [each.active_fraction for each in found] == [10 / 16, 6 / 16, 5 / 16, 1 / 16, 1.0]
    assert [each.idle_seconds for each in found] == [6.0, 10.0, 2.0, 0.0, 0.0]
    assert [each.longest_idle_seconds for each in found] == [4.0, 10.0, 2.0, 0.0, 0.0]
    assert [each.clean for each in found] == [False, True, False, False, True]


@pytest.mark.parametrize(("host", "sliced"), [(1.0, 100 + 100 + 25 + 3), (None, 400 + 50 + 3)])
def test_updates_in_slices_have_one_parameter_its_gradient_and_a_quarter_of_it(host: float | None, sliced: int) -> None:
    """If elements can be updated by themselves: optimizers for which that is so can update on the host."""
    made = trace(
        staged("fo", workspaces={1: 50}),
        [*trained((100, 100, 200), [0], 0, 1), block(3, [], [0, 1], "parameter", movable=False)],
        subgroups=[subgroup(1, range(3), host=host)],
    )
    assert floor(made) == (453, 1) and floor(made, in_slices=True)[0] == sliced


@pytest.mark.parametrize("name", ["chain", "wrap", "gradient_outlives_update", "recompute"])
def test_periods_around_each_stage(name: str) -> None:
    """Also those that go on over the iteration's end."""
    made = hand(name)
    problem = Problem.of(made, Budgets(device_bytes=max(live_bytes(made))))
    inside = [range(period.after + 1, period.before) for period in problem.periods]
    assert any(inside)
    for stage in range(problem.stage_count):
        wanted = [index for index, stages in enumerate(inside) if {stage, stage + problem.stage_count} & {*stages}]
        assert problem.covering(stage) == wanted


@given(traces())
def test_what_is_live_and_for_how_long(made: Trace) -> None:
    """The use before a dirty period wrote the block or created it."""
    for stage, live in zip(made.stages, live_bytes(made), strict=True):
        there = [each for each in made.blocks if each.persistent or each.uses[0] <= stage.id <= each.last_stage]
        assert live == sum(each.size_bytes for each in there) + stage.workspace_bytes
    for each, found in zip(made.blocks, block_activities(made), strict=True):
        lives = made.stages if each.persistent else made.stages[each.uses[0] : each.last_stage + 1]
        life = sum(stage.duration_seconds for stage in lives)
        assert found.active_fraction * made.ideal_seconds + found.idle_seconds == pytest.approx(life, abs=1e-9)
        assert 0 <= found.longest_idle_seconds <= found.idle_seconds + 1e-12
        assert 0 <= found.active_fraction <= 1 + 1e-12
    for period in inactive_periods(made):
        of = made.blocks[period.block]
        if period.clean:
            assert period.after not in of.writes or period.read_only
        else:
            assert period.after in of.writes or (not of.persistent and period.after == of.uses[0])


# -- blocks that outlive their last use, such as gradients that user code frees after the optimizer's step


def outliving(*blocks: Entry, workspaces: dict[int, int] | None = None, **fields: Any) -> Trace:
    """Five stages of 1 s; both links carry 10 bytes per second. The first block outlives its uses in stages 0 and 1."""
    return trace(staged("bbbbb", 1.0, workspaces), blocks, **fields)


def gradient(size: int, writes: list[int], reads: list[int], dies_after: int | None = 4, **more: Any) -> Entry:
    return block(size, writes, reads, "gradient", dies_after=dies_after, **more)


@pytest.mark.parametrize("policy", ["ilp", "device-updates", "teraio", "g10", "belady", "zero-infinity"])
def test_every_policy_makes_room_and_brings_nothing_back(policy: str) -> None:
    """The last use writes the block, so it must be copied out. That takes 1 s, and nothing hides it."""
    made = outliving(gradient(10, [0, 1], []), workspaces={2: 10})
    found = plan(made, Budgets(device_bytes=15), policy=policy)
    timeline = simulate(made, found)
    assert [each.prefetch for each in found.moves] == [None]
    assert timeline.moved_bytes == {"device->storage": 10} and timeline.peak_bytes["storage"] == 10
    assert timeline.iteration_seconds == pytest.approx(6.0)
    assert found.predicted is not None and found.predicted.lower_bound_seconds <= 6.0


def test_one_that_dies_on_its_way_out_takes_its_room_until_it_is_out() -> None:
    """The copy is queued when stage 3 has ended and takes 6 s. Stage 0 makes the block anew and waits for it."""
    made = outliving(gradient(60, [0], [1]), workspaces={4: 5})
    timeline = simulate(made, by_hand(made, 65, [move(0, 1, 5, leave=3)]))
    assert timeline.iteration_seconds == pytest.approx(5.0 + 5.0)
    assert timeline.peak_bytes == {"device": 65, "host": 0, "storage": 60}


def test_a_copy_that_another_stage_has_made_serves() -> None:
    made = outliving(gradient(10, [0], [2]), workspaces={3: 10})
    dropped = move(0, 2, 5, out=False)
    timeline = simulate(made, by_hand(made, 15, [move(0, 0, 2, 2), dropped]))
    assert timeline.moved_bytes == {"device->storage": 10, "storage->device": 10}
    with pytest.raises(InfeasiblePlanError, match="no valid copy"):
        simulate(made, by_hand(made, 15, [dropped]))


@pytest.mark.parametrize("given", [move(0, 1, 5, leave=4), move(0, 1, 4), move(0, 0, 5, leave=1), move(1, 1, 5)])
def test_moves_for_good_that_the_trace_does_not_allow(given: Entry) -> None:
    """The block dies then anyway; `before` is not its death; `after` is not its last use; the block dies with its last use."""
    made = outliving(gradient(10, [0], [1]), gradient(10, [0], [1], None))
    with pytest.raises(InfeasiblePlanError, match="blocks may leave for good between their last use and their death"):
        simulate(made, by_hand(made, 100, [given]))


def test_an_update_on_the_host_takes_it_for_good() -> None:
    """The gradient stays on the host until the update, whenever it would die."""
    made = outliving(
        block(10, [2], [0, 2], "parameter"),
        gradient(10, [0], [2]),
        machine=hardware(host=True, rate=10.0),
        subgroups=[subgroup(2, [0, 1], host=0.5)],
    )
    assert [each.id for each in host_updatable(made)] == [0]
    problem = Problem.of(made, Budgets(device_bytes=100), [0])
    assert problem.live_bytes == (20, 10, 10, 10, 10) and not any(period.final for period in problem.periods)
    found = plan(made, Budgets(device_bytes=20), policy="host-updates")
    assert [(each.block, each.before) for each in found.moves if each.prefetch is None] == [(1, 2)]
    assert simulate(made, found).peak_bytes["device"] <= 20
