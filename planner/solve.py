"""Run a solver on the coarse model and report truthfully what it proved."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import pulp

from planner.errors import SolverError
from planner.formulation import CoarseModel, chosen_tiers
from planner.plan import SolverReport, WaitingTier

__all__ = ["Solution", "solve"]

_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Tiers by period index, and the solver's report."""

    tiers: dict[int, WaitingTier]
    report: SolverReport


def solve(model: CoarseModel, *, time_limit_seconds: float, gap: float, build_seconds: float) -> Solution:
    """Solve with HiGHS, or CBC where HiGHS is not installed. Blocks for `time_limit_seconds` at the most (CBC may overrun).

    The objective counts the ideal iteration time too. Raises SolverError when no solver is installed, or when the
    limit passes without any solution.
    """
    name, solver = _pick_solver(time_limit_seconds, gap)
    began = time.perf_counter()
    try:
        model.program.solve(solver)
    except pulp.PulpSolverError as problem:
        raise SolverError(f"{name} failed: {problem}; give a longer solver_time_limit or another policy") from problem
    seconds = time.perf_counter() - began
    # `status` says Optimal even after a time limit; only `sol_status` tells a proof from a mere solution.
    proved = model.program.sol_status == pulp.LpSolutionOptimal
    if not proved and model.program.sol_status != pulp.LpSolutionIntegerFeasible:
        raise SolverError(
            f"{name} found no solution in {time_limit_seconds} s ({pulp.LpSolution[model.program.sol_status]}); "
            "give a longer solver_time_limit"
        )
    objective = float(pulp.value(model.program.objective))
    bound = _dual_bound(name, model)
    return Solution(
        tiers=chosen_tiers(model),
        report=SolverReport(
            name=name,
            status="optimal" if proved else "feasible",
            objective_seconds=max(objective, 0.0),
            bound_seconds=bound,
            gap=None if bound is None else max(0.0, (objective - bound) / max(abs(objective), 1e-12)),
            build_seconds=build_seconds,
            solve_seconds=seconds,
        ),
    )


def _pick_solver(time_limit_seconds: float, gap: float) -> tuple[str, pulp.LpSolver]:
    highs = pulp.HiGHS(msg=False, timeLimit=time_limit_seconds, gapRel=gap, threads=_THREADS)
    if highs.available():
        return "HiGHS", highs
    cbc = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_seconds, gapRel=gap, threads=_THREADS)
    if cbc.available():
        return "CBC", cbc
    raise SolverError("no solver is installed: install highspy (pip install highspy), or use policy='belady'")


def _dual_bound(name: str, model: CoarseModel) -> float | None:
    """The bound that the solver proved on the objective, or None where it does not tell (CBC does not)."""
    if name != "HiGHS":
        return None
    bound = float(model.program.solverModel.getInfo().mip_dual_bound)
    return bound if math.isfinite(bound) else None
