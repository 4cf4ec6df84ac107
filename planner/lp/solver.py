"""Choose a solver, run it, and read the bound that it proved."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pulp

from planner.errors import SolverError
from planner.problem import SolverSettings

__all__ = ["Solver", "pick_solver", "proved_bound", "run_solver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """An installed solver with its settings. `name`: "HiGHS" or "CBC"."""

    name: str
    backend: pulp.LpSolver


def pick_solver(settings: SolverSettings, *, linear: bool = False, vertex: bool = True) -> Solver:
    """Return HiGHS, or CBC where HiGHS is not installed. Raises SolverError where neither is.

    linear: treat integer variables as continuous. HiGHS then uses its interior point method, which is faster than the simplex
    method on large programs. vertex: end in a vertex (crossover), where few variables are fractional.
    """
    limits = {"timeLimit": settings.time_limit_seconds, "gapRel": settings.gap, "threads": settings.threads}
    method = {"solver": "ipm", "run_crossover": "on" if vertex else "off"} if linear else {}
    highs = pulp.HiGHS(mip=not linear, msg=False, **limits, **method)
    if highs.available():
        return Solver(name="HiGHS", backend=highs)
    # PuLP bundles CBC until its version 4; COIN_CMD is a CBC on the path.
    for cbc_class in (pulp.COIN_CMD, getattr(pulp, "PULP_CBC_CMD", None)):
        if cbc_class is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            cbc = cbc_class(mip=not linear, msg=False, **limits)
        if cbc.available():
            return Solver(name="CBC", backend=cbc)
    raise SolverError("no solver is installed: install highspy (pip install highspy), or use policy='belady'")


def run_solver(program: pulp.LpProblem, solver: Solver, *, task: str, remedy: str) -> None:
    """Solve the program; its `sol_status` tells the result.

    Raises SolverError, whose message names `task` and `remedy`, when the solver fails.
    """
    try:
        program.solve(solver.backend)
        # HiGHS keeps its first number of threads for the whole process and does not run with another. It must be reset then.
        if solver.name == "HiGHS" and not _has_run(program):
            program.solverModel.resetGlobalScheduler(True)
            program.solve(solver.backend)
    except (pulp.PulpSolverError, IndexError) as failure:
        raise SolverError(f"{solver.name} failed on {task}: {failure}; {remedy}") from failure


def proved_bound(program: pulp.LpProblem, solver: Solver) -> float | None:
    """Return the bound that the solver proved on an integer program's objective; None where it reports none, as CBC does."""
    if solver.name != "HiGHS" or not _has_run(program):
        return None
    bound = float(program.solverModel.getInfo().mip_dual_bound)
    return bound if math.isfinite(bound) else None


def _has_run(program: pulp.LpProblem) -> bool:
    """Whether HiGHS has tried to solve the program; False where it refused to run."""
    return bool(program.solverModel.getModelStatus().name != "kNotset")
