"""The planner's benchmark: variants of traces, its arithmetic, its processes, and real plans of small cases."""

from pathlib import Path

import pytest

from benchmarks.planner_cases import cases, outcomes_of
from benchmarks.planner_policies import samples_of
from benchmarks.planning import planned_apart
from benchmarks.variants import budgets_for, with_errors, with_rates, with_times
from planner import plan, simulate
from planner.policies import POLICIES

from ..planner.traces import hand

CHAIN = hand("chain")


def test_variants_have_other_rates_and_bounded_repeatable_errors() -> None:
    slow = with_rates(CHAIN, 0.5)
    assert slow.fingerprint != CHAIN.fingerprint and (slow.stages, slow.blocks) == (CHAIN.stages, CHAIN.blocks)
    # Four copies of 10 bytes that nothing hides (traces/README.md): 6 s + 4 x 2 s.
    assert simulate(slow, plan(slow, budgets_for(slow, 10))).iteration_seconds == pytest.approx(14.0)
    assert with_times(CHAIN, [2.0] * 6).ideal_seconds == 2 * CHAIN.ideal_seconds == 12.0
    first, second, again = (with_errors(CHAIN, seed=seed, largest=0.25) for seed in (0, 1, 0))
    assert first.fingerprint == again.fingerprint != second.fingerprint
    pairs = zip(CHAIN.stages, first.stages, strict=True)
    assert all(0.75 <= after.duration_seconds / before.duration_seconds <= 1.25 for before, after in pairs)


def test_a_plan_is_made_in_a_process_of_its_own(tmp_path: Path) -> None:
    planned = planned_apart(CHAIN, 20, tmp_path)
    assert planned.iteration_seconds == pytest.approx(6.0)
    assert planned.over_bound == pytest.approx(1.0)
    assert 0 <= planned.build_seconds + planned.solve_seconds < planned.plan_seconds
    assert planned.seconds > planned.plan_seconds
    assert 20 << 20 < planned.process_bytes < 1 << 30
    assert (tmp_path / "plan.json").exists()


def test_every_policy_is_measured_by_the_simulator_or_refuses() -> None:
    listed = list(cases({"chain": CHAIN}))
    assert len(listed) == 12 and len({case.name for case in listed}) == 12
    tight = next(case for case in listed if case.name == "chain | floor + 5 % | x2")
    found = outcomes_of(tight, tuple(POLICIES))
    assert [one.policy for one in found] == list(POLICIES)
    by_policy = {one.policy: one for one in found}
    assert by_policy["keep-all"].refusal == "BudgetError"
    # Four copies of half a second each: 8 s instead of 6.
    assert by_policy["ilp"].over_ideal == pytest.approx(8 / 6)
    assert all(one.over_bound >= 1 - 1e-9 for one in found)
    samples = samples_of(found)
    assert samples["chain | floor + 5 % | x2 | keep-all | BudgetError"] == []
    assert samples["chain | floor + 5 % | x2 | ilp"][0] == pytest.approx(8 / 6)
