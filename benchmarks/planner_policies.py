"""Every policy on every trace, at five budgets and three link rates: iteration time over the ideal time and over the bound."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import track

from benchmarks.machines import H100_NVL, H100_NVL_TF32
from benchmarks.results import Figure
from benchmarks.transformer_trace import WORKLOADS
from benchmarks.turns import Scale
from benchmarks.variants import budgets_for, device_budgets, with_device_updates, with_rates
from planner import Budgets, TeraioError, Trace, plan, simulate
from planner.policies import POLICIES

TRACES = Path(__file__).resolve().parent.parent / "traces"
RATES = (0.5, 1.0, 2.0)
LARGE = 800
"""Traces with more stages are planned only at their own rates, since a case takes minutes."""
BEST = "ilp"
SAME = 1e-6

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]
"""Figures, and numbers by case and policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trace at one rate under one budget."""

    trace_name: str
    budget_name: str
    rate: float
    trace: Trace
    budgets: Budgets

    @property
    def name(self) -> str:
        """A name that no other case has."""
        return f"{self.trace_name} | {self.budget_name} | x{self.rate:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one policy in one case. If it refused, `refusal` is the name of the error, and both ratios are infinite.

    `plan_seconds`: of processor time.
    """

    case_name: str
    trace_name: str
    policy: str
    plan_seconds: float
    over_ideal: float = float("inf")
    over_bound: float = float("inf")
    refusal: str = ""


def traces() -> dict[str, Trace]:
    """Return the traces of the folder `traces/hand`, then the generated ones."""
    found = {path.stem: Trace.load(path) for path in sorted((TRACES / "hand").glob("*.json"))}
    found["Llama-3-8B"] = WORKLOADS["Llama-3-8B"].trace(H100_NVL)
    found["Llama-3-8B, TF32"] = WORKLOADS["Llama-3-8B"].trace(H100_NVL_TF32)
    found["Llama-3-8B, TF32, device updates"] = with_device_updates(found["Llama-3-8B, TF32"])
    found["Granite-8B"] = WORKLOADS["Granite-8B"].trace(H100_NVL)
    found["Llama-3-70B"] = WORKLOADS["Llama-3-70B"].trace(H100_NVL)
    return found


def cases(given: Mapping[str, Trace]) -> Iterator[Case]:
    """Yield each trace at each rate (at one rate if it is larger than LARGE), under each budget that is not below its floor."""
    for trace_name, original in given.items():
        for rate in RATES if len(original.stages) <= LARGE else (1.0,):
            trace = with_rates(original, rate)
            for budget_name, size in device_budgets(trace).items():
                yield Case(
                    trace_name=trace_name,
                    budget_name=budget_name,
                    rate=rate,
                    trace=trace,
                    budgets=budgets_for(trace, size),
                )


def outcome(case: Case, policy: str) -> Outcome:
    """Plan, and replay the plan in the simulator. The prediction in the plan is not used."""
    began = time.process_time()
    try:
        made = plan(case.trace, case.budgets, policy=policy)
    except TeraioError as error:
        seconds = time.process_time() - began
        return Outcome(
            case_name=case.name,
            trace_name=case.trace_name,
            policy=policy,
            plan_seconds=seconds,
            refusal=type(error).__name__,
        )
    seconds = time.process_time() - began
    assert made.predicted is not None  # every policy's plan is replayed
    taken = simulate(case.trace, made).iteration_seconds
    return Outcome(
        case_name=case.name,
        trace_name=case.trace_name,
        policy=policy,
        plan_seconds=seconds,
        over_ideal=taken / case.trace.ideal_seconds,
        over_bound=taken / made.predicted.lower_bound_seconds,
    )


def measure(scale: Scale) -> Measured:
    """Return the figures and, by case and policy, time over ideal, time over the bound and planning seconds (none if refused).

    May take hours, since four of the policies solve integer programs. The results so far are in `planner_policies.tsv` in the
    output folder.
    """
    found = outcomes(scale.output / "planner_policies.tsv", list(cases(traces())), tuple(POLICIES))
    return figures_of(found), samples_of(found)


def measure_best(scale: Scale) -> Measured:
    """Return the same for BEST alone, at the links' own rates: how far its plans are above the bound.

    Takes a quarter of an hour of processor time. The results so far are in `planner_bound.tsv` in the output folder.
    """
    listed = [case for case in cases(traces()) if case.rate == 1.0]
    found = outcomes(scale.output / "planner_bound.tsv", listed, (BEST,))
    means = (_mean(found, trace, BEST) for trace in dict.fromkeys(one.trace_name for one in found))
    return (_below_bound(found), *means), samples_of(found)


def outcomes(path: Path, listed: Sequence[Case], policies: Sequence[str]) -> list[Outcome]:
    """Plan each case with each policy, and write each result to the file at once."""
    found = []
    with path.open("w") as log:
        for case in track(listed, description="cases", console=Console(stderr=True)):
            for policy in policies:
                one = outcome(case, policy)
                found.append(one)
                cells = (one.case_name, policy, one.over_ideal, one.over_bound, one.plan_seconds, one.refusal)
                print(*cells, sep="\t", file=log, flush=True)
    return found


def samples_of(found: Iterable[Outcome]) -> dict[str, list[float]]:
    """Return an entry for each outcome. A refusal has the error in its key, and no numbers."""
    return {
        f"{one.case_name} | {one.policy}" + (f" | {one.refusal}" if one.refusal else ""): []
        if one.refusal
        else [one.over_ideal, one.over_bound, one.plan_seconds]
        for one in found
    }


def figures_of(found: list[Outcome]) -> tuple[Figure, ...]:
    """Return the cases in which the integer program loses or the bound is broken, then means by trace and policy."""
    policies = list(dict.fromkeys(one.policy for one in found))
    pairs = dict.fromkeys((one.trace_name, one.policy) for one in found)
    return (
        _slower(found),
        *(_better(found, policy) for policy in policies if policy != BEST),
        _below_bound(found),
        *(_mean(found, trace, policy) for trace, policy in pairs),
    )


def lost(found: Iterable[Outcome]) -> dict[str, tuple[Outcome, Outcome]]:
    """Return, by case, the outcomes of BEST and of the fastest policy, where that one is faster or BEST alone refused."""
    by_case: dict[str, list[Outcome]] = {}
    for one in found:
        by_case.setdefault(one.case_name, []).append(one)
    beaten = {}
    for name, outcomes in by_case.items():
        own = next(one for one in outcomes if one.policy == BEST)
        rival = min(outcomes, key=lambda one: one.over_ideal)
        if rival.over_ideal * (1 + SAME) < own.over_ideal:
            beaten[name] = (own, rival)
    return beaten


def _slower(found: list[Outcome]) -> Figure:
    beaten = lost(found)
    note = f"of {len({one.case_name for one in found})}"
    if beaten:
        own, rival = max(beaten.values(), key=lambda pair: pair[0].over_ideal / pair[1].over_ideal)
        ratio = own.over_ideal / rival.over_ideal
        note += f"; worst: {own.case_name}, {ratio:.4f} x {rival.policy}"
    return Figure(name=f"cases in which {BEST} is slower than another", value=len(beaten), unit="", aim="<= 0", note=note)


def _better(found: list[Outcome], policy: str) -> Figure:
    """Return in how many cases a policy is as good as BEST, and its worst ratio."""
    own = {one.case_name: one.over_ideal for one in found if one.policy == BEST}
    ratios = {one.case_name: one.over_ideal / own[one.case_name] for one in found if one.policy == policy and not one.refusal}
    refused = sum(1 for one in found if one.policy == policy and one.refusal)
    as_good = sum(1 for ratio in ratios.values() if ratio <= 1 + SAME)
    note = f"as good in {as_good} of {len(ratios)}, refused {refused}"
    if ratios:
        worst = max(ratios, key=ratios.__getitem__)
        note += f"; worst: {worst}, {ratios[worst]:.3f}"
    value = mean(ratios.values()) if ratios else None
    return Figure(name=f"{policy} / {BEST}, mean", value=value, unit="", note=note)


def _below_bound(found: list[Outcome]) -> Figure:
    below = [one for one in found if one.over_bound < 1 - SAME]
    note = f"{min(below, key=lambda one: one.over_bound).case_name}" if below else ""
    return Figure(name="plans faster than the lower bound", value=len(below), unit="", aim="<= 0", note=note)


def _mean(found: list[Outcome], trace_name: str, policy: str) -> Figure:
    mine = [one for one in found if (one.trace_name, one.policy) == (trace_name, policy)]
    planned = [one for one in mine if not one.refusal]
    name = f"{trace_name}: {policy}, time / bound"
    if not planned:
        return Figure(name=name, value=None, unit="", note=f"refused in all {len(mine)} cases")
    worst = max(planned, key=lambda one: one.over_bound)
    note = f"{len(planned)} of {len(mine)} cases; over ideal {mean(one.over_ideal for one in planned):.3f}; "
    note += f"worst {worst.over_bound:.3f} at {worst.case_name.partition(' | ')[2]}; "
    note += f"planned in {max(one.plan_seconds for one in planned):.1f} s of processor time at most"
    return Figure(name=name, value=mean(one.over_bound for one in planned), unit="", note=note)
