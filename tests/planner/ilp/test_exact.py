"""The integer program on small cases, solved to the end: against every choice of its whole variables, and the simulator."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Trace, floor
from planner.ilp import CoarseSolution, coarse_solutions, rerun_shares
from planner.ilp.coarse import solve
from planner.ilp.formulation import CoarseProgram, Resolution, coarse_program
from planner.lp import solve_program
from planner.policies.improve import exact_candidates
from planner.policies.optimise import start_of
from planner.problem import DEFAULT_WRITE_WEIGHT, Problem, RerunPlaces, SolverSettings, live_bytes
from planner.schema import SolverReport, WaitingTier

from ...thoroughness import by_profile
from ..exhaustive import best_seconds, placements, small_problem, small_training
from ..recompute_traces import layers
from ..strategies import hardware, problems, training_problems

HAND = Path(__file__).parents[3] / "traces" / "hand"
EXACT = SolverSettings(gap=0.0, threads=1)
FULL = Resolution(max_segments=64, window=64)
"""Each stage of a small iteration is a segment, and copies may run in all of them."""
CASES = by_profile(ci=12, long=100)


def program_of(problem: Problem) -> CoarseProgram:
    return coarse_program(problem, FULL, problem.may_update_on_host, write_weight=DEFAULT_WRITE_WEIGHT)


def solved(problem: Problem) -> CoarseSolution:
    return solve(program_of(problem), relaxed=False, vertex=True, settings=EXACT)


def least_of_all_choices(problem: Problem) -> float:
    """The least objective over every choice of whole variables, in seconds: a linear program for each."""
    built = program_of(problem)
    program = built.model.program
    whole = [variable for variable, is_whole in enumerate(program.whole) if is_whole]
    least = float("inf")
    for choice in product((0.0, 1.0), repeat=len(whole)):
        for variable, value in zip(whole, choice, strict=True):
            program.lower[variable] = program.upper[variable] = value
        found = solve_program(program, EXACT, linear=True)
        least = min(least, found.objective if found.optimal else float("inf"))
    return least * built.unit_seconds


def small_cases(make: Any, seed: int) -> list[Problem]:
    rng = random.Random(seed)
    return [make(rng, most_combinations=600) for _ in range(CASES)]


@pytest.mark.parametrize("make", [small_problem, small_training])
def test_no_choice_of_whole_variables_is_better_than_the_solution(make: Any) -> None:
    for problem in small_cases(make, seed=1):
        found = solved(problem)
        assert found.report.status == "optimal" and found.report.objective_seconds is not None
        assert found.report.objective_seconds == pytest.approx(least_of_all_choices(problem), rel=1e-6)
        assert found.report.bound_seconds == pytest.approx(found.report.objective_seconds, rel=1e-6)


@pytest.mark.parametrize("make", [small_problem, small_training])
def test_what_the_program_chooses_is_mostly_the_best_of_all_plans(make: Any) -> None:
    """The program counts whole segments and shares of blocks, so it promises no less than the best plan takes: but for its ties.

    Made exact, its choice is the best of all plans in most cases, and never better: the simulator judges both.
    """
    best = 0
    cases = small_cases(make, seed=2)
    for problem in cases:
        found = solved(problem)
        seconds = min(best_seconds(each) for each in placements(problem))
        assert found.report.objective_seconds is not None and found.report.objective_seconds <= seconds * 1.01
        exact = [each.timeline.iteration_seconds for each in exact_candidates(*start_of(problem, found), DEFAULT_WRITE_WEIGHT)]
        assert min(exact) >= seconds * (1 - 1e-9)
        best += min(exact) <= seconds * (1 + 1e-9)
    assert best > len(cases) / 2


def taken_bytes(problem: Problem, tiers: dict[int, WaitingTier], tier: WaitingTier) -> int:
    """The most bytes that a tier holds at any stage: of each block from when it first leaves until it dies, or for good."""
    used = [0] * problem.stage_count
    first: dict[int, int] = {}
    for index, where in tiers.items():
        period = problem.periods[index]
        if where == tier:
            first[period.block] = min(period.after, first.get(period.block, period.after))
    if tier == "host":
        first |= {block.id: 0 for block in problem.host_blocks}
    kept = {block.id for block in problem.host_blocks} if tier == "host" else set()
    for number, since in first.items():
        block = problem.source.blocks[number]
        forever = block.persistent or number in kept
        for stage in range(problem.stage_count) if forever else range(since, problem.trace.blocks[number].last_stage + 1):
            used[stage] += block.size_bytes
    return max(used)


def check_tiers(problem: Problem, solution: CoarseSolution) -> None:
    left, decisions = start_of(problem, solution)
    tiers = {index: decision.tier for index, decision in decisions.items()}
    for tier, budget in (("host", problem.budgets.host_bytes), ("storage", problem.budgets.storage_bytes)):
        assert budget is None or taken_bytes(left, tiers, tier) <= budget  # type: ignore[arg-type]
    try:
        made = exact_candidates(left, decisions, DEFAULT_WRITE_WEIGHT)
    except InfeasiblePlanError:
        return  # the lower tiers are too small for any plan of these updates
    for each in made:
        assert each.timeline.peak_bytes["device"] <= problem.budgets.device_bytes
        for tier, budget in (("host", problem.budgets.host_bytes), ("storage", problem.budgets.storage_bytes)):
            assert budget is None or each.timeline.peak_bytes[tier] <= budget


@given(problems(), st.sampled_from([None, 0, 30, 80]), st.sampled_from([None, 20, 60]))
def test_rounding_never_overfills_a_tier(case: tuple[Trace, Budgets], host: int | None, storage: int | None) -> None:
    trace, budgets = case
    budgets = budgets.model_copy(update={"host_bytes": host, "storage_bytes": storage})
    if max(live_bytes(trace)) <= budgets.device_bytes:
        return
    problem = Problem.of(trace, budgets)
    for solution in coarse_solutions(problem, EXACT):
        check_tiers(problem, solution)


@given(training_problems())
def test_rounding_never_overfills_a_tier_beside_updates_on_the_host(case: tuple[Trace, Budgets]) -> None:
    problem = Problem.of(*case)
    for solution in coarse_solutions(problem, EXACT):
        check_tiers(problem, solution)


@given(problems(), st.integers(1, 100), st.randoms(use_true_random=False))
def test_even_wishes_for_everything_leave_the_tiers_their_budgets(
    case: tuple[Trace, Budgets], room: int, draw: random.Random
) -> None:
    """A solution that sends each block to a tier by chance, as if rounding had gone as wrong as it can."""
    trace, budgets = case
    problem = Problem.of(trace, budgets.model_copy(update={"host_bytes": room, "storage_bytes": room}))
    routes = [route.tier for route in problem.routes]
    tiers = {index: draw.choice(routes) for index in range(len(problem.periods))}
    check_tiers(problem, CoarseSolution(tiers=tiers, on_host=frozenset(), report=SolverReport()))


@pytest.mark.parametrize("relaxed", [True, False])
def test_whatever_the_objective_asks_for_copies_are_in_order_and_a_block_is_in_one_place(relaxed: bool) -> None:
    """Random prices push each variable against its rows."""
    rng = random.Random(4)
    for problem in (*small_cases(small_problem, seed=4), *small_cases(small_training, seed=4)):
        built = program_of(problem)
        program, count = built.model.program, len(built.model.segments)
        copies = {
            v for entry in built.model.periods for v in (entry.chosen, entry.found, *entry.out, *entry.into) if v is not None
        }
        program.minimise([(variable, rng.uniform(-100, 100)) for variable in sorted(copies)])
        values = solve_program(program, EXACT, linear=relaxed).values
        waiting: dict[tuple[int, ...], float] = {}
        busy: dict[tuple[str, int], float] = {}
        for entry in built.model.periods:
            chosen, found = values[entry.chosen], 0.0 if entry.found is None else values[entry.found]
            out = [values[variable] for variable in entry.out]
            into = [0.0 if variable is None else values[variable] for variable in entry.into]
            waiting[entry.period.indices] = waiting.get(entry.period.indices, 0.0) + chosen
            assert out == pytest.approx(sorted(out)) and into == pytest.approx(sorted(into))
            assert (out[-1] if out else 0.0) + found == pytest.approx(chosen, abs=1e-6)
            for position, share in enumerate(into):
                assert share <= (out[position - 1] if out and position else 0.0) + found + 1e-6
            for position, (before, after) in enumerate(zip([0.0, *out], out, strict=False)):
                key = entry.route.outward.name, (entry.period.begin + 1 + position) % count
                busy[key] = busy.get(key, 0.0) + (after - before) * entry.out_seconds
        assert all(share <= 1 + 1e-6 for share in waiting.values())
        for (_, k), seconds in busy.items():
            assert seconds <= built.model.segments[k].seconds + values[built.model.stall[k]] + 1e-6


def line(blocks: list[dict[str, Any]], budget: int, *, stages: int = 6, seconds: float = 1.0, **machine: Any) -> Problem:
    """`stages` stages of `seconds` each, and activations; a drive of 10 bytes per second."""
    each = [{"id": s, "name": f"s{s}", "phase": "forward", "duration_seconds": seconds} for s in range(stages)]
    shown = [{"id": b, "name": f"b{b}", "kind": "activation", "persistent": False, **block} for b, block in enumerate(blocks)]
    fields = {"hardware": hardware(rate=10.0, **machine), "stages": each, "blocks": shown}
    return Problem.of(Trace.model_validate({"name": "line", **fields}), Budgets(device_bytes=budget))


def test_of_two_blocks_that_would_do_the_one_moves_that_copies_less() -> None:
    blocks = [{"size_bytes": size, "writes": [0], "reads": [5]} for size in (20, 10)]
    middle = {"size_bytes": 10, "writes": [2], "reads": [3]}
    problem = line([*blocks, middle], 30)
    found = solved(problem)
    assert {problem.periods[index].block for index in found.tiers} == {1}
    # Both copies hide behind the arithmetic. What is left is their weight: 0.5 % of a second out, a tenth of that in.
    assert found.report.objective_seconds == pytest.approx(6.0 + 0.005 + 0.0005)


def test_equal_blocks_are_chosen_alike_each_time() -> None:
    """Which of two equal blocks leaves does not matter, but one does, and the same one in each run."""
    problem = line([*[{"size_bytes": 10, "writes": [0], "reads": [5]}] * 2, {"size_bytes": 10, "writes": [2], "reads": [3]}], 20)
    first = solved(problem)
    assert len(first.tiers) == 1
    assert [solved(problem).tiers for _ in range(3)] == [first.tiers] * 3


def test_a_block_waits_in_one_of_two_tiers() -> None:
    """Host memory is four times as fast. There is room for one of the two blocks there."""
    blocks = [{"size_bytes": 10, "writes": [0], "reads": [5]}] * 2 + [{"size_bytes": 20, "writes": [2], "reads": [3]}]
    problem = line(blocks, 20, host=True)
    assert solved(problem).tiers == {0: "host", 1: "host"}
    problem = Problem.of(problem.source, problem.budgets.model_copy(update={"host_bytes": 10}))
    assert sorted(solved(problem).tiers.values()) == ["host", "storage"]


def test_nothing_moves_where_everything_fits() -> None:
    problem = line([{"size_bytes": 10, "writes": [0], "reads": [5]}], 10)
    found = solved(problem)
    assert found.tiers == {} and found.report.objective_seconds == pytest.approx(6.0)


def test_an_iteration_that_takes_no_time_takes_what_its_copies_take() -> None:
    """10 bytes leave in one second and come back in another; nothing hides them."""
    blocks = [{"size_bytes": 10, "writes": [0], "reads": [5]}, {"size_bytes": 10, "writes": [2], "reads": [3]}]
    problem = line(blocks, 10, seconds=0.0)
    found = solved(problem)
    assert found.tiers == {0: "storage"}
    assert found.report.objective_seconds == pytest.approx(2.0 + 0.005 + 0.0005)
    (exact, *_) = exact_candidates(*start_of(problem, found), DEFAULT_WRITE_WEIGHT)
    assert exact.timeline.iteration_seconds == pytest.approx(2.0)


def test_a_block_that_only_dies_does_not_come_back() -> None:
    blocks = [{"size_bytes": 10, "writes": [0], "reads": [1], "dies_after": 5}, {"size_bytes": 10, "writes": [3], "reads": [4]}]
    problem = line(blocks, 10)
    found = solved(problem)
    assert found.tiers == {0: "storage"}
    assert found.report.objective_seconds == pytest.approx(6.0 + 0.005)  # the weight of a copy out alone


def test_a_latency_counts_for_each_block() -> None:
    """Blocks that are alike are one class, but each of the four pays 0.05 s of latency beside the 0.1 s for its byte."""
    blocks = [{"size_bytes": 1, "writes": [0], "reads": [5]}] * 4 + [{"size_bytes": 4, "writes": [2], "reads": [3]}]
    problem = line(blocks, 4, latency=0.05)
    found = solved(problem)
    assert len(found.tiers) == 4
    assert found.report.objective_seconds == pytest.approx(6.0 + 4 * (0.05 + 0.1) * (0.005 + 0.0005))


def test_a_copy_that_is_still_valid_is_found() -> None:
    """The block leaves twice and is copied out once; and not at all if nothing ever writes it."""
    middle = [{"size_bytes": 10, "writes": [stage], "reads": [stage + 1]} for stage in (2, 7)]
    written = line([{"size_bytes": 10, "writes": [0], "reads": [5, 10]}, *middle], 10, stages=11)
    assert solved(written).report.objective_seconds == pytest.approx(11.0 + 0.005 + 2 * 0.0005)
    read_only = line([{"size_bytes": 10, "persistent": True, "writes": [], "reads": [0, 5, 10]}, *middle], 10, stages=11)
    assert solved(read_only).report.objective_seconds == pytest.approx(11.0 + 2 * 0.0005)


def test_a_copy_that_stays_valid_is_made_once() -> None:
    trace = Trace.load(HAND / "copy_stays_valid.json")
    problem = Problem.of(trace, Budgets(device_bytes=floor(trace)[0]))
    (best, *_) = sorted(exact_candidates(*start_of(problem, solved(problem)), 0.0), key=lambda each: each.cost)
    for block in trace.blocks:
        out = [each for each in best.timeline.transfers if each.block == block.id and each.link.startswith("device->")]
        assert len(out) <= max(len(block.writes), 1)
    moved = best.timeline.moved_bytes
    assert 0 < moved["device->storage"] < moved["storage->device"]


@pytest.mark.parametrize(("rate", "again"), [(0.5, True), (1000.0, False)])
def test_groups_run_again_where_links_are_slow(rate: float, again: bool) -> None:
    trace = layers(4, rate=rate)
    problem = Problem.of(trace, Budgets(device_bytes=41))
    assert bool(rerun_shares(problem, RerunPlaces(trace), EXACT)) == again
