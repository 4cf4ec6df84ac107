"""Plan the training as it is asked for, and with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

import planner
from planner.errors import BudgetError, TeraioError
from planner.problem import SolverSettings, live_bytes
from planner.schema import Budgets, FrozenModel, Predicted
from planner.simulator import STAGES, critical_path
from teraio.advice.what_if import Case, cases

Fit = Literal["yes", "no plan exists", "none was found"]
"""no plan exists: it is proved, since one stage alone needs more. none was found: a plan may exist, but the planner has none."""

Made = Callable[[Case, planner.Plan], None]

_HARDLY = 0.01
"""Share of the iteration below which waiting is not worth a word."""


class Answer(FrozenModel):
    """One case. speed: samples in a second, relative to the training as asked for; None if either has no plan.

    predicted, holds_up: of the best plan; None and "" without one. holds_up: what its critical path spends the most time on,
    besides computing. written_bytes_per_day: to the drives, in training without a break. lifetime_days: until the rated bytes
    of the drives are written; None if that was not asked for, or if nothing is written. reason: why there is no plan.
    """

    what: str
    fit: Fit
    budgets: Budgets
    floor_bytes: int
    peak_bytes: int
    ideal_seconds: float
    predicted: Predicted | None = None
    speed: float | None = None
    holds_up: str = ""
    written_bytes_per_day: float = 0.0
    lifetime_days: float | None = None
    reason: str = ""


class Advice(FrozenModel):
    """The training as asked for comes first."""

    trace_name: str
    answers: tuple[Answer, ...]


def advise(
    trace: planner.Trace,
    budgets: Budgets,
    *,
    drives: int = 1,
    rated_bytes: int | None = None,
    settings: SolverSettings,
    progress: Callable[[str], None] = lambda text: None,
    made: Made = lambda case, plan: None,
) -> Advice:
    """Plan each case, one after the other; waits for all of them.

    drives: how many drives the storage tier of the trace has. rated_bytes: that may be written to each of them in its life (TBW).
    progress: is told what is being planned. made: is given each case with its plan.
    """
    answers: list[Answer] = []
    asked: planner.Plan | None = None
    for case in cases(trace, budgets, drives=drives):
        progress(f"planning: {case.what}")
        found, plan = _answer(case, asked, settings)
        if not answers:
            asked = plan
        if plan is not None:
            made(case, plan)
            found = found.model_copy(update=_figures(case, plan, asked, rated_bytes))
        answers.append(found)
    return Advice(trace_name=trace.name, answers=tuple(answers))


def _answer(case: Case, asked: planner.Plan | None, settings: SolverSettings) -> tuple[Answer, planner.Plan | None]:
    """Plan a case. asked: the plan for the training as asked for, None for that training itself."""
    plan: planner.Plan | None = None
    fit: Fit = "yes"
    reason = ""
    try:
        incumbents = (asked,) if case.more and asked is not None else ()
        plan = planner.plan(case.trace, case.budgets, incumbents=incumbents, **asdict(settings))
    except BudgetError as error:
        fit, reason = "no plan exists", str(error)
    except planner.OptionsError:
        raise
    except TeraioError as error:
        fit, reason = "none was found", str(error)
    answer = Answer(
        what=case.what,
        fit=fit,
        budgets=case.budgets,
        floor_bytes=planner.floor(case.trace)[0],
        peak_bytes=max(live_bytes(case.trace)),
        ideal_seconds=case.trace.ideal_seconds,
        reason=reason,
    )
    return answer, plan


def _figures(case: Case, plan: planner.Plan, asked: planner.Plan | None, rated_bytes: int | None) -> dict[str, object]:
    seconds = _seconds(plan)
    assert plan.predicted is not None  # `_seconds` has found it
    per_second = plan.predicted.storage_written_bytes / seconds if seconds else 0.0
    lifetime = rated_bytes * case.drives / per_second / 86_400 if rated_bytes and per_second else None
    return {
        "predicted": plan.predicted,
        "speed": case.work * _seconds(asked) / seconds if asked is not None and seconds else None,
        "holds_up": _what_holds_up(case.trace, plan),
        "written_bytes_per_day": per_second * 86_400,
        "lifetime_days": lifetime,
    }


def _what_holds_up(trace: planner.Trace, plan: planner.Plan) -> str:
    """Return what the critical path spends the most time on besides stages; "" if that is hardly any."""
    path = critical_path(trace, plan, planner.simulate(trace, plan)).seconds()
    total = sum(path.values())
    others = {resource: seconds for resource, seconds in path.items() if resource != STAGES}
    worst = max(others, key=lambda resource: others[resource], default="")
    return worst if worst and others[worst] > _HARDLY * total else ""


def _seconds(plan: planner.Plan) -> float:
    assert plan.predicted is not None  # every plan that was made is replayed
    return plan.predicted.iteration_seconds
