"""Which recompute groups should run again: the coarse program decides that together with what waits in which tier."""

from __future__ import annotations

from planner.errors import SolverError
from planner.ilp.build import Resolution, coarse_program
from planner.ilp.model import CoarseModel
from planner.lp import host_update_candidates, solve_program
from planner.problem import Problem, RerunPlaces, SolverSettings

__all__ = ["rerun_shares"]

_RESOLUTION = Resolution(max_segments=64, window=3, classes_at_peak=100)
_ROUNDING = 1e-3  # solvers return shares with errors of about this size
MAX_NODES = 20
"""Of the search tree of the integer program. Its first nodes find nearly all that it finds."""


def rerun_shares(problem: Problem, places: RerunPlaces, settings: SolverSettings) -> tuple[dict[int, float], frozenset[int]]:
    """Solve the coarse program in which groups may run again: relaxed, and with whole counts of each class.

    Return how much of each group (id) runs again in the relaxed program, without those of which nothing does; groups that are
    alike and in the same segments have the same share. And the groups that run again with whole counts; if no such solution is
    found, none. Raises SolverError where no solver is installed or it fails.
    """
    built = coarse_program(
        problem, _RESOLUTION, host_update_candidates(problem), write_weight=settings.write_weight, places=places
    )
    model = built.model
    relaxed = solve_program(model.program, settings, linear=True, vertex=False)
    if not relaxed.optimal:
        raise SolverError(f"{relaxed.solver} did not solve the program for re-runs in {settings.time_limit_seconds} s")
    shares = {group: relaxed.values[r] for each, r in zip(model.reruns, model.again, strict=True) for group in each.groups}
    return {group: share for group, share in shares.items() if share > _ROUNDING}, _whole_counts(model, settings)


def _whole_counts(model: CoarseModel, settings: SolverSettings) -> frozenset[int]:
    """The groups that run again if of each class a whole number does, and moves are shares as before."""
    program = model.program
    for variable in (*(entry.chosen for entry in model.periods), *(update.chosen for update in model.updates)):
        program.whole[variable] = False
    for each, share in zip(model.reruns, model.again, strict=True):
        count = program.variable(len(each.groups), whole=True)
        program.equal([(share, len(each.groups)), (count, -1.0)], 0)
    solved = solve_program(program, settings, linear=False, max_nodes=MAX_NODES)
    if not solved.values:
        return frozenset()
    chosen: set[int] = set()
    for each, share in zip(model.reruns, model.again, strict=True):
        chosen.update(each.groups[: round(solved.values[share] * len(each.groups))])
    return frozenset(chosen)
