"""Each policy does what its source says, keeps the budgets and raises the right errors; the integer program beats them."""

import gc
import subprocess
import sys
from typing import Any

import highspy
import pytest

from planner import BudgetError, Budgets, InfeasiblePlanError, Move, Plan, Trace, UnsupportedError, floor, plan, simulate
from planner.policies import HEURISTICS
from planner.problem import live_bytes, without_collections

from ..traces import HAND, block, hand, hardware, replay, staged, subgroup, trace, trained, transformer_trace, with_user_code


@pytest.fixture(scope="module")
def transformer() -> Trace:
    return transformer_trace(layers=2, stages_per_layer=5, rate=4e9)


def half(trace: Trace) -> Budgets:
    return Budgets(device_bytes=max(live_bytes(trace)) // 2)


def test_plans_are_the_same_every_time(transformer: Trace) -> None:
    first, again = (plan(transformer, half(transformer), lower_bound=False).moves for _ in range(2))
    assert first == again


def test_a_forked_child_plans_after_its_parent_has() -> None:
    """As in a script that forks workers; a process of its own, because this one has other threads."""
    script = """
import os, signal, sys
from planner import Budgets, Trace, plan
trace, budgets = Trace.load(sys.argv[1]), Budgets(device_bytes=10)
made = plan(trace, budgets, threads=2)
for threads in (2, 1):
    if (child := os.fork()) == 0:
        signal.alarm(60)
        os._exit(plan(trace, budgets, threads=threads).moves != made.moves)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"with {threads} threads")
"""
    command = [sys.executable, "-c", script, str(HAND / "chain.json")]
    assert subprocess.run(command, timeout=120).returncode == 0


def test_a_process_that_makes_a_plan_ends_with_the_one_that_started_it() -> None:
    code = "import time, planner.worker; planner.worker.end_with_starter(); print('waits', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        assert process.poll() is None
        process.stdin.close()  # as the system does when the process that holds it ends, also when it is killed
        assert process.wait(timeout=300)


def test_keep_all_needs_everything_to_fit(transformer: Trace) -> None:
    most = max(live_bytes(transformer))
    assert plan(transformer, Budgets(device_bytes=most), policy="keep-all").moves == ()
    with pytest.raises(BudgetError) as caught:
        plan(transformer, Budgets(device_bytes=most - 1), policy="keep-all")
    assert caught.value.smallest_bytes == most


@pytest.mark.parametrize("policy", ["ilp", *HEURISTICS])
def test_a_storage_budget_that_is_too_small(transformer: Trace, policy: str) -> None:
    budgets = half(transformer).model_copy(update={"storage_bytes": 2**20})
    with pytest.raises(InfeasiblePlanError, match="raise storage_budget"):
        plan(transformer, budgets, policy=policy)


def test_a_failing_solver_leaves_a_greedy_plan_and_the_simple_bound(transformer: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda solver: highspy.HighsModelStatus.kSolveError)
    made = plan(transformer, half(transformer))
    assert made.solver.status == "failed" and made.replayed.lower_bound_seconds == transformer.ideal_seconds
    assert simulate(transformer, made).peak_bytes["device"] <= half(transformer).device_bytes


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_searched_for_again_after_planning_if_it_was_before(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError), without_collections():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


# -- greedy policies, and zero-infinity


def lives(blocks: list[tuple[int, list[int]]], *, seconds: list[float], names: list[str] | None = None, **links: Any) -> Trace:
    """Blocks as (size, uses), each written by its first use and not persistent."""
    names = [f"forward/{name}" for name in names] if names else ["f"] * len(seconds)
    return trace(staged(names, seconds), [block(size, uses[:1], uses[1:]) for size, uses in blocks], hardware(**links))


def moved(made: Plan) -> dict[int, Move]:
    """The move of each block that has one."""
    return {move.block: move for move in made.moves}


@pytest.mark.parametrize(("size", "tier", "seconds"), [(1, "host", 53.5), (2, "storage", 53.0)])
def test_no_drive_is_written_for_less_than_a_hundredth_while_host_memory_has_room(size: int, tier: str, seconds: float) -> None:
    """Two blocks leave for a stage and come back. The small one makes copies to the host longer by 0.5 s a byte, of 53 s."""
    blocks = [block(size, [0], [2]), block(100, [0], [2])]
    made = trace(staged("ffb", workspaces={1: 100 + size}), blocks, hardware(host=True, rate=1.0))
    found = plan(made, Budgets(device_bytes=100 + size))
    assert found.predicted is not None and found.predicted.iteration_seconds == pytest.approx(seconds)
    assert {move.block: move.tier for move in found.moves} == {0: tier, 1: "host"}


@pytest.mark.parametrize(("size", "tiers"), [(10, ["storage"]), (30, ["host", "host", "storage"])])
def test_teraio_uses_host_memory_once_storage_has_no_bandwidth_left(size: int, tiers: list[str]) -> None:
    """Four blocks are idle around the same two stages; within the stage before and after, storage can take one of them."""
    described = lives([*[(10, [0, 5])] * 4, (size, [2, 3])], seconds=[1.0] * 6, host=True, rate=10.0)
    made = moved(plan(described, Budgets(device_bytes=40), policy="teraio"))
    assert sorted(move.tier for move in made.values()) == tiers


def test_teraio_prefetches_as_late_and_g10_as_early_as_it_can() -> None:
    """A block of 10 bytes needs the room in stages 2 and 3 only; the copy in takes one of the six stages that follow."""
    described = lives([(10, [0, 9]), (10, [2, 3])], seconds=[1.0] * 10, rate=10.0)
    budgets = Budgets(device_bytes=10)
    late, eager = (moved(plan(described, budgets, policy=name))[0].prefetch.start for name in ("teraio", "g10"))
    assert (late, eager) == (8, 4)


def test_zero_infinity_offloads_everything_and_prefetches_one_layer_ahead() -> None:
    names = [f"layers.{layer}.{part}" for layer in range(4) for part in ("attn", "mlp")]
    described = lives([(10, [0, 7]), (10, [1, 3]), (5, [2, 6])], seconds=[1.0] * 8, names=names, rate=1000.0)
    made = moved(plan(described, Budgets(device_bytes=1000), policy="zero-infinity"))
    assert {block: (move.after, move.prefetch.start) for block, move in made.items()} == {0: (0, 4), 2: (2, 4)}
    assert {move.tier for move in made.values()} == {"storage"}, "there is no host tier"


# -- fixed rules for where optimizer subgroups update


def layered(layers: int, *, on_device_only: frozenset[int] = frozenset(), host_seconds: float = 0.5) -> Trace:
    """A training step with one optimizer subgroup for each layer; that of the last layer is updated first."""
    blocks, subgroups = [], []
    for layer in range(layers):
        backward, update = 2 * layers - 1 - layer, 3 * layers - 1 - layer
        blocks += trained((10, 10, 20), [layer, backward], backward, update)
        subgroups.append(
            subgroup(update, range(3 * layer, 3 * layer + 3), 1.0, None if layer in on_device_only else host_seconds)
        )
    phases = "f" * layers + "b" * layers + "o" * layers
    return trace(staged(phases), blocks, hardware(host=True, rate=20.0), subgroups=subgroups)


def where(given: Trace, policy: str, budgets: Budgets) -> set[int]:
    made = plan(given, budgets, policy=policy)
    assert (made.policy, made.budgets) == (policy, budgets)
    return {update.subgroup for update in replay(given, made).updates}


@pytest.mark.parametrize(("user_code", "share"), [(False, 1.0), (True, 0.6)])
def test_where_updates_run_under_each_policy(user_code: bool, share: float) -> None:
    made = layered(4, on_device_only=frozenset({1}))
    made = with_user_code(made, 0.1) if user_code else made
    budgets = Budgets(device_bytes=max(floor(made)[0], int(share * max(live_bytes(made)))))
    assert where(made, "device-updates", budgets) == set()
    assert where(made, "host-updates", budgets) == {0, 2, 3}
    # In the order of their stages 3, 2, 0 can update on the host; every second of these stays on the device.
    assert where(made, "stride-2", budgets) == {3, 0}
    assert where(layered(5), "stride-2", Budgets(device_bytes=1000)) == {4, 2, 0}


@pytest.mark.parametrize(
    ("made", "device_bytes", "different"),
    [
        (with_user_code(layered(2, on_device_only=frozenset({1})), 0.5), 55, 2),
        (layered(4, host_seconds=1.5), int(0.6 * max(live_bytes(layered(4)))), 3),
    ],
)
def test_a_fixed_rule_is_never_faster_than_the_program(made: Trace, device_bytes: int, different: int) -> None:
    seconds = {}
    for policy in ("ilp", "offload-only", "device-updates", "host-updates", "stride-2"):
        found = plan(made, Budgets(device_bytes=device_bytes), policy=policy, lower_bound=False)
        assert found.policy == policy
        seconds[policy] = simulate(made, found).iteration_seconds
    assert seconds["ilp"] == seconds["offload-only"] == min(seconds.values())
    assert len(set(seconds.values())) >= different


@pytest.mark.parametrize("policy", ["host-updates", "stride-2"])
def test_nothing_can_update_on_the_host(policy: str) -> None:
    budgets = Budgets(device_bytes=20)
    with pytest.raises(UnsupportedError, match=f"'{policy}': none of the 0 optimizer subgroups .* use 'device-updates' or 'ilp'"):
        plan(hand("chain"), budgets, policy=policy)
    only_device = layered(2, on_device_only=frozenset({0, 1}))
    with pytest.raises(UnsupportedError, match="none of the 2 optimizer subgroups"):
        plan(only_device, Budgets(device_bytes=1000), policy=policy)


def test_no_room_in_the_host_tier() -> None:
    made = layered(4)
    for policy, count, size in (("host-updates", 4, 160), ("stride-2", 2, 80)):
        assert len(where(made, policy, Budgets(device_bytes=1000, host_bytes=size))) == count
        with pytest.raises(InfeasiblePlanError, match=f"the {count} optimizer subgroups .* take {size} bytes .* is {size - 1}"):
            plan(made, Budgets(device_bytes=1000, host_bytes=size - 1), policy=policy)
    with pytest.raises(InfeasiblePlanError, match="raise host_budget"):
        plan(made, Budgets(device_bytes=1000, host_bytes=0), policy="host-updates")
