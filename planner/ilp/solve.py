"""Solve the coarse model, and report exactly what the solver proved."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.errors import SolverError
from planner.ilp.formulation import CoarseProgram
from planner.ilp.model import CoarseModel
from planner.lp import solve_program
from planner.problem import SolverSettings
from planner.schema import SolverReport, WaitingTier

__all__ = ["ROUNDING", "CoarseSolution", "complete", "solve"]

ROUNDING = 1e-3  # solvers return shares with errors of about this size
MAX_NODES = 5
"""Of the search tree of an integer program that completes a relaxed solution. Fifty find no better ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseSolution:
    """Tiers by period index, subgroups that update on the host, and the solver's report. `values`: of the program's variables."""

    tiers: dict[int, WaitingTier]
    on_host: frozenset[int]
    report: SolverReport
    values: Sequence[float] = ()


def solve(
    built: CoarseProgram, *, relaxed: bool, vertex: bool, settings: SolverSettings, max_nodes: int | None = None
) -> CoarseSolution:
    """Solve a coarse program.

    relaxed: solve the linear relaxation and round it. The report then has a bound, the relaxation's objective; it has no
    objective of its own and no gap. vertex: end in a vertex, which has few fractions; takes more time.

    Waits for about the time limit at most. The objective includes the ideal iteration time. The report is in seconds. Raises
    SolverError when the solver fails, or when the limit passes with no solution.
    """
    model = built.model
    began = time.perf_counter()
    solved = solve_program(model.program, settings, linear=relaxed, vertex=vertex, max_nodes=max_nodes)
    seconds = time.perf_counter() - began
    if not solved.values:
        raise SolverError(f"HiGHS found no solution in {settings.time_limit_seconds} s; give a longer solver_time_limit")
    objective = max(solved.objective * built.unit_seconds, 0.0)
    proved = solved.objective if relaxed else solved.bound
    bound = None if proved is None else proved * built.unit_seconds
    report = SolverReport(
        name="HiGHS",
        status="optimal" if solved.optimal and not relaxed else "feasible",
        objective_seconds=None if relaxed else objective,
        bound_seconds=None if bound is None else max(bound, 0.0) if relaxed else bound,
        gap=None if relaxed or bound is None else max(0.0, (objective - bound) / max(abs(objective), 1e-12)),
        build_seconds=built.build_seconds,
        solve_seconds=seconds,
    )
    tiers, on_host = _chosen_tiers(model, solved.values), _on_host(model, solved.values)
    return CoarseSolution(tiers=tiers, on_host=on_host, report=report, values=solved.values)


def complete(built: CoarseProgram, relaxed: CoarseSolution, settings: SolverSettings) -> CoarseSolution:
    """Solve the integer program in which all that is whole in a relaxed solution stays as it is. Changes the program.

    Few choices are left, so that this is possible for long iterations. The bound in the report is the relaxed program's. Raises
    SolverError where no solution is found.
    """
    program = built.model.program
    for entry in built.model.periods:
        value = relaxed.values[entry.chosen]
        program.lower[entry.chosen] = float(value > 1 - ROUNDING)
        program.upper[entry.chosen] = float(value > ROUNDING)
    whole = solve(built, relaxed=False, vertex=False, settings=settings, max_nodes=MAX_NODES)
    bound, objective = relaxed.report.bound_seconds, whole.report.objective_seconds
    assert bound is not None and objective is not None  # the one was relaxed, the other not
    gap = max(0.0, (objective - bound) / max(objective, 1e-12))
    report = whole.report.model_copy(
        update={
            "status": "feasible",
            "bound_seconds": bound,
            "gap": gap,
            "build_seconds": 0.0,  # the relaxed solution counts it
        }
    )
    return replace(whole, report=report)


def _chosen_tiers(model: CoarseModel, values: Sequence[float]) -> dict[int, WaitingTier]:
    """Read the tier of each period from a solution.

    Fractions are rounded so that around any time each tier gets about as many bytes as in the solution: the rest that rounding
    leaves is carried on to the next period.
    """
    shares: dict[tuple[int, ...], dict[WaitingTier, float]] = {}
    spans: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for entry in model.periods:
        value = values[entry.chosen]
        if value > ROUNDING:
            shares.setdefault(entry.period.indices, {})[entry.route.tier] = value
            spans[entry.period.indices] = (entry.period.begin, entry.period.end, entry.block_class.size_bytes)
    tiers: dict[int, WaitingTier] = {}
    carried: dict[WaitingTier, float] = defaultdict(float)
    for indices in sorted(shares, key=lambda indices: (spans[indices], indices)):
        size = spans[indices][2]
        best = max(shares[indices], key=lambda tier: shares[indices][tier] * size + carried[tier])
        whole = max(shares[indices].values()) > 1 - ROUNDING
        if not whole:
            for tier, share in shares[indices].items():
                carried[tier] += share * size
            if carried[best] < size / 2:
                continue
            carried[best] -= size
        tiers.update(dict.fromkeys(indices, max(shares[indices], key=shares[indices].__getitem__) if whole else best))
    return tiers


def _on_host(model: CoarseModel, values: Sequence[float]) -> frozenset[int]:
    """Read the subgroups that update on the host; fractions are rounded in the same way."""
    chosen: set[int] = set()
    carried = 0.0
    for update in model.updates:
        share, size = values[update.chosen], update.windows.host_bytes
        carried += share * size
        if share > ROUNDING and carried >= size / 2:
            chosen.add(int(update.windows.name))
            carried -= size
    return frozenset(chosen)
