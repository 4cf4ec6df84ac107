"""The arithmetic of the benchmarks' figures."""

import pytest

from benchmarks import optimizer, warm_start
from benchmarks.budgets import layers_to_checkpoint
from benchmarks.gpu_budgets import budget_figures
from benchmarks.optimizer import FREE, INDUCTOR, OVERLAPPED, PLANNED, SERIAL, LossesDiffer, Measured, hidden
from benchmarks.planner_cases import Outcome
from benchmarks.planner_policies import figures_of, lost
from benchmarks.results import Figure
from benchmarks.turns import ratios, spread
from benchmarks.warm_start import Start
from examples.training import Report, Step
from planner import Budgets, plan

from .made_up import GIB, a_trace, by_name, run


@pytest.mark.parametrize(
    ("value", "aim", "met"),
    [(1.03, "<= 1.03", True), (1.04, "<= 1.03", False), (0.9, ">= 0.90", True), (0.8, ">= 0.90", False), (None, ">= 1", None)],
)
def test_an_aim_is_met_or_not(value: float | None, aim: str, met: bool | None) -> None:
    assert Figure(name="", value=value, unit="", aim=aim).met is met
    assert Figure(name="", value=value, unit="").met is None


def test_ratios_compare_within_a_round() -> None:
    assert ratios([2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 10.0, 10.0], turn=3) == [2.0, 2.0], "the second round is slow"
    assert spread([0.5, 2.0]) == "rounds from 0.50 to 2.00"


@pytest.mark.parametrize(("budget", "layers"), [(1000, 0), (999, 1), (900, 1), (899, 2), (400, 6), (100, 6)])
def test_as_few_layers_are_checkpointed_as_fit(budget: int, layers: int) -> None:
    assert layers_to_checkpoint(1000, 400, budget, 6) == layers
    assert layers_to_checkpoint(1000, 1000, 500, 6) == 6, "checkpointing that saves nothing takes all"


# -- Llamas


def test_figures_of_a_budget() -> None:
    trace, base = a_trace(), run(0.5, 1.0, 1.5, peak=10 * GIB)
    made = plan(trace, Budgets(device_bytes=GIB))
    assert made.predicted is not None
    outcome = run(
        2.0,
        4.0,
        3.0,
        peak=3 * GIB,
        reserved=4 * GIB,
        phase="planned",
        trace=trace,
        plan=made,
        status={"ideal_iteration_seconds": 2.0, "device_peak_bytes": 2 * GIB},
        moved_bytes={"device->storage": 1.5e9, "host->device": 1e9},
    )
    figures = by_name(budget_figures("x", outcome, 2 * GIB, base))
    values = {"tokens/s": 200, "peak / budget": 1.5, "reserved / budget": 2.0, "stall": 1.0, "use of device->storage": 0.5}
    values["bound / measured"] = made.predicted.lower_bound_seconds / 3
    assert {name: figures[f"x: {name}"].value for name in values} == pytest.approx(values)
    assert figures["x: tokens/s"].note == "0.333 x Inductor; planned; 3 iterations from 2 to 4 s"
    assert figures["x: peak / budget"].note == "3.000 of 2.000 GiB, 2.000 by teraio's own count"
    assert figures["x: peak / budget"].met is False
    unknown = figures["x: use of host->device"]
    assert unknown.value is None and unknown.note == "0.931 GiB an iteration"


def test_the_host_tier_on_the_cpu_does_not_count_as_device_memory() -> None:
    """There, it is memory of the same process."""
    status = {"ideal_iteration_seconds": 1.0, "device_peak_bytes": GIB}
    moved = {"device->host": 1.0, "host->device": 1.0}
    outcome = run(1.0, peak=5 * GIB, status=status, moved_bytes=moved)
    peak = by_name(budget_figures("x", outcome, 2 * GIB, outcome))["x: peak / budget"]
    assert peak.value == 0.5 and peak.note == "1.000 of 2.000 GiB by teraio's own count; 5.000 with the host tier"
    outcome = run(1.0, peak=5 * GIB, reserved=5 * GIB, status=status, moved_bytes=moved)
    assert by_name(budget_figures("x", outcome, 2 * GIB, outcome))["x: peak / budget"].value == 2.5


# -- the optimizer's step


def measured(*, seconds: float, optimizer_seconds: float, loss: float = 1.0, peak: int = 80) -> Measured:
    """The counters run on: in each iteration 10 MiB go out in 0.5 s and 20 MiB come in in 1 s, half of that exposed."""
    before, *counted = (
        Step(
            loss=loss,
            seconds=seconds,
            tokens=1,
            phase="planned",
            resident_bytes={},
            optimizer_seconds=optimizer_seconds,
            moved_bytes={"out": number * 10 << 20, "in": number * 20 << 20},
            busy_seconds={"out": 0.5 * number, "in": 1.0 * number},
            exposed_seconds={"in": 0.5 * number},
            late_seconds=0.3,
        )
        for number in (10, 12, 13, 15, 16)
    )
    status = {"device_peak_bytes": peak, "predicted_iteration_seconds": None if peak > 100 else 1.2}
    report = Report(peak_bytes=190, rest_bytes=100, parameters=1 << 20, status=status)
    return Measured(before=before, steps=counted, turns_steps=6, phase="planned", report=report)


def all_five(**changes: Measured) -> dict[str, Measured]:
    return {
        INDUCTOR: measured(seconds=1.0, optimizer_seconds=0.2, loss=1.0 + 1e-6),
        FREE: measured(seconds=1.0, optimizer_seconds=0.25),
        PLANNED: measured(seconds=1.5, optimizer_seconds=0.5),
        OVERLAPPED: measured(seconds=1.0, optimizer_seconds=0.1),
        SERIAL: measured(seconds=2.0, optimizer_seconds=1.0, peak=101),
        **changes,
    }


def test_figures_of_the_optimizers_step_compare_in_one_run() -> None:
    found = by_name(optimizer.figures(all_five(), 100))
    values = {
        f"{PLANNED}: iteration": 1.5,
        f"{PLANNED} / {FREE}: iteration": 1.5,
        f"{SERIAL} / {FREE}: optimizer step": 4.0,
        f"{PLANNED} / {SERIAL}: optimizer step": 0.5,
        f"{OVERLAPPED} / {SERIAL}: iteration": 0.5,
        f"{FREE} / {INDUCTOR}: iteration": 1.0,
        f"{PLANNED}: predicted / measured": 0.8,
        f"{PLANNED}: peak / budget": 0.8,
    }
    assert {name: found[name].value for name in values} == pytest.approx(values)
    assert found[f"{PLANNED} / {SERIAL}: optimizer step"].met and found[f"{PLANNED}: peak / budget"].met
    assert found[f"{PLANNED}: iteration"].note == "planned; 4 iterations"
    assert found[f"{PLANNED}: peak / budget"].note.endswith(": 0.900")
    assert found[f"{SERIAL}: predicted / measured"].note == "no plan was followed"
    assert found[f"{SERIAL}: peak / budget"].met is False


def test_copying_is_hidden_unless_the_training_thread_waits() -> None:
    found = by_name(optimizer.traffic("x", measured(seconds=2.0, optimizer_seconds=0.5)))
    values = {"moved out": 10, "moved in": 20, "hidden out": 1.0, "hidden in": 0.5, "hidden in all": 1 - 0.5 / 1.5}
    values["hidden in all, or behind the other link"] = 1 - 0.3 / 1.5
    assert {name: found[f"x: {name}"].value for name in values} == pytest.approx(values)
    assert hidden("x", 0.0, 0.0).value is None


def test_losses_must_be_the_same_to_the_last_bit_but_for_another_compilers() -> None:
    optimizer.same_losses(all_five())
    off = measured(seconds=1.0, optimizer_seconds=0.1, loss=1.0 + 1e-6)
    with pytest.raises(LossesDiffer, match=f"counted iteration 1: {FREE} has loss 1.0, {SERIAL} 1.000001"):
        optimizer.same_losses(all_five(**{SERIAL: off}))
    with pytest.raises(LossesDiffer, match=INDUCTOR):
        optimizer.same_losses(all_five(**{INDUCTOR: measured(seconds=1.0, optimizer_seconds=0.1, loss=1.1)}))


def test_each_warm_start_is_compared_with_the_cold_one_before_it() -> None:
    cold, warm = [Start(100.0, 80.0, 9), Start(300.0, 90.0, 11)], [Start(20.0, 20.0, 1), Start(90.0, 18.0, 1)]
    found = by_name(warm_start.figures(cold, warm))
    wall, processor = "time to the first planned iteration", "processor time"
    assert found[f"{wall}, cold"].value == 200.0 and found[f"{wall}, warm"].value == 55.0
    assert found[f"{wall}, warm / cold"].value == (0.2 + 0.3) / 2 and found[f"{wall}, warm / cold"].met
    assert found[f"{processor}, warm / cold"].value == (0.25 + 0.2) / 2
    assert found["iterations before it, cold"].value == 10 and found["iterations before it, warm"].met
    assert warm_start.samples(cold, warm)["seconds, cold"] == [100.0, 300.0]


# -- the planner


def outcome(case: str, policy: str, time: float | None, bound: float = 1.0) -> Outcome:
    if time is None:
        return Outcome(case_name=case, trace_name="t", policy=policy, plan_seconds=0.1, refusal="BudgetError")
    return Outcome(case_name=case, trace_name="t", policy=policy, plan_seconds=0.1, over_ideal=time, over_bound=time / bound)


def test_cases_that_are_lost_are_counted_and_the_worst_is_named() -> None:
    times = {"a": (1.0, 1.5, None), "b": (1.1, 1.0, 1.05), "c": (1.2, 1.2, 1.0)}
    found = [
        outcome(case, policy, time) for case in times for policy, time in zip(("ilp", "belady", "g10"), times[case], strict=True)
    ]
    assert {case: rival.policy for case, (_, rival) in lost(found).items()} == {"b": "belady", "c": "g10"}
    figures = by_name(figures_of(found))
    slower = figures["cases in which ilp is slower than another"]
    assert (slower.value, slower.met, slower.note) == (2, False, "of 3; worst: c, 1.2000 x g10")
    against = figures["belady / ilp, mean"]
    assert against.value == pytest.approx((1.5 + 1 / 1.1 + 1) / 3) and "as good in 2 of 3, refused 0" in against.note
    assert "refused 1" in figures["g10 / ilp, mean"].note
    assert figures["t: g10, time / bound"].value == pytest.approx(1.025)
    assert figures["plans faster than the lower bound"].value == 0
    beaten = lost([outcome("a", "ilp", None), outcome("a", "belady", 2.0), outcome("b", "ilp", None)])
    assert list(beaten) == ["a"], "only another policy can plan it"
    below = by_name(figures_of([outcome("a", "ilp", 1.0, bound=1.01)]))["plans faster than the lower bound"]
    assert (below.value, below.met, below.note) == (1, False, "a")
