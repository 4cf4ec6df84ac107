"""The policies of other systems do what their sources say, and the integer program is never slower than any of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from planner import BudgetError, Budgets, InfeasiblePlanError, Move, Plan, Trace, floor, plan, simulate
from planner.policies import HEURISTICS
from planner.problem import live_bytes

from ..strategies import hardware, problems, transformer_trace

HAND_MADE = sorted(Path(__file__).parents[3].glob("traces/hand/*.json"))


def trace(blocks: list[tuple[int, list[int]]], *, seconds: list[float], names: list[str] | None = None, **links: Any) -> Trace:
    """Blocks as (size, uses), each written by its first use and not persistent."""
    names = names or [f"s{number}" for number in range(len(seconds))]
    return Trace.model_validate(
        {
            "name": "made up",
            "hardware": hardware(**links),
            "stages": [{"id": i, "name": names[i], "phase": "forward", "duration_seconds": s} for i, s in enumerate(seconds)],
            "blocks": [
                {
                    "id": i,
                    "name": f"b{i}",
                    "kind": "activation",
                    "size_bytes": size,
                    "persistent": False,
                    "reads": uses[1:],
                    "writes": uses[:1],
                }
                for i, (size, uses) in enumerate(blocks)
            ],
        }
    )


def moved(made: Plan) -> dict[int, Move]:
    """The move of each block that has one."""
    return {move.block: move for move in made.moves}


@pytest.mark.parametrize("policy", HEURISTICS)
@given(case=problems())
def test_every_plan_replays_within_its_budget(policy: str, case: tuple[Trace, Budgets]) -> None:
    described, budgets = case
    made = plan(described, budgets, policy=policy)
    timeline = simulate(described, made)
    assert made.policy == policy
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert made.predicted is not None
    assert made.predicted.lower_bound_seconds <= timeline.iteration_seconds * (1 + 1e-9)


@pytest.mark.parametrize("policy", HEURISTICS)
def test_lower_tiers_are_never_overfilled(policy: str) -> None:
    described = transformer_trace(layers=2, rate=4e9)
    budgets = Budgets(device_bytes=max(live_bytes(described)) // 2, storage_bytes=2**20)
    with pytest.raises(InfeasiblePlanError, match="raise storage_budget"):
        plan(described, budgets, policy=policy)


# -- teraio


def test_teraio_takes_what_frees_most_for_its_cost() -> None:
    """Both blocks could make room at stage 2 at the same cost. One of them is idle under pressure for longer."""
    described = trace([(10, [0, 7]), (10, [1, 4]), (10, [2, 3]), (10, [5, 6])], seconds=[1.0] * 8, rate=20.0)
    made = plan(described, Budgets(device_bytes=20), policy="teraio")
    assert list(moved(made)) == [0]


@pytest.mark.parametrize(("size", "tiers"), [(10, ["storage"]), (30, ["host", "host", "storage"])])
def test_teraio_uses_host_memory_once_storage_has_no_bandwidth_left(size: int, tiers: list[str]) -> None:
    """Four blocks are idle around the same two stages; within the stage before and after, storage can take one of them."""
    described = trace([*[(10, [0, 5])] * 4, (size, [2, 3])], seconds=[1.0] * 6, host=True, rate=10.0)
    made = moved(plan(described, Budgets(device_bytes=40), policy="teraio"))
    assert sorted(move.tier for move in made.values()) == tiers


def test_teraio_prefetches_as_late_and_g10_as_early_as_it_can() -> None:
    """A block of 10 bytes needs the room in stages 2 and 3 only; the copy in takes one of the six stages that follow."""
    described = trace([(10, [0, 9]), (10, [2, 3])], seconds=[1.0] * 10, rate=10.0)
    budgets = Budgets(device_bytes=10)
    late, eager = (moved(plan(described, budgets, policy=name))[0].prefetch.start for name in ("teraio", "g10"))
    assert (late, eager) == (8, 4)


def test_what_greed_leaves_over_the_budget_is_moved_on_demand() -> None:
    """The link is too slow for any move to be in time, so stages wait for all of them."""
    described = trace([(10, [0, 3]), (10, [1, 2])], seconds=[0.1] * 4, rate=1.0)
    for policy in ("teraio", "g10"):
        made = plan(described, Budgets(device_bytes=10), policy=policy)
        assert made.predicted is not None and made.predicted.stall_seconds > 10
        assert moved(made)[0].prefetch.start == 3


# -- zero-infinity


def test_zero_infinity_offloads_everything_and_prefetches_one_layer_ahead() -> None:
    names = [f"forward/layers.{layer}.{part}" for layer in range(4) for part in ("attn", "mlp")]
    described = trace([(10, [0, 7]), (10, [1, 3]), (5, [2, 6])], seconds=[1.0] * 8, names=names, rate=1000.0)
    made = moved(plan(described, Budgets(device_bytes=1000), policy="zero-infinity"))
    assert {block: (move.after, move.prefetch.start) for block, move in made.items()} == {0: (0, 4), 2: (2, 4)}
    assert {move.tier for move in made.values()} == {"storage"}, "there is no host tier"


def test_zero_infinity_keeps_activations_in_host_memory_and_states_on_storage() -> None:
    described = transformer_trace(layers=3, rate=4e9, states=True)
    with_host = Trace.model_validate({**described.model_dump(by_alias=True), "hardware": hardware(host=True, rate=4e9)})
    made = plan(with_host, Budgets(device_bytes=max(live_bytes(with_host))), policy="zero-infinity")
    tiers = {(with_host.blocks[move.block].kind == "activation", move.tier) for move in made.moves}
    assert tiers == {(True, "host"), (False, "storage")}


def test_zero_infinity_starts_later_where_there_is_no_room() -> None:
    """One layer ahead would be stage 4, where the budget is full."""
    names = [f"layers.{layer}.{part}" for layer in range(4) for part in ("a", "b")]
    described = trace([(10, [0, 7]), (10, [4, 5])], seconds=[1.0] * 8, names=names, rate=1000.0)
    made = moved(plan(described, Budgets(device_bytes=10), policy="zero-infinity"))
    assert made[0].prefetch.start == 6


# -- the integer program


def budgets_for(described: Trace) -> list[Budgets]:
    most, smallest = max(live_bytes(described)), floor(described)[0]
    sizes = {max(smallest, most * share // 100) for share in (90, 70, 50, 30)} | {smallest + smallest // 20}
    return [Budgets(device_bytes=size) for size in sorted(sizes)]


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("path", HAND_MADE, ids=lambda path: path.stem)
def test_ilp_is_never_slower_than_another_policy(path: Path, rate: float) -> None:
    content = json.loads(path.read_text())
    content.pop("fingerprint", None)
    for link in content["hardware"]["links"]:
        link["bytes_per_second"] *= rate
    described = Trace.model_validate(content)
    compared = 0
    for budgets in budgets_for(described):
        try:
            ours = plan(described, budgets, time_limit_seconds=5, lower_bound=False)
        except BudgetError:
            continue
        for policy in HEURISTICS:
            try:
                theirs = plan(described, budgets, policy=policy, lower_bound=False)
            except InfeasiblePlanError:
                continue
            assert ours.predicted is not None and theirs.predicted is not None
            assert ours.predicted.iteration_seconds <= theirs.predicted.iteration_seconds * (1 + 1e-9), policy
            compared += 1
    assert compared >= len(HEURISTICS)


def test_ilp_is_near_the_bound_where_links_are_scarce() -> None:
    described = transformer_trace(layers=3, stages_per_layer=5, rate=4e9)
    budgets = Budgets(device_bytes=max(live_bytes(described)) // 2)
    predicted = {policy: plan(described, budgets, policy=policy).predicted for policy in ("ilp", *HEURISTICS)}
    ours = predicted.pop("ilp")
    assert ours is not None and ours.iteration_seconds <= 1.02 * ours.lower_bound_seconds
    for policy, theirs in predicted.items():
        assert theirs is not None and ours.stall_seconds <= theirs.stall_seconds, policy
        if policy in ("zero-infinity", "belady"):
            assert ours.stall_seconds < theirs.stall_seconds / 2, policy
