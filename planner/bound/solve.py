"""Solve the program behind the lower bound. Only what the solver has proved counts."""

from __future__ import annotations

import math
from collections import defaultdict

import pulp

from planner.errors import SolverError
from planner.lp import pick_solver, proved_bound, run_solver
from planner.problem import SolverSettings

__all__ = ["least_stall"]


def least_stall(program: pulp.LpProblem, *, whole: bool, settings: SolverSettings) -> float:
    """Return the proved lower bound on the program's objective.

    `whole`: it is an integer program. Raises SolverError when no solver is installed or the solver fails, and when a linear
    program is not solved in time.
    """
    failing = {"task": "the lower bound", "remedy": "the simple bound holds"}
    solver = pick_solver(settings, linear=not whole, vertex=False)
    run_solver(program, solver, **failing)
    if not whole and program.sol_status != pulp.LpSolutionOptimal:  # the interior point method got stuck
        run_solver(program, pick_solver(settings), **failing)
    # After a time limit the bound is valid even where no solution was found.
    proved = proved_bound(program, solver) if whole else None
    if proved is not None:
        return proved
    if program.sol_status != pulp.LpSolutionOptimal:
        raise SolverError(
            f"{solver.name} proved no lower bound in {settings.time_limit_seconds} s "
            f"({pulp.LpSolution[program.sol_status]}); the simple bound holds"
        )
    return float(pulp.value(program.objective)) if whole else _weak_dual(program)


def _weak_dual(program: pulp.LpProblem) -> float:
    """Return the bound that the solver's row prices π prove by weak duality, however inexact they are.

    The rows are a·x ≥ b with π ≥ 0 (π ≤ 0 for a·x ≤ b). Shares x ∈ [0, 1] have costs c; stalls ≥ 0 have cost 1. The prices are
    scaled so that no stall is worth more than 1 (π a ≤ 1). Then objective ≥ π b + Σ over the shares of min(0, c − π a).
    """
    load: dict[pulp.LpVariable, float] = defaultdict(float)
    right = 0.0
    for row in program.constraints():
        price = max(row.pi, 0.0) if row.sense == pulp.LpConstraintGE else min(row.pi, 0.0)
        right -= price * row.constant
        for variable, factor in row.items():
            load[variable] += price * factor
    cost = dict(program.objective)
    scale = 1.0 / max(1.0, *(load[variable] for variable in cost if variable.upBound is None))
    variables = {*load, *cost}
    shares = (variable for variable in variables if variable.upBound is not None)
    return scale * right + math.fsum(min(0.0, cost.get(share, 0.0) - scale * load[share]) for share in shares)
