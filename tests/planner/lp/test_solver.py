"""Programs by hand: what is found, and what is proved."""

import ctypes
import time

import highspy
import pytest

from planner import SolverError
from planner.lp import Program, solve_program
from planner.problem import SolverSettings

SETTINGS = SolverSettings(gap=0.0)


def knapsack() -> Program:
    """Values 6, 5 and 4 with weights 4, 3 and 2, of which 5 fit."""
    program = Program()
    items = [program.variable(whole=True) for _ in range(3)]
    program.at_most(list(zip(items, (4.0, 3.0, 2.0), strict=True)), 5)
    program.minimise(zip(items, (-6.0, -5.0, -4.0), strict=True))
    return program


def test_an_integer_program_and_its_relaxation_with_the_price_of_its_row() -> None:
    program = knapsack()
    program.upper[1] = 0.0
    solved = solve_program(program, SETTINGS, linear=False)
    assert (solved.optimal, solved.objective, solved.bound) == (True, pytest.approx(-6.0), pytest.approx(-6.0))
    assert [round(value) for value in solved.values] == [1, 0, 0]
    relaxed = solve_program(program, SETTINGS, linear=True)
    assert relaxed.optimal and relaxed.objective == pytest.approx(-8.5)
    assert list(relaxed.values) == pytest.approx([0.75, 0.0, 1.0])
    assert list(relaxed.prices) == pytest.approx([-1.5])


@pytest.mark.parametrize("linear", [True, False])
def test_rows_of_all_kinds_and_variables_without_a_limit(linear: bool) -> None:
    program = Program()
    x, y = program.variable(float("inf")), program.variable()
    program.at_least([(x, 1.0), (x, 1.0), (y, 1.0)], 3)  # a variable may occur twice
    program.equal([(y, 2.0)], 1)
    program.minimise([(x, 1.0)])
    solved = solve_program(program, SETTINGS, linear=linear)
    assert list(solved.values) == pytest.approx([1.25, 0.5])


def test_rows_that_have_most_terms_in_common() -> None:
    """Levels say the same as rows: 2 x ≤ 3 (not binding), x + y ≤ 1.5, y ≤ 1.25 and y − x ≤ 0.75."""
    program = Program()
    x, y = program.variable(float("inf")), program.variable(float("inf"))
    rows = [[(x, 1.0), (x, 1.0)], [(x, 1.0), (y, 1.0)], [(y, 1.0)], [(y, 1.0), (x, -1.0)]]
    program.levels(rows, (3.0, 1.5, 1.25, 0.75))
    program.minimise([(x, -1.0), (y, -3.0)])
    solved = solve_program(program, SETTINGS, linear=True)
    assert list(solved.values[:2]) == pytest.approx([0.375, 1.125])


def test_without_a_solution_there_are_no_values() -> None:
    program = knapsack()
    program.at_least([(0, 1.0)], 2)
    solved = solve_program(program, SETTINGS, linear=False)
    assert not solved.values and not solved.optimal


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS writes by C's standard output, which has a buffer of its own."""
    for linear in (True, False):
        solve_program(knapsack(), SETTINGS, linear=linear)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("linear", [True, False])
def test_a_solver_that_fails_is_an_error(linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda solver: highspy.HighsModelStatus.kSolveError)
    with pytest.raises(SolverError, match="HiGHS failed: kSolveError"):
        solve_program(knapsack(), SETTINGS, linear=linear)


@pytest.fixture
def interior(monkeypatch: pytest.MonkeyPatch) -> Program:
    """An assignment of 30 to 30. The simplex method gets no iterations, so that the interior point method solves it."""
    set_option = highspy.Highs.setOptionValue

    def without_iterations(solver: highspy.Highs, name: str, value: object) -> object:
        return set_option(solver, name, 0 if name == "simplex_iteration_limit" else value)

    monkeypatch.setattr(highspy.Highs, "setOptionValue", without_iterations)
    program = Program()
    size = 30
    pairs = [[program.variable() for _ in range(size)] for _ in range(size)]
    for row in (*pairs, *zip(*pairs, strict=True)):
        program.equal([(variable, 1.0) for variable in row], 1)
    program.minimise((pairs[a][b], float((a + 1) * (b + 1))) for a in range(size) for b in range(size))
    return program


def test_time_that_others_take_does_not_end_a_search(interior: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time is left by the clock: this process has used none of it."""
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    solved = solve_program(interior, SolverSettings(time_limit_seconds=1e-9), linear=True, vertex=False)
    assert solved.optimal and solved.objective == pytest.approx(sum(n * (31 - n) for n in range(1, 31)))


def test_processor_time_ends_a_search(interior: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "process_time", lambda: float(next(ticks)))
    solved = solve_program(interior, SolverSettings(time_limit_seconds=1.0), linear=True, vertex=False)
    assert not solved.optimal and not solved.values
