"""Which recompute groups should run again: the coarse program decides that together with what waits in which tier."""

from __future__ import annotations

from planner.errors import SolverError
from planner.ilp.build import Resolution, coarse_program
from planner.lp import solve_program
from planner.problem import Problem, RerunPlaces, SolverSettings

__all__ = ["rerun_shares"]

_FINE = Resolution(max_segments=140, window=4, classes_at_peak=200)
_ROUGH = Resolution(max_segments=64, window=3, classes_at_peak=100)
_ROUNDING = 1e-3  # solvers return shares with errors of about this size


def rerun_shares(problem: Problem, places: RerunPlaces, settings: SolverSettings) -> dict[int, float]:
    """Solve the relaxed coarse program in which groups may run again. Return how much of each group (id) runs again.

    Groups of which nothing does are left out; a rough program tells first whether there are others, and with several lower
    tiers that is all. Groups that are alike and in the same segments have the same share. Raises SolverError where the solver
    fails.
    """
    shares: dict[int, float] = {}
    for resolution in (_ROUGH, _FINE):
        updates = problem.may_update_on_host
        built = coarse_program(problem, resolution, updates, write_weight=settings.write_weight, places=places)
        model = built.model
        solved = solve_program(model.program, settings, linear=True, vertex=False)
        if not solved.optimal:
            raise SolverError(f"HiGHS did not solve the program for re-runs in {settings.time_limit_seconds} s")
        shares = {group: solved.values[r] for each, r in zip(model.reruns, model.again, strict=True) for group in each.groups}
        shares = {group: share for group, share in shares.items() if share > _ROUNDING}
        if not shares or len(problem.routes) > 1 or problem.stage_count <= _ROUGH.max_segments:
            break
    return shares
