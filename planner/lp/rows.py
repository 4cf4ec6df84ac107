"""Rows of linear programs, as lists of terms in which a variable may occur more than once."""

from __future__ import annotations

from collections.abc import Iterable

import pulp

from planner.problem import Problem

__all__ = ["Terms", "add_row", "byte_scale", "linear"]

Terms = list[tuple[pulp.LpVariable, float]]


def linear(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    """Return Σ factor · variable. (PuLP itself would keep only a variable's last occurrence.)"""
    factors: dict[pulp.LpVariable, float] = {}
    for variable, factor in terms:
        factors[variable] = factors.get(variable, 0.0) + factor
    return pulp.LpAffineExpression(factors)


def add_row(program: pulp.LpProblem, terms: Iterable[tuple[pulp.LpVariable, float]], sense: int, right: float) -> None:
    """Add the row Σ terms (sense) right. sense: LpConstraintLE, LpConstraintEQ or LpConstraintGE of PuLP."""
    program.addConstraint(pulp.LpConstraint(linear(terms), sense=sense, rhs=right))


def byte_scale(problem: Problem) -> float:
    """Return the unit in which rows count bytes: the device budget. It keeps the numbers near one."""
    return float(max(problem.budgets.device_bytes, 1))
