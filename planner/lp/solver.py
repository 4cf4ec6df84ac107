"""Choose a solver, run it, and read the bound that it proved."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pulp

from planner.errors import SolverError
from planner.problem import SolverSettings

__all__ = ["Solver", "pick_solver", "proved_bound", "run_solver"]

_LEAST_ITERATIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """An installed solver with its settings. `name`: "HiGHS" or "CBC"."""

    name: str
    backend: pulp.LpSolver


class _LinearHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """The dual simplex method; the interior point method where that takes too many iterations.

    Where copies hide behind the arithmetic, the simplex method is up to eight times as fast. Where links are the bottleneck, it
    may take several times as long. So it is given up after as many iterations as the program has rows (a quarter of them where no
    vertex is asked for, which is what takes the interior point method most time), or after a third of the time.
    """

    def callSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802 - PuLP's name
        model = lp.solverModel
        model.setOptionValue("solver", "simplex")
        share = 1 if self.optionsDict["run_crossover"] == "on" else 4
        model.setOptionValue("simplex_iteration_limit", max(model.getNumRow() // share, _LEAST_ITERATIONS))
        model.setOptionValue("time_limit", self.timeLimit / 3)
        model.run()
        if model.getModelStatus().name in ("kIterationLimit", "kTimeLimit"):
            model.clearSolver()
            model.setOptionValue("solver", "ipm")
            model.setOptionValue("time_limit", model.getRunTime() + self.timeLimit)  # HiGHS counts from its first run on
            model.run()


def pick_solver(settings: SolverSettings, *, linear: bool = False, vertex: bool = True) -> Solver:
    """Return HiGHS, or CBC where HiGHS is not installed. Raises SolverError where neither is.

    linear: treat integer variables as continuous. vertex: end in a vertex, where few variables are fractional.
    """
    limits = {"timeLimit": settings.time_limit_seconds, "gapRel": settings.gap, "threads": settings.threads}
    crossover = {"run_crossover": "on" if vertex else "off"} if linear else {}
    highs = (_LinearHiGHS if linear else pulp.HiGHS)(mip=not linear, msg=False, **limits, **crossover)
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
