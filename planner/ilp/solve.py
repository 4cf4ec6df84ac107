"""Solve the coarse model, and report exactly what the solver proved."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import pulp

from planner.errors import SolverError
from planner.ilp.model import CoarseModel
from planner.lp import pick_solver, proved_bound, run_solver
from planner.problem import SolverSettings
from planner.schema import SolverReport, WaitingTier

__all__ = ["CoarseSolution", "solve"]

_ROUNDING = 1e-3  # solvers return shares with errors of about this size


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseSolution:
    """Tiers by period index, subgroups that update on the host, and the solver's report."""

    tiers: dict[int, WaitingTier]
    on_host: frozenset[int]
    report: SolverReport


def solve(
    model: CoarseModel,
    *,
    relaxed: bool,
    vertex: bool,
    settings: SolverSettings,
    build_seconds: float,
    unit_seconds: float,
) -> CoarseSolution:
    """Solve with HiGHS, or with CBC where HiGHS is not installed.

    relaxed: solve the linear relaxation and round it. The report then has a bound, the relaxation's objective; it has no
    objective of its own and no gap. vertex: end in a vertex, which has few fractions; takes more time.

    Waits for about the time limit at most (CBC may overrun it). The objective includes the ideal iteration time. The model
    counts time in `unit_seconds`, the report in seconds. Raises SolverError when no solver is installed, or when the limit
    passes with no solution.
    """
    solver = pick_solver(settings, linear=relaxed, vertex=vertex)
    began = time.perf_counter()
    run_solver(model.program, solver, task="the coarse program", remedy="give a longer solver_time_limit or another policy")
    seconds = time.perf_counter() - began
    # `status` says Optimal even after a time limit; only `sol_status` tells a proved optimum from a solution.
    proved = model.program.sol_status == pulp.LpSolutionOptimal
    if not proved and (relaxed or model.program.sol_status != pulp.LpSolutionIntegerFeasible):
        raise SolverError(
            f"{solver.name} found no solution in {settings.time_limit_seconds} s "
            f"({pulp.LpSolution[model.program.sol_status]}); "
            "give a longer solver_time_limit"
        )
    objective = float(pulp.value(model.program.objective)) * unit_seconds
    if relaxed:
        report = SolverReport(
            name=solver.name,
            status="feasible",
            bound_seconds=max(objective, 0.0),
            build_seconds=build_seconds,
            solve_seconds=seconds,
        )
        return CoarseSolution(tiers=_chosen_tiers(model), on_host=_on_host(model), report=report)
    proved_units = proved_bound(model.program, solver)
    bound = None if proved_units is None else proved_units * unit_seconds
    return CoarseSolution(
        tiers=_chosen_tiers(model),
        on_host=_on_host(model),
        report=SolverReport(
            name=solver.name,
            status="optimal" if proved else "feasible",
            objective_seconds=max(objective, 0.0),
            bound_seconds=bound,
            gap=None if bound is None else max(0.0, (objective - bound) / max(abs(objective), 1e-12)),
            build_seconds=build_seconds,
            solve_seconds=seconds,
        ),
    )


def _chosen_tiers(model: CoarseModel) -> dict[int, WaitingTier]:
    """Read the tier of each period from a solution.

    Fractions are rounded so that around any time each tier gets about as many bytes as in the solution: the rest that rounding
    leaves is carried on to the next period.
    """
    shares: dict[tuple[int, ...], dict[WaitingTier, float]] = {}
    spans: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for entry in model.periods:
        value = entry.chosen.value() or 0.0
        if value > _ROUNDING:
            shares.setdefault(entry.period.indices, {})[entry.route.tier] = value
            spans[entry.period.indices] = (entry.period.begin, entry.period.end, entry.block_class.size_bytes)
    tiers: dict[int, WaitingTier] = {}
    carried: dict[WaitingTier, float] = defaultdict(float)
    for indices in sorted(shares, key=lambda indices: (spans[indices], indices)):
        size = spans[indices][2]
        best = max(shares[indices], key=lambda tier: shares[indices][tier] * size + carried[tier])
        whole = max(shares[indices].values()) > 1 - _ROUNDING
        if not whole:
            for tier, share in shares[indices].items():
                carried[tier] += share * size
            if carried[best] < size / 2:
                continue
            carried[best] -= size
        tiers.update(dict.fromkeys(indices, max(shares[indices], key=shares[indices].__getitem__) if whole else best))
    return tiers


def _on_host(model: CoarseModel) -> frozenset[int]:
    """Read the subgroups that update on the host; fractions are rounded in the same way."""
    chosen: set[int] = set()
    carried = 0.0
    for update in model.updates:
        share, size = update.chosen.value() or 0.0, update.windows.host_bytes
        carried += share * size
        if share > _ROUNDING and carried >= size / 2:
            chosen.add(int(update.windows.name))
            carried -= size
    return frozenset(chosen)
