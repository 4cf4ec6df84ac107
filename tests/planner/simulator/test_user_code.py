"""User code and updates on the host: what each waits for, what it holds back, and plans that work around it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Plan, Timeline, Trace, plan, simulate
from planner.bound import lower_bound_seconds
from planner.problem import Problem, host_updatable, live_bytes, user_stages
from planner.simulator import STAGES, critical_path

from ..strategies import problems, replay_of_random_plan, training_problems
from ..traces import (
    IN,
    OUT,
    Entry,
    block,
    by_hand,
    hand,
    hardware,
    move,
    staged,
    subgroup,
    trace,
    trained,
    transformer_trace,
    updating,
    with_user_code,
)


def planned(phases: str, blocks: list[Entry], moves: list[tuple[int, int, int, int, int]]) -> tuple[Trace, Plan]:
    """Stages of 1 s, links of 10 bytes per second. Moves: block, after, leave, start, before."""
    made = trace(staged(phases), blocks)
    return made, by_hand(made, 1000, [move(n, after, before, start, leave=leave) for n, after, leave, start, before in moves])


def used(kind: str, size: int, first: int, *reads: int) -> Entry:
    """A block that its first use writes."""
    return block(size, [first], reads, kind)


def times(timeline: Timeline, link: str) -> list[tuple[int, float, float]]:
    return [(t.block, round(t.start_seconds, 6), round(t.end_seconds, 6)) for t in timeline.transfers if t.link == link]


@pytest.mark.parametrize("kind", ["parameter", "gradient", "optimizer_state"])
def test_user_code_waits_for_copies_out_that_are_queued(kind: str) -> None:
    """Two copies of 1 s each are queued after stage 0. When user code is reached, one is under way and one is queued."""
    blocks = [used(kind, 10, 0, 4)] * 2
    timeline = simulate(*planned("fuffo", blocks, [(0, 0, 0, 3, 4), (1, 0, 0, 3, 4)]))
    assert times(timeline, OUT) == [(0, 1, 2), (1, 2, 3)]
    assert timeline.stages[1].start_seconds == pytest.approx(3.0)
    late = simulate(*planned("fuffo", blocks, [(0, 0, 1, 3, 4), (1, 0, 1, 3, 4)]))
    assert times(late, OUT) == [(0, 2, 3), (1, 3, 4)]
    assert (timeline.iteration_seconds, late.iteration_seconds) == (8.0, 6.0)


@pytest.mark.parametrize("kind", ["activation", "buffer"])
def test_user_code_cannot_reach_activations_and_buffers(kind: str) -> None:
    timeline = simulate(*planned("fuffo", [used(kind, 30, 0, 4)], [(0, 0, 0, 3, 4)]))
    assert times(timeline, OUT) == [(0, 1, 4)]
    assert timeline.stages[1].stall_seconds == 0


def test_a_copy_in_that_has_begun_ends_before_user_code_and_the_next_is_held_back() -> None:
    """Both are queued when stage 3 is reached. The first comes in while stage 3 runs and user code waits, the second after it."""
    blocks = [used("parameter", 20, 0, 6), used("parameter", 10, 0, 6)]
    timeline = simulate(*planned("ffffufo", blocks, [(0, 0, 0, 3, 6), (1, 0, 0, 3, 6)]))
    assert times(timeline, IN) == [(0, 3, 5), (1, 6, 7)]
    assert timeline.stages[4].start_seconds == pytest.approx(5.0)
    assert timeline.iteration_seconds == pytest.approx(8.0)


def test_what_user_code_itself_needs_comes_in() -> None:
    """Stage 3 is user code and reads block 1, which is queued behind block 0, which it does not need."""
    blocks = [used("parameter", 10, 0, 4), used("gradient", 10, 0, 3), used("gradient", 10, 0, 4)]
    timeline = simulate(*planned("fffuo", blocks, [(0, 0, 0, 3, 4), (1, 0, 0, 3, 3), (2, 0, 0, 4, 4)]))
    assert times(timeline, IN) == [(0, 3, 4), (1, 4, 5), (2, 6, 7)]
    assert timeline.stages[3].start_seconds == pytest.approx(5.0)


def test_user_code_at_the_border_of_iterations() -> None:
    made, seconds = hand("user_code"), []
    for leave, start in [(5, 10), (6, 10), (6, 9), (6, 11)]:
        away = {0: "device" if leave >= 6 else "storage"}
        seconds.append(simulate(made, by_hand(made, 20, [move(0, 5, 11, start, leave=leave)], away=away)).iteration_seconds)
    assert seconds == [7.0, 6.0, 6.0, 7.0]


def test_user_code_waits_for_updates_on_the_host() -> None:
    """Stage 2 takes no time on the device; then the update runs beside stages 3 and 4, or stage 3 waits for it."""
    beside = simulate(*updating("fboff"))
    assert beside.stages[3].stall_seconds == 0
    made, given_plan = updating("fbouf")
    waiting = simulate(made, given_plan)
    (update,) = waiting.updates
    assert waiting.stages[3].start_seconds == pytest.approx(update.end_seconds)
    assert waiting.iteration_seconds == pytest.approx(beside.iteration_seconds + 2.0)
    path = [(segment.resource, segment.index) for segment in critical_path(made, given_plan, waiting)]
    assert ("host updates", 0) in path and path[path.index(("host updates", 0)) + 1] == (STAGES, 3)


def test_no_plan_counts_on_an_update_that_goes_on_in_user_code() -> None:
    """On the device the update would take 9 s. Stages 0 and 1, gradient out and update take 6 s; then the parameter must come
    in, 1 s, beside which stages 3 and 4 have run; or else stage 3 begins only now, and stage 4 after it: 8 s."""
    for phases, seconds in (("fboff", 7.0), ("fbouf", 8.0)):
        made, _ = updating(phases, device_seconds=9.0)
        found = plan(made, Budgets(device_bytes=1000), lower_bound=False)
        assert len(found.updates) == 1
        assert simulate(made, found).iteration_seconds == pytest.approx(seconds)
        assert lower_bound_seconds(Problem.of(made, found.budgets)) == pytest.approx(seconds, rel=2e-6)


def test_an_update_that_is_user_code_stays_where_it_is() -> None:
    assert [each.id for each in host_updatable(updating("fboff")[0])] == [0]
    made, given_plan = updating("fbuff")
    assert host_updatable(made) == ()
    with pytest.raises(InfeasiblePlanError, match="a stage that is not user code"):
        simulate(made, given_plan)


def check(made: Trace, timeline: Timeline) -> int:
    """Check that no copy or update is under way while user code runs. Return how many stages of user code waited."""
    length, waited = timeline.iteration_seconds, 0
    intervals = [
        (transfer.start_seconds, transfer.end_seconds)
        for transfer in timeline.transfers
        if made.blocks[transfer.block].user_visible
    ]
    intervals += [(update.start_seconds, update.end_seconds) for update in timeline.updates]
    for user in user_stages(made):
        stage = timeline.stages[user]
        waited += stage.stall_seconds > 1e-9 * length
        for turn in (-1, 0, 1):
            for begin, end in intervals:
                begin, end = begin + turn * length, end + turn * length
                overlap = min(end, stage.end_seconds) - max(begin, stage.start_seconds)
                assert overlap <= 1e-9 * max(length, 1.0), (user, begin, end)
    return waited


@pytest.mark.parametrize(
    "cases", [problems(most_stages=20, most_blocks=20), training_problems(most_layers=6)], ids=["copies", "updates"]
)
@given(data=st.data())
def test_nothing_that_user_code_can_reach_is_under_way_in_it(cases: Any, data: st.DataObject) -> None:
    made, budgets = data.draw(cases)
    timeline = replay_of_random_plan(made, budgets, data.draw(st.integers(0, 2**32)))
    if timeline is not None:
        check(made, timeline)


def test_plans_leave_user_code_little_to_wait_for() -> None:
    """The budget is half of the peak. Under all other policies, states are still on their way out when user code is reached."""
    made = with_user_code(transformer_trace(layers=2, stages_per_layer=4, rate=4e9, states=True), 1e-3)
    budgets = Budgets(device_bytes=max(live_bytes(made)) // 2)
    assert check(made, simulate(made, plan(made, budgets, lower_bound=False))) == 0
    for policy in ("belady", "teraio", "g10", "zero-infinity"):
        assert check(made, simulate(made, plan(made, budgets, policy=policy, lower_bound=False))) > 0


# -- updates on the host

PARAMETER, GRADIENT = 0, 1


def training(
    seconds: tuple[float, ...] = (1, 1, 1, 1),
    *,
    uses: tuple[int, ...] = (0, 2),
    born: int = 2,
    update: int = 3,
    times: tuple[float, float] = (1.0, 1.0),
    host: bool = True,
) -> Trace:
    """Forward, something that takes a workspace of 60 bytes, backward, update (or the update where `update` says)."""
    phases = "".join("o" if number == update else phase for number, phase in enumerate("fubf"))
    blocks, machine = trained((20, 20, 40), uses, born, update), hardware(host=host, rate=50.0)
    return trace(staged(phases, seconds, {1: 60}), blocks, machine, subgroups=[subgroup(update, range(3), *times)])


def test_which_subgroups_can_update_on_the_host() -> None:
    assert [each.id for each in host_updatable(training())] == [0]
    assert host_updatable(training(host=False)) == ()
    # Nothing would hold the next iteration back until the update is done: its parameters are used only after it,
    assert host_updatable(training(uses=(0, 2, 3), born=0, update=1)) != ()
    assert host_updatable(training(uses=(2, 3), born=1, update=2)) == ()
    # ... or only after the gradients have come into being anew.
    assert host_updatable(training(uses=(2, 3), born=1, update=3)) == ()


@pytest.mark.parametrize("threads", [1, 4, 2])
def test_any_number_of_threads_in_one_process(threads: int) -> None:
    """Where everything fits, the host still helps."""
    made = training((5, 1, 5, 5), times=(5, 1))
    found = plan(made, Budgets(device_bytes=90), threads=threads)
    assert found.solver.status == "optimal"
    assert found.predicted is not None and len(found.updates) == 1
    assert 12 < found.predicted.lower_bound_seconds <= found.predicted.iteration_seconds * (1 + 1e-9)
    roomy = plan(made, Budgets(device_bytes=1000), threads=threads).predicted
    assert roomy is not None and roomy.iteration_seconds < made.ideal_seconds


def test_a_place_in_the_host_tier_counts_once() -> None:
    made = training((1, 1, 1, 10), times=(10, 0.1))
    found = plan(made, Budgets(device_bytes=80, host_bytes=80))
    assert found.predicted is not None and len(found.updates) == 1
    assert simulate(made, found).peak_bytes["host"] == 80
    assert found.predicted.lower_bound_seconds <= found.predicted.iteration_seconds * (1 + 1e-9)
    assert plan(made, Budgets(device_bytes=80, host_bytes=79)).updates == ()


GONE, BACK = move(GRADIENT, 2, 3, tier="host"), move(PARAMETER, 2, 4, 3, out=False, tier="host")


def updated(made: Trace, *moves: Entry) -> Timeline:
    """Replay the update on the host with these moves."""
    start = moves[-1]["prefetch"]["start"]
    away = {PARAMETER: "device" if start < 4 else moves[-1]["tier"]}
    return simulate(made, by_hand(made, 1000, moves, away=away, updates=[{"subgroup": 0, "where": "host"}]))


def test_a_parameter_waits_for_its_update() -> None:
    timeline = updated(training(times=(1, 7)), GONE, BACK)
    # Gradient out 0.1 s, update 7 s, parameter in 0.1 s; the update's stage takes no time.
    assert timeline.iteration_seconds == pytest.approx(3 + 0.1 + 7 + 0.1)
    assert timeline.updates[0].end_seconds - timeline.updates[0].start_seconds == pytest.approx(7)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([GONE, {**BACK, "offload": {"start": 2, "free_after": 2}}], "no move takes its block 'parameter' there"),
        ([GONE, {**BACK, "tier": "storage"}], "no move takes its block 'parameter' there"),
        # A copy in another tier is stale after the update.
        ([GONE, move(PARAMETER, 0, 2, 2, out=False), BACK], "although no valid copy waits in the storage tier"),
    ],
)
def test_what_a_parameter_may_not_do(moves: list[Entry], message: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=message):
        updated(training(), *moves)
