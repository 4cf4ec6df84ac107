"""Which recompute groups should run again: the coarse program decides that together with what waits in which tier."""

from __future__ import annotations

from planner.errors import SolverError
from planner.ilp.build import Resolution, coarse_program
from planner.lp import host_update_candidates, solve_program
from planner.problem import Problem, RerunPlaces, SolverSettings

__all__ = ["rerun_shares"]

_RESOLUTION = Resolution(max_segments=140, window=4, classes_at_peak=200)
_ROUNDING = 1e-3  # solvers return shares with errors of about this size


def rerun_shares(problem: Problem, places: RerunPlaces, settings: SolverSettings) -> dict[int, float]:
    """Solve the relaxed coarse program in which groups may run again. Return how much of each group (id) runs again.

    Groups of which nothing does are left out. Groups that are alike and in the same segments have the same share. Raises
    SolverError where no solver is installed or it fails.
    """
    built = coarse_program(
        problem, _RESOLUTION, host_update_candidates(problem), write_weight=settings.write_weight, places=places
    )
    model = built.model
    relaxed = solve_program(model.program, settings, linear=True, vertex=False)
    if not relaxed.optimal:
        raise SolverError(f"{relaxed.solver} did not solve the program for re-runs in {settings.time_limit_seconds} s")
    shares = {group: relaxed.values[r] for each, r in zip(model.reruns, model.again, strict=True) for group in each.groups}
    return {group: share for group, share in shares.items() if share > _ROUNDING}
