"""Other subgroups update on the host where that makes the replay faster."""

import random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.machines import H200_BF16
from benchmarks.transformer_trace import Model, Workload
from benchmarks.variants import peak_bytes, with_one_tier
from planner import Budgets, Trace, plan, simulate
from planner.problem import Problem, host_updatable, needed_again
from planner.schedule import ReplayedPlan, update_exchanges

from ..strategies import random_plan, training_problems


def iteration() -> Trace:
    """A Llama of eight layers in bf16, with host memory as the only lower tier."""
    sizes = {"layers": 8, "width": 2048, "heads": 32, "key_value_heads": 8, "feed_forward": 8192, "vocabulary": 32000}
    workload = Workload(model=Model(name="eight layers", loss_tokens=2048, **sizes), batch=4, sequence=2048, element_bytes=2)
    return with_one_tier(workload.trace(H200_BF16), "host", H200_BF16.host_bytes_per_second)


def test_a_plan_with_other_updates_is_closer_to_the_bound() -> None:
    """By the coarse program alone, no subgroup updates on the host, and the iteration takes 1.148 times the bound."""
    trace = iteration()
    predicted = plan(trace, Budgets(device_bytes=peak_bytes(trace) // 2, host_bytes=96 << 30)).predicted
    assert predicted is not None
    assert predicted.iteration_seconds < 1.12 * predicted.lower_bound_seconds


@given(training_problems(), st.randoms(use_true_random=False))
def test_sets_differ_by_one_subgroup(case: tuple[Trace, Budgets], draw: random.Random) -> None:
    trace, budgets = case
    updatable = {subgroup.id for subgroup in host_updatable(trace)}
    made = random_plan(trace, budgets, draw)
    problem = Problem.of(trace, budgets, [update.subgroup for update in made.updates if update.where == "host"])
    now = frozenset(problem.on_host)
    for other in update_exchanges(ReplayedPlan(problem=problem, decisions={}, plan=made, timeline=simulate(trace, made))):
        assert other != now and other <= updatable
        assert len(other - now) <= 1 and len(now - other) <= 1
        for came, went in zip(other - now, now - other, strict=False):
            one, two = trace.subgroups[came], trace.subgroups[went]
            assert one.host_seconds is not None and two.host_seconds is not None
            assert 0.6 < one.host_seconds / two.host_seconds < 1.6
            assert needed_again(trace, one) > one.stage
