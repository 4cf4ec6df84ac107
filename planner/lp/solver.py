"""Run HiGHS on a program.

PuLP models integer programs. Linear programs are many and large: HiGHS gets their lists directly, as arrays, which halves the
time of planning.

[Note: work, not time] Where a search ends must not depend on what else the machine does: a busy machine would make other plans.
So what ends the search of HiGHS is counted: iterations, and nodes of the search tree. Its time limit is a safeguard, and counts
processor time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import pulp

from planner.errors import SolverError
from planner.lp.program import Program
from planner.problem import SolverSettings, out_of_time, seconds_left

_LEAST_ITERATIONS = 1000
_SHARE = 1.2
_MANY_ROWS, _SHARE_OF_MANY = 30_000, 0.4  # where no vertex is wanted, the interior point method is sure, and faster than so many
_DEVEX = 1  # HiGHS' number of this kind of edge weights
_LOOK_SECONDS = 0.02  # between two looks at the time that a run has taken
_MAX_INTERIOR_ITERATIONS = 200  # programs that can be solved need 25 to 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What the solver found.

    `values`: by variable; empty without a solution. `optimal`: no solution is better, but for the gap. `bound`:
    what the solver proved about an integer program's objective; None where it reports nothing. `prices`: of the rows of a linear
    program.
    """

    values: Sequence[float]
    objective: float = math.inf
    optimal: bool = False
    bound: float | None = None
    prices: Sequence[float] = ()


def solve_program(
    program: Program,
    settings: SolverSettings,
    *,
    linear: bool,
    vertex: bool = True,
    simplex: bool = True,
    devex: bool = True,
    max_nodes: int | None = None,
) -> Solved:
    """Solve the program. linear: take whole variables as continuous. vertex: end in a vertex, which has few fractions.
    simplex: try the simplex method before the interior point method. devex: its edge weights that are cheaper than steepest
    edges, for more iterations.

    max_nodes: of the search tree of an integer program. Works for at most about the time limit, in seconds of processor time, or
    about what is left for planning as a whole (`planner.problem.time_limit`). Raises SolverError when the solver fails. A program
    that is not solved in time is no error: see `Solved`.
    """
    if out_of_time():
        return Solved(values=())
    # HiGHS keeps its first number of threads for the whole process, and does not run with another: others may have left one.
    highspy.Highs.resetGlobalScheduler(True)
    try:
        columns: Sequence[int] = range(len(program.costs))
        if linear:
            solver = _linear(program, settings, vertex=vertex, simplex=simplex, devex=devex)
        else:
            solver, columns = _integer(program, settings, max_nodes)
        status, info, solution = solver.getModelStatus().name, solver.getInfo(), solver.getSolution()
    finally:
        # This ends the threads of HiGHS: a child that is forked now would wait for them for ever.
        highspy.Highs.resetGlobalScheduler(True)
    if status in ("kNotset", "kLoadError", "kModelError", "kPresolveError", "kSolveError", "kPostsolveError"):
        raise SolverError(f"HiGHS failed: {status}")
    optimal = status in ("kOptimal", "kModelEmpty")
    bound = None if linear or not math.isfinite(info.mip_dual_bound) else float(info.mip_dual_bound)
    values = list(solution.col_value)
    none = len(values) < len(program.costs)  # where numbers are too large or too small for HiGHS, which calls that optimal
    if none or not optimal and (linear or not math.isfinite(info.objective_function_value) or not solution.value_valid):
        return Solved(values=(), bound=bound)
    return Solved(
        values=[values[column] for column in columns],
        objective=float(info.objective_function_value),
        optimal=optimal,
        bound=bound,
        prices=list(solution.row_dual) if linear else (),
    )


_UntypedHighs: Any = highspy.Highs  # its methods have no annotations


class _QuietHighs(_UntypedHighs):  # type: ignore[misc]
    """HiGHS that prints nothing."""

    # From 1.16 on, a plain one says who it is, because its constructor enables callbacks.

    def enableCallbacks(self) -> None:  # noqa: N802 - HiGHS' name
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def _integer(program: Program, settings: SolverSettings, max_nodes: int | None) -> tuple[highspy.Highs, list[int]]:
    """Solve an integer program by HiGHS, as PuLP models it. Return HiGHS with what it found, and each variable's column there."""
    model, variables = _pulp_model(program)
    solver = model.solverModel = _QuietHighs()
    solver.setOptionValue("mip_rel_gap", settings.gap)
    solver.setOptionValue("threads", settings.threads)
    if max_nodes is not None:
        solver.setOptionValue("mip_max_nodes", max_nodes)
    pulp.HiGHS().buildSolverModel(model)
    _stop_after(settings.time_limit_seconds, solver.cbMipInterrupt)
    solver.run()
    return solver, [variable.index for variable in variables]


def _linear(program: Program, settings: SolverSettings, *, vertex: bool, simplex: bool, devex: bool) -> highspy.Highs:
    """Solve a linear program by HiGHS. Return HiGHS with what it found.

    By the dual simplex method; by the interior point method where that takes too many iterations.
    """
    solver = _QuietHighs()
    solver.setOptionValue("threads", settings.threads)
    solver.passModel(_highs_model(program))
    if simplex:
        # Where copies hide behind the arithmetic, the simplex method is up to eight times as fast. Where links are the
        # bottleneck, it may take several times as long. So it is given up after _SHARE as many iterations as there are rows.
        solver.setOptionValue("solver", "simplex")
        if devex:
            solver.setOptionValue("simplex_dual_edge_weight_strategy", _DEVEX)
        rows = len(program.least)
        share = _SHARE if vertex or rows <= _MANY_ROWS else _SHARE_OF_MANY
        solver.setOptionValue("simplex_iteration_limit", max(int(share * rows), _LEAST_ITERATIONS))
        _stop_after(settings.time_limit_seconds, solver.cbSimplexInterrupt)
        solver.run()
        if solver.getModelStatus().name != "kIterationLimit":
            return solver
        solver.clearSolver()
    solver.setOptionValue("solver", "ipm")
    solver.setOptionValue("run_crossover", "on" if vertex else "off")
    solver.setOptionValue("ipm_iteration_limit", _MAX_INTERIOR_ITERATIONS)
    _stop_after(settings.time_limit_seconds, solver.cbIpmInterrupt)
    solver.run()
    return solver


def _highs_model(program: Program) -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.costs), len(program.least)
    model.col_cost_, model.col_lower_, model.col_upper_ = (np.array(v) for v in (program.costs, program.lower, program.upper))
    model.row_lower_, model.row_upper_ = np.array(program.least), np.array(program.most)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(program.starts, dtype=np.int32)
    model.a_matrix_.index_ = np.array(program.columns, dtype=np.int32)
    model.a_matrix_.value_ = np.array(program.factors)
    return model


def _stop_after(seconds: float, callback: highspy.highs.HighsCallback) -> None:
    """End a run after so much processor time of this process."""
    # HiGHS itself counts what passes while others have the processor. It calls 100,000 times, and that clock is slow.
    end, looked = time.process_time() + min(seconds, seconds_left()), -math.inf

    def check(event: highspy.highs.HighsCallbackEvent) -> None:
        nonlocal looked
        if (now := time.perf_counter()) > looked + _LOOK_SECONDS:
            looked = now
            if time.process_time() > end:
                event.interrupt()

    callback.subscribe(check)


def _pulp_model(program: Program) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("teraio", pulp.LpMinimize)
    variables = [
        model.add_variable(
            f"x{n}",
            low if math.isfinite(low) else None,
            high if math.isfinite(high) else None,
            pulp.LpInteger if whole else pulp.LpContinuous,
        )
        for n, (low, high, whole) in enumerate(zip(program.lower, program.upper, program.whole, strict=True))
    ]
    model.setObjective(pulp.LpAffineExpression(list(zip(variables, program.costs, strict=True))))
    for row, (least, most) in enumerate(zip(program.least, program.most, strict=True)):
        span = range(program.starts[row], program.starts[row + 1])
        terms = pulp.LpAffineExpression([(variables[program.columns[n]], program.factors[n]) for n in span])
        sense = pulp.LpConstraintEQ if least == most else pulp.LpConstraintLE if least == -math.inf else pulp.LpConstraintGE
        model.addConstraint(pulp.LpConstraint(terms, sense=sense, rhs=least if most == math.inf else most))
    return model, variables
