"""Every policy keeps the budgets and raises the right errors; the integer program is clearly better than paging."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import highspy
import pytest

from planner import BudgetError, Budgets, InfeasiblePlanError, OptionsError, Plan, Trace, plan, simulate
from planner.ilp import in_order_of_need
from planner.problem import Decision, Decisions, Problem, build_plan, live_bytes
from planner.schedule import evict_furthest

from ..strategies import hardware, transformer_trace


@pytest.fixture(scope="module")
def transformer() -> Trace:
    return transformer_trace(layers=2, stages_per_layer=5, rate=4e9)


@pytest.fixture(scope="module")
def made(transformer: Trace) -> Plan:
    return plan(transformer, half(transformer), lower_bound=False)


def half(trace: Trace) -> Budgets:
    return Budgets(device_bytes=max(live_bytes(trace)) // 2)


def test_the_integer_program_beats_on_demand_and_comes_near_its_own_objective(transformer: Trace, made: Plan) -> None:
    on_demand = plan(transformer, half(transformer), policy="belady", lower_bound=False)
    assert made.predicted is not None and on_demand.predicted is not None
    assert made.solver.status == "optimal"
    assert made.solver.bound_seconds is not None and made.solver.objective_seconds is not None
    assert made.solver.bound_seconds <= made.solver.objective_seconds
    assert made.predicted.iteration_seconds <= 1.02 * made.solver.objective_seconds
    assert made.predicted.stall_seconds < on_demand.predicted.stall_seconds / 2


def test_plans_are_the_same_every_time(transformer: Trace, made: Plan) -> None:
    assert plan(transformer, half(transformer), lower_bound=False).moves == made.moves


@pytest.mark.parametrize("threads_of_the_child", [2, 1])
def test_a_forked_child_plans_after_its_parent_has(transformer: Trace, tmp_path: Path, threads_of_the_child: int) -> None:
    """As in a script that forks workers; a process of its own, because this one has other threads."""
    transformer.save(tmp_path / "trace.json")
    script = f"""
import os, signal, sys
from planner import Budgets, Trace, plan
trace = Trace.load(sys.argv[1])
made = plan(trace, Budgets(device_bytes={half(transformer).device_bytes}), threads=2)
child = os.fork()
if child == 0:
    signal.alarm(60)
    again = plan(trace, Budgets(device_bytes={half(transformer).device_bytes}), threads={threads_of_the_child})
    os._exit(again.moves != made.moves)
sys.exit(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "trace.json")], timeout=120)
    assert done.returncode == 0


def test_copies_out_are_predicted_between_issue_and_return(made: Plan) -> None:
    offloads = [move for move in made.moves if move.offload is not None]
    assert offloads
    assert all(m.offload and m.offload.start <= m.offload.free_after < m.before for m in offloads)
    assert any(m.offload and m.offload.free_after > m.offload.start for m in offloads)


def test_unknown_policy(transformer: Trace) -> None:
    known = "ilp, offload-only, checkpoint, teraio, g10, zero-infinity, belady, keep-all, device-updates, host-updates, stride-2"
    with pytest.raises(OptionsError, match=f"'best' is not known; the policies are: {known}"):
        plan(transformer, half(transformer), policy="best")


def test_keep_all_needs_everything_to_fit(transformer: Trace) -> None:
    most = max(live_bytes(transformer))
    assert plan(transformer, Budgets(device_bytes=most), policy="keep-all").moves == ()
    with pytest.raises(BudgetError) as caught:
        plan(transformer, Budgets(device_bytes=most - 1), policy="keep-all")
    assert caught.value.smallest_bytes == most


def test_without_links_the_budget_must_hold_everything(transformer: Trace) -> None:
    alone = transformer.model_copy(update={"hardware": transformer.hardware.model_copy(update={"links": ()})})
    with pytest.raises(BudgetError) as caught:
        plan(alone, half(alone))
    assert caught.value.smallest_bytes == max(live_bytes(alone))


@pytest.mark.parametrize("policy", ["ilp", "belady"])
def test_a_storage_budget_that_is_too_small(transformer: Trace, policy: str) -> None:
    budgets = half(transformer).model_copy(update={"storage_bytes": 2**20})
    with pytest.raises(InfeasiblePlanError, match="raise storage_budget"):
        plan(transformer, budgets, policy=policy)


def test_the_host_tier_is_used_up_to_its_budget(transformer: Trace) -> None:
    machine: Any = hardware(host=True, rate=4e9, latency=1e-4)
    trace = Trace.model_validate({**transformer.model_dump(by_alias=True), "hardware": machine})
    budgets = half(trace).model_copy(update={"host_bytes": 2**27})
    made = plan(trace, budgets, lower_bound=False)
    timeline = simulate(trace, made)
    assert {move.tier for move in made.moves} == {"host", "storage"}
    assert 2**26 < timeline.peak_bytes["host"] <= 2**27


def test_a_failing_solver_leaves_a_greedy_plan(transformer: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda solver: highspy.HighsModelStatus.kSolveError)
    made = plan(transformer, half(transformer))
    assert made.solver.status == "failed"
    assert simulate(transformer, made).peak_bytes["device"] <= half(transformer).device_bytes


def test_only_as_many_updates_on_the_host_as_have_room_there(transformer: Trace) -> None:
    """All could update on the host, whose tier holds the blocks of one subgroup."""
    stages = [stage for stage in transformer.stages if stage.phase == "optimizer"]
    subgroups = [
        {
            "id": number,
            "stage": stage.id,
            "blocks": [b.id for b in transformer.blocks if stage.id in b.uses],
            "elements": 1,
            "device_seconds": stage.duration_seconds,
            "host_seconds": 0.02,
        }
        for number, stage in enumerate(stages)
    ]
    machine: Any = hardware(host=True, rate=4e9)
    fields = {**transformer.model_dump(by_alias=True), "hardware": machine, "subgroups": subgroups}
    trace = Trace.model_validate(fields)
    size = sum(trace.blocks[block].size_bytes for block in trace.subgroups[0].blocks)
    problem = Problem.of(trace, half(trace).model_copy(update={"host_bytes": size * 3 // 2}))
    on_host = in_order_of_need(problem, range(len(subgroups)))
    assert len(subgroups) > 1 and on_host == [0], "the first whose parameters are needed again"
    left = Problem.of(trace, problem.budgets, on_host)
    waiting: Decisions = {
        index: Decision(tier="host", leave=left.periods[index].after, start=left.periods[index].before) for index in left.updated
    }
    timeline = simulate(trace, build_plan(left, evict_furthest(left, waiting, early=True), policy="by hand"))
    assert [update.subgroup for update in timeline.updates] == [0]
    assert size <= timeline.peak_bytes["host"] <= size * 3 // 2
