"""Every policy keeps the budgets and raises the right errors; the integer program is clearly better than paging."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pulp
import pytest

from planner import BudgetError, Budgets, InfeasiblePlanError, OptionsError, Plan, Trace, plan, simulate
from planner.ilp import CoarseSolution
from planner.lp import solver
from planner.policies import ilp
from planner.policies.decisions import decisions_of
from planner.policies.ilp import optimise
from planner.policies.replayed import ReplayedPlan
from planner.problem import Decisions, Problem, SolverSettings, build_plan, live_bytes
from planner.schedule import evict_furthest
from planner.schema import SolverReport, WaitingTier

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


def test_rounding_never_overfills_a_tier(transformer: Trace) -> None:
    """The solution sends everything to the host tier, which has room for some of it."""
    machine: Any = hardware(host=True, rate=4e9, latency=1e-4)
    trace = Trace.model_validate({**transformer.model_dump(by_alias=True), "hardware": machine})
    problem = Problem.of(trace, half(trace).model_copy(update={"host_bytes": 2**26}))
    tiers: dict[int, WaitingTier] = dict.fromkeys(range(len(problem.periods)), "host")
    everything = CoarseSolution(tiers=tiers, on_host=frozenset(), report=SolverReport())
    left, decisions = decisions_of(problem, everything)
    assert left.on_host == ()
    assert {decision.tier for decision in decisions.values()} == {"host", "storage"}
    timeline = simulate(trace, build_plan(problem, decisions, policy="by hand"))
    assert 2**25 < timeline.peak_bytes["host"] <= 2**26


def test_a_failing_solver_leaves_a_greedy_plan(transformer: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "highspy", None)
    monkeypatch.setattr(pulp.COIN_CMD, "available", lambda self: False)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "available", lambda self: False)
    made = plan(transformer, half(transformer))
    assert made.solver.status == "failed"
    assert simulate(transformer, made).peak_bytes["device"] <= half(transformer).device_bytes


def test_cbc_stands_in_for_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "highspy", None)
    small = transformer_trace(layers=1, stages_per_layer=4, rate=4e9)
    made = plan(small, Budgets(device_bytes=max(live_bytes(small)) * 8 // 10), time_limit_seconds=10)
    assert made.solver.name == "CBC"
    assert made.solver.status in ("optimal", "feasible")
    assert made.solver.bound_seconds is None


def test_only_as_many_updates_on_the_host_as_have_room_there(transformer: Trace) -> None:
    """The solution updates everything on the host, whose tier holds the blocks of one subgroup."""
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
    everything = CoarseSolution(tiers={}, on_host=frozenset(range(len(subgroups))), report=SolverReport())
    left, decisions = decisions_of(problem, everything)
    assert len(subgroups) > 1 and left.on_host == (0,), "the first whose parameters are needed again"
    filled = evict_furthest(left, decisions, early=True)
    timeline = simulate(trace, build_plan(left, filled, policy="by hand"))
    assert [update.subgroup for update in timeline.updates] == [0]
    assert size <= timeline.peak_bytes["host"] <= size * 3 // 2


@pytest.mark.parametrize(("over", "asked"), [(1.01, 0), (1.03, 1)])
def test_in_long_iterations_other_blocks_are_tried_only_far_from_the_bound(
    over: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = transformer_trace(layers=7, stages_per_layer=5, rate=4e9)
    assert len(trace.stages) > 64
    problem = Problem.of(trace, half(trace))
    calls: list[ReplayedPlan] = []

    def recorded(best: ReplayedPlan, write_weight: float) -> ReplayedPlan:
        calls.append(best)
        return best

    monkeypatch.setattr(ilp, "with_other_blocks", recorded)
    first = optimise(problem, policy="ilp", rivals=(), settings=SolverSettings(), known_bound=1e-9)
    assert first.predicted is not None and len(calls) == 1
    bound = first.predicted.iteration_seconds / over
    optimise(problem, policy="ilp", rivals=(), settings=SolverSettings(), known_bound=bound)
    assert len(calls) == 1 + asked


@pytest.mark.parametrize(("beyond", "asked"), [(1e-9, 1), (1e9, 0), (0.0, 1)])
def test_rivals_are_asked_only_for_plans_that_take_too_long(transformer: Trace, beyond: float, asked: int) -> None:
    calls: list[Problem] = []

    def rival(problem: Problem) -> Decisions:
        calls.append(problem)
        return evict_furthest(problem, {}, early=True)

    problem = Problem.of(transformer, half(transformer))
    found = optimise(problem, policy="ilp", rivals=(rival,), settings=SolverSettings(), known_bound=1e-9, rivals_beyond=beyond)
    assert len(calls) == asked and found.predicted is not None
