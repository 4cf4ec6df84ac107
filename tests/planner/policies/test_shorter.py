"""Plans for shorter inputs: sizes and times as functions of the length, and what need not move there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from planner import Budgets, OptionsError, Plan, PlanError, TeraioError, Trace, plan, recomputed, simulate, with_shorter
from planner.schema import Work

from ..strategies import problems
from ..traces import block, by_hand, group, hand, hardware, layers, move, staged, trace, varying


def test_a_trace_at_another_length() -> None:
    blocks = [block(100, [], [0, 1], "parameter"), block(10, [0], [1]), block(20, [1], [2]), block(30, [1], [2], movable=False)]
    whole = trace(staged("ffb"), blocks, recompute=[group(1, [2], [0, 1], workspace=35)])
    whole = varying(
        whole,
        workspace_bytes=[{"id": 1, "coefficients": [0, 0, 1]}],
        stage_seconds=[{"id": 0, "coefficients": [2, 0, 0.01]}, {"id": 1, "coefficients": [5, 5]}],
        movable_bytes=9,
    ).rebuilt(work=Work(tokens=1000, samples=1, flops=1e9, peak_flops_per_second=1e12))
    half = whole.at(5)
    assert [each.size_bytes for each in half.blocks] == [100, 5, 10, 15]
    assert [each.movable for each in half.blocks] == [True, False, True, False], "what is too small, what can be made again, ..."
    assert [stage.workspace_bytes for stage in half.stages] == [0, 25, 0]
    assert [stage.duration_seconds for stage in half.stages] == [pytest.approx(2.25 / 3), pytest.approx(30 / 55), 1.0]
    # Of the 35 bytes, 30 are an output that is not made anew; the workspace is 25 bytes more than the trace has.
    assert half.recompute[0].workspace_bytes == 45 and half.recompute[0].duration_seconds == pytest.approx(30 / 55)
    assert half.work == Work(tokens=500, samples=1) and half.lengths is None
    assert whole.at(10) is whole and whole.fingerprint == whole.rebuilt(lengths=None).fingerprint != half.fingerprint
    for length in (0, 11):
        with pytest.raises(OptionsError, match=f"found length {length}, wanted one from 1 to 10"):
            whole.at(length)
    with pytest.raises(OptionsError, match=r"found 2 sizes of inputs \(5 x 2\), wanted 1"):
        whole.at(5, 2)
    with pytest.raises(OptionsError, match="the trace is of one length"):
        half.at(5)


def test_what_has_room_stays_and_the_plan_is_one_file(tmp_path: Path) -> None:
    whole = varying(hand("chain"))
    budgets = Budgets(device_bytes=20)
    made = with_shorter(plan(whole, budgets), whole, [10, 7, 5])
    assert [each.sizes for each in made.shorter] == [(7,), (5,)], "the plan itself is for the longest"
    at_five = made.shorter[1]
    assert len(at_five.left_out) == len(made.moves) and at_five.predicted.iteration_seconds == whole.at(5).ideal_seconds == 3.0
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    content = json.loads(made.text())
    first, *_ = content["shorter"]
    for damaged, message in (([first, first], "descend"), ([{**first, "left_out": [len(made.moves)]}], "refers to move")):
        (tmp_path / "plan.json").write_text(json.dumps({**content, "shorter": damaged}))
        with pytest.raises(PlanError, match=message):
            Plan.load(tmp_path / "plan.json")
    assert "shorter" not in plan(hand("chain"), budgets).text()
    by_itself = with_shorter(made, whole).shorter
    assert by_itself[0].sizes == (8,) and len(by_itself[-1].left_out) == len(made.moves), "down to where all has room"


@pytest.mark.parametrize(("start", "waits_in", "left_out"), [(3, "storage", ()), (4, "device", (0,))])
def test_only_blocks_that_are_away_when_the_iteration_ends_have_to_move(start: int, waits_in: str, left_out: object) -> None:
    """A state that leaves after the iteration has begun may stay in a short one, although its use before was in the last one."""
    whole = varying(trace(staged("ffbo", 10.0), [block(10, [0], [1, 2]), block(10, [3], [3], "optimizer_state")]))
    made = by_hand(whole, 15, [move(1, 3, 7, 7, leave=start)], away={1: waits_in})
    (short,) = with_shorter(made, whole, [5]).shorter
    assert short.left_out == left_out


def test_copies_begin_earlier_where_shorter_inputs_leave_room_for_that(tmp_path: Path) -> None:
    """The first block has to make way at all lengths. Only short inputs have room for it before the last stage, too."""
    blocks = [block(6, [0], [5]), block(12, [1], [], "gradient"), block(10, [2], [3, 4])]
    whole = varying(trace(staged("ffffff"), blocks, hardware(rate=2.0)))
    made = with_shorter(plan(whole, Budgets(device_bytes=14)), whole, [5])
    (short,) = made.shorter
    at_five = whole.at(5)
    assert made.replayed.iteration_seconds == pytest.approx(6 + 2 * 3), "both copies are waited for"
    assert simulate(at_five, made.thinned((), (), at_five)).iteration_seconds == pytest.approx(3 + 2 * 1.5)
    assert short.moves and short.predicted.iteration_seconds == pytest.approx(3 + 1.5)
    followed = made.followed(short, at_five)
    assert simulate(at_five, followed).iteration_seconds == short.predicted.iteration_seconds
    assert followed.initial == made.initial and made.followed(None, at_five).moves == made.moves
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_stages_run_again_only_where_there_is_no_room() -> None:
    """What is not dropped stays, and the numbers of stages stay those of the plan."""
    whole = varying(layers(rate=1.0))
    made = with_shorter(plan(whole, Budgets(device_bytes=34)), whole, [9, 5])
    assert len(made.recompute) == 1 and not made.moves
    nine, five = made.shorter
    assert nine.skipped == () and nine.predicted.recompute_seconds == pytest.approx(0.9)
    assert five.skipped == (0,) and five.predicted.recompute_seconds == 0.0
    assert five.predicted.iteration_seconds == pytest.approx(whole.at(5).ideal_seconds)
    skipped = made.thinned((), five.skipped, whole.at(5))
    assert [stage.phase for stage in recomputed(whole.at(5), skipped.recompute).stages].count("recompute") == 1
    assert Plan.model_validate_json(made.text()) == made


def test_the_smallest_plan_that_fits_inputs_in_length_and_number() -> None:
    whole = varying(hand("chain"), lowest=(1, 2), highest=(10, 4), places=(0, 1))
    made = with_shorter(plan(whole, Budgets(device_bytes=20)), whole)
    sizes = [each.sizes for each in made.shorter]
    assert (10, 2) in sizes and (10, 4) not in sizes and all(number in (2, 4) for _, number in sizes)
    assert (found := made.shorter_for((9, 2))) is not None and found.sizes == (10, 2)
    assert (found := made.shorter_for((1, 3))) is not None and found.sizes[1] == 4
    assert made.shorter_for((10, 3)) is None and made.shorter_for((5,)) is None


@given(problems())
def test_a_thinned_plan_is_never_slower_and_leaves_the_border_as_it_is(problem: tuple[Trace, Budgets]) -> None:
    whole, budgets = varying(problem[0]), problem[1]
    try:
        made = plan(whole, budgets, policy="belady", lower_bound=False)
    except TeraioError:
        return
    for shorter in with_shorter(made, whole, (9, 6, 3)).shorter:
        short = whole.at(*shorter.sizes)
        replayed = simulate(short, made.followed(shorter, short))
        assert replayed.iteration_seconds == shorter.predicted.iteration_seconds
        all_of_them = [n for n, move in enumerate(made.moves) if not short.blocks[move.block].movable]
        try:
            most = simulate(short, made.thinned(all_of_them, (), short)).iteration_seconds
        except TeraioError:
            continue
        assert replayed.iteration_seconds <= most * (1 + 1e-9)
