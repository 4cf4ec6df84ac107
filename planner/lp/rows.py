"""Rows of linear programs as lists of terms, in which a variable may occur more than once."""

from __future__ import annotations

from collections.abc import Iterable

import pulp

__all__ = ["Terms", "add_row", "linear"]

Terms = list[tuple[pulp.LpVariable, float]]


def linear(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    """Σ factor · variable. (PuLP itself would let a variable's last occurrence replace the others.)"""
    factors: dict[pulp.LpVariable, float] = {}
    for variable, factor in terms:
        factors[variable] = factors.get(variable, 0.0) + factor
    return pulp.LpAffineExpression(factors)


def add_row(program: pulp.LpProblem, terms: Iterable[tuple[pulp.LpVariable, float]], sense: int, right: float) -> None:
    """Add Σ terms (sense) right; sense: one of PuLP's LpConstraintLE, LpConstraintEQ, LpConstraintGE."""
    program.addConstraint(pulp.LpConstraint(linear(terms), sense=sense, rhs=right))
