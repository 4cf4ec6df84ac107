"""Every policy on every trace, at five budgets and three link rates: iteration time over the ideal time and over the bound."""

from collections.abc import Iterable
from statistics import mean

from benchmarks.planner_cases import BEST, Outcome, Selection, cases, outcomes, traces
from benchmarks.results import Figure
from planner.policies import POLICIES

SAME = 1e-6

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]
"""Figures, and numbers by case and policy."""


def measure(selection: Selection) -> Measured:
    """Return the figures and, by case and policy, time over ideal, time over the bound and planning seconds (none if refused).

    May take hours, since six of the policies solve integer programs. The results so far are in `planner_policies.tsv` in the
    output folder.
    """
    policies = selection.policies or tuple(POLICIES)
    listed = list(cases(traces(selection.traces)))
    found = outcomes(selection.output / "planner_policies.tsv", listed, policies, processes=selection.processes)
    return figures_of(found), samples_of(found)


def measure_best(selection: Selection) -> Measured:
    """Return the same for BEST alone, at the links' own rates: how far its plans are above the bound.

    Takes a quarter of an hour of processor time. The results so far are in `planner_bound.tsv` in the output folder.
    """
    listed = list(cases(traces(selection.traces), (1.0,)))
    found = outcomes(selection.output / "planner_bound.tsv", listed, (BEST,), processes=selection.processes)
    means = (_mean(found, trace, BEST) for trace in dict.fromkeys(one.trace_name for one in found))
    return (_below_bound(found), *means), samples_of(found)


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
    compared = [policy for policy in policies if policy != BEST] if BEST in policies else []
    return (
        *([_slower(found)] if compared else []),
        *(_better(found, policy) for policy in compared),
        _below_bound(found),
        *(_mean(found, trace, policy) for trace, policy in pairs),
    )


def lost(found: Iterable[Outcome]) -> dict[str, tuple[Outcome, Outcome]]:
    """Return, by case, the outcomes of BEST and of the fastest policy, where that one is faster or BEST alone refused."""
    by_case: dict[str, list[Outcome]] = {}
    for one in found:
        by_case.setdefault(one.case_name, []).append(one)
    beaten = {}
    for name, made in by_case.items():
        own = next(one for one in made if one.policy == BEST)
        rival = min(made, key=lambda one: one.over_ideal)
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
