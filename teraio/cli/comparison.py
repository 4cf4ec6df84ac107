"""What `teraio compare` and `teraio sweep` tell: policies side by side, and time against budget. Also their JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import planner
from planner.errors import TeraioError
from planner.problem import SolverSettings, live_bytes
from planner.schema import Budgets, FrozenModel, Predicted

__all__ = ["Comparison", "Sweep", "SweepPoint", "Verdict", "compare_policies", "sweep_budgets"]

Progress = Callable[[str], None]
"""Told what is being planned now."""


class Verdict(FrozenModel):
    """One policy: what it achieves in the simulator, or why it cannot."""

    policy: str
    predicted: Predicted | None = None
    error: str = ""


class Comparison(FrozenModel):
    """All policies under the same budgets. `lower_bound_seconds`: no plan at all is faster; None if none was made."""

    trace_name: str
    budgets: Budgets
    ideal_seconds: float
    lower_bound_seconds: float | None
    verdicts: tuple[Verdict, ...]


class SweepPoint(FrozenModel):
    """One device budget. `planned_for_bytes`: the budget that the best plan found was made for, at most this one."""

    device_bytes: int
    planned_for_bytes: int | None = None
    predicted: Predicted | None = None
    error: str = ""


class Sweep(FrozenModel):
    """Iteration time against device budget, ascending; more memory is never slower."""

    trace_name: str
    policy: str
    ideal_seconds: float
    floor_bytes: int
    peak_bytes: int
    points: tuple[SweepPoint, ...]


def compare_policies(
    trace: planner.Trace, budgets: Budgets, policies: Sequence[str], *, settings: SolverSettings, progress: Progress
) -> Comparison:
    """Plan with every policy. Blocks for the sum of what they take. Raises OptionsError if one is not known."""
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
    """Plan for each of `device_bytes`, the other budgets as in `budgets`.

    A plan for less memory does as well with more, so the best one so far stands where a new one is slower.
    """
    points: list[SweepPoint] = []
    best: SweepPoint | None = None
    for number, size in enumerate(sorted(device_bytes), 1):
        progress(f"planning for {size:,} bytes, {number} of {len(device_bytes)}")
        try:
            tried = budgets.model_copy(update={"device_bytes": size})
            made = planner.plan(trace, tried, policy=policy, **asdict(settings))
        except planner.OptionsError:
            raise
        except TeraioError as error:
            if best is None:
                points.append(SweepPoint(device_bytes=size, error=str(error)))
                continue
        else:
            point = SweepPoint(device_bytes=size, planned_for_bytes=size, predicted=made.predicted)
            best = point if best is None or _seconds(point) <= _seconds(best) else best
        points.append(best.model_copy(update={"device_bytes": size}))
    return Sweep(
        trace_name=trace.name,
        policy=policy,
        ideal_seconds=trace.ideal_seconds,
        floor_bytes=planner.floor(trace)[0],
        peak_bytes=max(live_bytes(trace)),
        points=tuple(points),
    )


def _seconds(point: SweepPoint) -> float:
    return point.predicted.iteration_seconds if point.predicted is not None else float("inf")
