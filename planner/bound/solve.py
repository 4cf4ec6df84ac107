"""Solve the program behind the lower bound. Only what the solver has proved counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.errors import SolverError
from planner.lp import Program, solve_program
from planner.problem import SolverSettings

__all__ = ["least_stall"]


def least_stall(program: Program, *, whole: bool, settings: SolverSettings) -> float:
    """Return the proved lower bound on the program's objective.

    `whole`: it is an integer program. Raises SolverError when the solver fails, and when a linear program is not solved in
    time.
    """
    solved = solve_program(program, settings, linear=not whole, vertex=False)
    if not whole and not solved.optimal:  # the interior point method got stuck
        solved = solve_program(program, settings, linear=True)
    # After a time limit the bound is valid even where no solution was found.
    if solved.bound is not None:
        return solved.bound
    if not solved.optimal:
        raise SolverError(f"HiGHS proved no lower bound in {settings.time_limit_seconds} s; the simple bound holds")
    return solved.objective if whole else _weak_dual(program, solved.prices)


def _weak_dual(program: Program, given: Sequence[float]) -> float:
    """Return the bound that the solver's row prices π prove by weak duality, however inexact they are.

    The rows are a·x ≥ b with π ≥ 0 (π ≤ 0 for a·x ≤ b). Shares x ∈ [0, 1] have costs c; stalls ≥ 0 have cost 1. The prices are
    scaled so that no stall is worth more than 1 (π a ≤ 1). Then objective ≥ π b + Σ over the shares of min(0, c − π a).
    """
    least, most = np.array(program.least), np.array(program.most)
    at_least = np.isfinite(least)
    prices = np.where(at_least, np.maximum(given, 0.0), np.minimum(given, 0.0))
    right = math.fsum(prices * np.where(at_least, least, most))
    terms = np.repeat(prices, np.diff(program.starts)) * np.array(program.factors)
    load = np.bincount(program.columns, weights=terms, minlength=len(program.costs))
    costs, shares = np.array(program.costs), np.isfinite(program.upper)
    scale: float = 1.0 / max(1.0, *load[~shares].tolist())
    return scale * right + math.fsum(np.minimum(0.0, costs - scale * load)[shares])
