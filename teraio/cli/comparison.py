"""The results of `teraio compare` (policies side by side) and `teraio sweep` (time against budget), also as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import planner
from planner.errors import TeraioError
from planner.problem import SolverSettings, live_bytes
from planner.schema import Budgets, FrozenModel, Predicted

__all__ = ["Comparison", "Sweep", "SweepPoint", "Verdict", "compare_policies", "sweep_budgets"]

Progress = Callable[[str], None]
"""Called with a text that says what is being planned now."""


class Verdict(FrozenModel):
    """One policy: its prediction from the simulator, or the error that it ended with."""

    policy: str
    predicted: Predicted | None = None
    error: str = ""


class Comparison(FrozenModel):
    """All policies under the same budgets. `lower_bound_seconds`: no plan is faster than this; None if no policy found a plan."""

    trace_name: str
    budgets: Budgets
    ideal_seconds: float
    lower_bound_seconds: float | None
    verdicts: tuple[Verdict, ...]


class SweepPoint(FrozenModel):
    """One device budget. `planned_for_bytes`: the budget that the best plan was made for; it is this budget or a smaller one."""

    device_bytes: int
    planned_for_bytes: int | None = None
    predicted: Predicted | None = None
    error: str = ""


class Sweep(FrozenModel):
    """Iteration time for each device budget, ascending. A larger budget is never slower."""

    trace_name: str
    policy: str
    ideal_seconds: float
    floor_bytes: int
    peak_bytes: int
    points: tuple[SweepPoint, ...]


def compare_policies(
    trace: planner.Trace, budgets: Budgets, policies: Sequence[str], *, settings: SolverSettings, progress: Progress
) -> Comparison:
    """Plan with each policy, one after the other, and compare. Raises OptionsError for an unknown policy."""
    verdicts = []
    for policy in policies:
        progress(f"planning with {policy}")
        try:
            made = planner.plan(trace, budgets, policy=policy, **asdict(settings))
        except planner.OptionsError:
            raise
        except TeraioError as error:
            verdicts.append(Verdict(policy=policy, error=str(error)))
        else:
            verdicts.append(Verdict(policy=policy, predicted=made.predicted))
    bounds = [verdict.predicted.lower_bound_seconds for verdict in verdicts if verdict.predicted is not None]
    return Comparison(
        trace_name=trace.name,
        budgets=budgets,
        ideal_seconds=trace.ideal_seconds,
        lower_bound_seconds=max(bounds, default=None),
        verdicts=tuple(verdicts),
    )


def sweep_budgets(
    trace: planner.Trace,
    device_bytes: Sequence[int],
    budgets: Budgets,
    policy: str,
    *,
    settings: SolverSettings,
    progress: Progress,
) -> Sweep:
    """Plan for each of `device_bytes`, with the other budgets as in `budgets`.

    A plan for a smaller budget is a candidate for a larger one, so that a larger budget is never slower.
    """
    points: list[SweepPoint] = []
    incumbents: list[planner.Plan] = []
    for number, size in enumerate(sorted(device_bytes), 1):
        progress(f"planning for {size:,} bytes, {number} of {len(device_bytes)}")
        tried = budgets.model_copy(update={"device_bytes": size})
        try:
            made = planner.plan(trace, tried, policy=policy, incumbents=incumbents, **asdict(settings))
        except planner.OptionsError:
            raise
        except TeraioError as error:
            points.append(SweepPoint(device_bytes=size, error=str(error)))
            continue
        incumbents = [made]
        points.append(SweepPoint(device_bytes=size, planned_for_bytes=made.budgets.device_bytes, predicted=made.predicted))
    return Sweep(
        trace_name=trace.name,
        policy=policy,
        ideal_seconds=trace.ideal_seconds,
        floor_bytes=planner.floor(trace)[0],
        peak_bytes=max(live_bytes(trace)),
        points=tuple(points),
    )
