"""User code between regions: what it waits for, what it holds back, and plans that work around it."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Plan, Timeline, Trace, plan, simulate
from planner.bound import lower_bound_seconds
from planner.problem import Problem, host_updatable, live_bytes, next_user_stage, user_stages
from planner.simulator import STAGES, critical_path

from ..strategies import (
    hardware,
    problems,
    random_plan,
    replay_of_random_plan,
    training_problems,
    transformer_trace,
    with_user_code,
)

HAND = Path(__file__).parents[3] / "traces" / "hand"
OUT, IN = "device->storage", "storage->device"


def made(phases: str, blocks: list[dict[str, Any]], moves: list[tuple[int, ...]], *, device: int = 1000) -> tuple[Trace, Plan]:
    """Stages of 1 s, phases by first letter, links of 10 bytes per second. Moves: block, after, leave, start, before."""
    names = {"f": "forward", "b": "backward", "o": "optimizer", "u": "user"}
    stages = [{"id": n, "name": f"s{n}", "phase": names[p], "duration_seconds": 1.0} for n, p in enumerate(phases)]
    trace = Trace.model_validate({"name": "made", "hardware": hardware(rate=10.0), "stages": stages, "blocks": blocks})
    laid_out = [
        {
            "block": number,
            "after": after,
            "before": before,
            "tier": "storage",
            "offload": {"start": leave, "free_after": leave},
            "prefetch": {"start": start, "ready_by": before},
        }
        for number, after, leave, start, before in moves
    ]
    waiting = [{"block": m[0], "tier": "storage"} for m in moves if blocks[m[0]]["persistent"] and m[2] < len(phases) <= m[3]]
    content = {"trace_fingerprint": trace.fingerprint, "policy": "by hand", "budgets": {"device_bytes": device}}
    return trace, Plan.model_validate({**content, "moves": laid_out, "initial": waiting})


def block(number: int, kind: str, size: int, *uses: int) -> dict[str, Any]:
    """Written by its first use; persistent if it is a parameter or a state."""
    persistent = kind in ("parameter", "optimizer_state")
    return {
        "id": number,
        "name": f"b{number}",
        "kind": kind,
        "size_bytes": size,
        "persistent": persistent,
        "reads": list(uses[1:]),
        "writes": [uses[0]],
    }


def times(timeline: Timeline, link: str) -> list[tuple[int, float, float]]:
    return [(t.block, round(t.start_seconds, 6), round(t.end_seconds, 6)) for t in timeline.transfers if t.link == link]


@pytest.mark.parametrize("kind", ["parameter", "gradient", "optimizer_state"])
def test_user_code_waits_for_copies_out_that_are_queued(kind: str) -> None:
    """Two copies of 1 s each are queued after stage 0. When user code is reached, one is under way and one is queued."""
    blocks = [block(0, kind, 10, 0, 4), block(1, kind, 10, 0, 4)]
    timeline = simulate(*made("fuffo", blocks, [(0, 0, 0, 3, 4), (1, 0, 0, 3, 4)]))
    assert times(timeline, OUT) == [(0, 1, 2), (1, 2, 3)]
    assert timeline.stages[1].start_seconds == pytest.approx(3.0)
    late = simulate(*made("fuffo", blocks, [(0, 0, 1, 3, 4), (1, 0, 1, 3, 4)]))
    assert times(late, OUT) == [(0, 2, 3), (1, 3, 4)]
    assert (timeline.iteration_seconds, late.iteration_seconds) == (8.0, 6.0)


@pytest.mark.parametrize("kind", ["activation", "buffer"])
def test_user_code_cannot_reach_activations_and_buffers(kind: str) -> None:
    trace, by_hand = made("fuffo", [block(0, kind, 30, 0, 4)], [(0, 0, 0, 3, 4)])
    timeline = simulate(trace, by_hand)
    assert times(timeline, OUT) == [(0, 1, 4)]
    assert timeline.stages[1].stall_seconds == 0


def test_without_user_code_nothing_waits() -> None:
    blocks = [block(0, "parameter", 10, 0, 4), block(1, "parameter", 10, 0, 4)]
    moves = [(0, 0, 0, 3, 4), (1, 0, 0, 3, 4)]
    assert simulate(*made("fbffo", blocks, moves)).stages[1].stall_seconds == 0


def test_a_copy_in_that_has_begun_ends_before_user_code_and_the_next_is_held_back() -> None:
    """Both are queued when stage 3 is reached. The first comes in while stage 3 runs and user code waits, the second after it."""
    blocks = [block(0, "parameter", 20, 0, 6), block(1, "parameter", 10, 0, 6)]
    timeline = simulate(*made("ffffufo", blocks, [(0, 0, 0, 3, 6), (1, 0, 0, 3, 6)]))
    assert times(timeline, IN) == [(0, 3, 5), (1, 6, 7)]
    assert timeline.stages[4].start_seconds == pytest.approx(5.0)
    assert timeline.iteration_seconds == pytest.approx(8.0)


def test_what_is_queued_behind_a_copy_that_is_held_back_waits_too() -> None:
    blocks = [block(0, "parameter", 10, 0, 5), block(1, "activation", 10, 0, 5)]
    trace, behind = made("ffffuo", blocks, [(0, 0, 0, 4, 5), (1, 0, 0, 4, 5)])
    assert times(simulate(trace, behind), IN) == [(0, 5, 6), (1, 6, 7)]
    trace, before = made("ffffuo", blocks, [(0, 0, 0, 5, 5), (1, 0, 0, 4, 5)])
    assert times(simulate(trace, before), IN) == [(1, 4, 5), (0, 5, 6)]


def test_what_user_code_itself_needs_comes_in() -> None:
    """Stage 3 is user code and reads block 1, which is queued behind block 0, which it does not need."""
    blocks = [block(0, "parameter", 10, 0, 4), block(1, "gradient", 10, 0, 3), block(2, "gradient", 10, 0, 4)]
    timeline = simulate(*made("fffuo", blocks, [(0, 0, 0, 3, 4), (1, 0, 0, 3, 3), (2, 0, 0, 4, 4)]))
    assert times(timeline, IN) == [(0, 3, 4), (1, 4, 5), (2, 6, 7)]
    assert timeline.stages[3].start_seconds == pytest.approx(5.0)


def test_user_code_at_the_border_of_iterations() -> None:
    trace = Trace.load(HAND / "user_code.json")
    made_for = {"trace_fingerprint": trace.fingerprint, "policy": "by hand", "budgets": Budgets(device_bytes=20)}
    seconds = []
    for leave, start in [(5, 10), (6, 10), (6, 9), (6, 11)]:
        move = {
            "block": 0,
            "after": 5,
            "before": 11,
            "tier": "storage",
            "offload": {"start": leave, "free_after": leave},
            "prefetch": {"start": start, "ready_by": 11},
        }
        waits = "device" if leave >= 6 else "storage"
        by_hand = Plan.model_validate({**made_for, "moves": [move], "initial": [{"block": 0, "tier": waits}]})
        seconds.append(simulate(trace, by_hand).iteration_seconds)
    assert seconds == [7.0, 6.0, 6.0, 7.0]


def updating(phases: str, *, device_seconds: float = 1.0) -> tuple[Trace, Plan]:
    """One subgroup, updated in stage 2, on the host: gradient out 1 s, update 3 s, parameter in 1 s for stage 0."""
    names = {"f": "forward", "b": "backward", "o": "optimizer", "u": "user"}
    stages = [{"id": n, "name": f"s{n}", "phase": names[p], "duration_seconds": 1.0} for n, p in enumerate(phases)]
    stages[2]["duration_seconds"] = device_seconds
    kinds = [("parameter", [0, 1, 2], [2]), ("gradient", [2], [1]), ("optimizer_state", [2], [2])]
    blocks = [
        {
            "id": n,
            "name": kind,
            "kind": kind,
            "size_bytes": 10,
            "persistent": kind != "gradient",
            "reads": reads,
            "writes": writes,
        }
        for n, (kind, reads, writes) in enumerate(kinds)
    ]
    machine: Any = hardware(host=True, rate=2.5)
    subgroup = {
        "id": 0,
        "stage": 2,
        "blocks": [0, 1, 2],
        "elements": 1,
        "device_seconds": device_seconds,
        "host_seconds": 3.0,
    }
    fields = {"name": "updating", "hardware": machine, "stages": stages, "blocks": blocks, "subgroups": [subgroup]}
    trace = Trace.model_validate(fields)
    count = len(phases)
    moves = [
        {"block": 1, "after": 1, "before": 2, "tier": "host", "offload": {"start": 1, "free_after": 1}, "prefetch": None},
        {
            "block": 0,
            "after": 1,
            "before": count,
            "tier": "host",
            "offload": None,
            "prefetch": {"start": count, "ready_by": count},
        },
    ]
    content = {"trace_fingerprint": trace.fingerprint, "policy": "by hand", "budgets": Budgets(device_bytes=1000)}
    updates = [{"subgroup": 0, "where": "host"}]
    initial = [{"block": 0, "tier": "host"}]
    return trace, Plan.model_validate({**content, "moves": moves, "initial": initial, "updates": updates})


def test_user_code_waits_for_updates_on_the_host() -> None:
    """Stage 2 takes no time on the device; then the update runs beside stages 3 and 4, or stage 3 waits for it."""
    trace, by_hand = updating("fboff")
    beside = simulate(trace, by_hand)
    assert beside.stages[3].stall_seconds == 0
    trace, by_hand = updating("fbouf")
    waiting = simulate(trace, by_hand)
    (update,) = waiting.updates
    assert waiting.stages[3].start_seconds == pytest.approx(update.end_seconds)
    assert waiting.iteration_seconds == pytest.approx(beside.iteration_seconds + 2.0)
    path = [(segment.resource, segment.index) for segment in critical_path(trace, by_hand, waiting).segments]
    assert ("host updates", 0) in path and path[path.index(("host updates", 0)) + 1] == (STAGES, 3)


def test_no_plan_counts_on_an_update_that_goes_on_in_user_code() -> None:
    """On the device the update would take 9 s. Stages 0 and 1, gradient out and update take 6 s; then the parameter must come
    in, 1 s, beside which stages 3 and 4 have run; or else stage 3 begins only now, and stage 4 after it: 8 s."""
    for phases, seconds in (("fboff", 7.0), ("fbouf", 8.0)):
        trace, _ = updating(phases, device_seconds=9.0)
        budgets = Budgets(device_bytes=1000)
        made = plan(trace, budgets, lower_bound=False)
        assert len(made.updates) == 1
        assert simulate(trace, made).iteration_seconds == pytest.approx(seconds)
        assert lower_bound_seconds(Problem.of(trace, budgets)) == pytest.approx(seconds, rel=2e-6)


def test_an_update_that_is_user_code_stays_where_it_is() -> None:
    trace, _ = updating("fboff")
    assert [subgroup.id for subgroup in host_updatable(trace)] == [0]
    trace, by_hand = updating("fbuff")
    assert host_updatable(trace) == ()
    with pytest.raises(InfeasiblePlanError, match="a stage that is not user code"):
        simulate(trace, by_hand)


def test_the_next_user_code_is_numbered_on() -> None:
    trace, _ = made("ufuf", [], [])
    assert user_stages(trace) == (0, 2)
    assert [next_user_stage(trace, stage) for stage in range(4)] == [0, 2, 2, 4]
    assert next_user_stage(made("ff", [], [])[0], 1) is None


def check(trace: Trace, timeline: Timeline) -> int:
    """Check that no copy or update is under way while user code runs. Return how many stages of user code waited."""
    length, waited = timeline.iteration_seconds, 0
    intervals = [
        (transfer.start_seconds, transfer.end_seconds)
        for transfer in timeline.transfers
        if trace.blocks[transfer.block].user_visible
    ]
    intervals += [(update.start_seconds, update.end_seconds) for update in timeline.updates]
    for user in user_stages(trace):
        stage = timeline.stages[user]
        waited += stage.stall_seconds > 1e-9 * length
        for turn in (-1, 0, 1):
            for begin, end in intervals:
                begin, end = begin + turn * length, end + turn * length
                overlap = min(end, stage.end_seconds) - max(begin, stage.start_seconds)
                assert overlap <= 1e-9 * max(length, 1.0), (user, begin, end)
    return waited


@given(problems(most_stages=20, most_blocks=20), st.integers(0, 2**32))
def test_nothing_that_user_code_can_reach_is_under_way_in_it(case: tuple[Trace, Budgets], seed: int) -> None:
    trace, budgets = case
    check(trace, simulate(trace, random_plan(trace, budgets, random.Random(seed))))


@given(training_problems(most_layers=6), st.integers(0, 2**32))
def test_nor_are_updates(case: tuple[Trace, Budgets], seed: int) -> None:
    trace, budgets = case
    timeline = replay_of_random_plan(trace, budgets, seed)
    if timeline is None:
        return
    check(trace, timeline)


def test_plans_leave_user_code_little_to_wait_for() -> None:
    """The budget is half of the peak. Under all other policies, states are still on their way out when user code is reached."""
    trace = with_user_code(transformer_trace(layers=2, stages_per_layer=4, rate=4e9, states=True), 1e-3)
    budgets = Budgets(device_bytes=max(live_bytes(trace)) // 2)
    assert check(trace, simulate(trace, plan(trace, budgets, lower_bound=False))) == 0
    for policy in ("belady", "teraio", "g10", "zero-infinity"):
        assert check(trace, simulate(trace, plan(trace, budgets, policy=policy, lower_bound=False))) > 0
