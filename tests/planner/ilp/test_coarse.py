"""Coarse programs: what a long iteration's solutions prove, and that what re-runs read is there."""

import pytest

from planner import Budgets
from planner.ilp import coarse_solutions
from planner.ilp.formulation import Resolution, coarse_program
from planner.lp import solve_program
from planner.problem import Problem, RerunPlaces, SolverSettings, live_bytes

from ..recompute_traces import layers
from ..strategies import transformer_trace

SETTINGS = SolverSettings()


def test_a_long_iteration_gets_a_relaxed_solution_and_then_a_whole_one() -> None:
    trace = transformer_trace(layers=9, stages_per_layer=4, rate=2e9)
    assert len(trace.stages) > 64
    problem = Problem.of(trace, Budgets(device_bytes=max(live_bytes(trace)) // 2))
    relaxed, whole = coarse_solutions(problem, SETTINGS)
    assert relaxed.report.bound_seconds is not None and whole.report.objective_seconds is not None
    assert relaxed.report.objective_seconds is None
    assert whole.report.bound_seconds == relaxed.report.bound_seconds <= whole.report.objective_seconds * (1 + 1e-6)
    assert whole.report.status == "feasible" and whole.report.gap is not None and whole.report.gap < 0.05
    assert [each.report.bound_seconds for each in coarse_solutions(problem, SETTINGS, integer=False)] == [
        pytest.approx(relaxed.report.bound_seconds)
    ]


def test_what_a_re_run_reads_is_not_away() -> None:
    """The weight is idle between forward stage 0 and backward stage 3, where group 0 reads it."""
    trace = layers(2, rate=1.0)
    weight = trace.blocks[2].model_copy(update={"reads": (0, 1)})
    trace = trace.model_copy(update={"blocks": (*trace.blocks[:2], weight)})
    problem = Problem.of(trace, Budgets(device_bytes=31))
    built = coarse_program(problem, Resolution(max_segments=64, window=6), (), write_weight=0.005, places=RerunPlaces(trace))
    model, program = built.model, built.model.program
    (number,) = [n for n, each in enumerate(model.reruns) if each.groups == (0,)]
    end = model.reruns[number].end
    around = [entry for entry in model.periods if 2 in entry.block_class.blocks and entry.period.begin < end < entry.period.end]
    assert around
    absent = [term for entry in around for term in entry.absent(end - entry.period.begin - 1)]
    program.minimise([(variable, -10_000 * factor) for variable, factor in absent])  # the more is away, the better

    def away() -> float:
        values = solve_program(program, SETTINGS, linear=True).values
        return sum(factor * values[variable] for variable, factor in absent)

    assert away() == pytest.approx(1.0)
    program.lower[model.again[number]] = 1.0
    assert away() == pytest.approx(0.0, abs=1e-6)
