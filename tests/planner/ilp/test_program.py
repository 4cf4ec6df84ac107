"""The coarse integer program: small cases solved to the end, against every choice of its whole variables and the simulator."""

from __future__ import annotations

import random
from typing import Any

import highspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Trace
from planner.ilp import CoarseSolution, coarse_solutions, room_bytes
from planner.ilp.classes import SegmentGrid, segments_of
from planner.ilp.coarse import solve
from planner.ilp.formulation import Resolution, coarse_program
from planner.ilp.model import CoarseModel
from planner.lp import solve_program
from planner.policies.optimise import exact_candidates, start_of, with_other_large_blocks
from planner.problem import DEFAULT_WRITE_WEIGHT, Problem, RerunPlaces, SolverSettings, live_bytes
from planner.schema import SolverReport, WaitingTier

from ...thoroughness import by_profile
from ..exhaustive import best_seconds, placements, small_problem, small_training
from ..strategies import problems, training_problems
from ..traces import Entry, block, hardware, layers, microbatches, staged, subgroup, trace, trained, transformer_trace

EXACT = SolverSettings(gap=0.0, threads=1)
FULL = Resolution(max_segments=64, window=64)
"""Each stage of a small iteration is a segment, and copies may run in all of them."""
CASES = by_profile(ci=12, long=100)


def program_of(problem: Problem) -> CoarseModel:
    return coarse_program(problem, FULL, problem.may_update_on_host, write_weight=DEFAULT_WRITE_WEIGHT)


def solved(problem: Problem) -> CoarseSolution:
    return solve(program_of(problem), relaxed=False, vertex=True, settings=EXACT)


def small_cases(make: Any, seed: int) -> list[Problem]:
    rng = random.Random(seed)
    return [make(rng, most_combinations=600) for _ in range(CASES)]


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
        exact = [
            each.timeline.iteration_seconds
            for each in exact_candidates(*start_of(problem, found.tiers, found.on_host), DEFAULT_WRITE_WEIGHT)
        ]
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
    left, decisions = start_of(problem, solution.tiers, solution.on_host)
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


TIGHT = st.builds(
    lambda case, host, storage: (case[0], case[1].model_copy(update={"host_bytes": host, "storage_bytes": storage})),
    problems(),
    st.sampled_from([None, 0, 30, 80]),
    st.sampled_from([None, 20, 60]),
)


@pytest.mark.parametrize("cases", [TIGHT, training_problems()], ids=["tight tiers", "updates on the host"])
@given(data=st.data())
def test_rounding_never_overfills_a_tier(cases: st.SearchStrategy[tuple[Trace, Budgets]], data: st.DataObject) -> None:
    problem = Problem.of(*data.draw(cases))
    if cases is TIGHT and max(problem.live_bytes) <= problem.budgets.device_bytes:
        return
    for solution in coarse_solutions(problem, EXACT):
        check_tiers(problem, solution)


@given(problems(), st.integers(1, 100), st.randoms(use_true_random=False))
def test_even_wishes_for_everything_leave_the_tiers_their_budgets(
    case: tuple[Trace, Budgets], room: int, draw: random.Random
) -> None:
    """A solution that sends each block to a tier by chance, as if rounding had gone as wrong as it can."""
    made, budgets = case
    problem = Problem.of(made, budgets.model_copy(update={"host_bytes": room, "storage_bytes": room}))
    routes = [route.tier for route in problem.routes]
    tiers = {index: draw.choice(routes) for index in range(len(problem.periods))}
    check_tiers(problem, CoarseSolution(tiers=tiers, on_host=frozenset(), report=SolverReport()))


@pytest.mark.parametrize("relaxed", [True, False])
def test_whatever_the_objective_asks_for_copies_are_in_order_and_a_block_is_in_one_place(relaxed: bool) -> None:
    """Random prices push each variable against its rows."""
    rng = random.Random(4)
    for problem in (*small_cases(small_problem, seed=4), *small_cases(small_training, seed=4)):
        model = program_of(problem)
        program, count = model.program, len(model.segments)
        copies = {v for entry in model.periods for v in (entry.chosen, entry.found, *entry.out, *entry.into) if v is not None}
        program.minimise([(variable, rng.uniform(-100, 100)) for variable in sorted(copies)])
        values = solve_program(program, EXACT, linear=relaxed).values
        waiting: dict[tuple[int, ...], float] = {}
        busy: dict[tuple[str, int], float] = {}
        for entry in model.periods:
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
            assert seconds <= model.segments[k].seconds + values[model.stall[k]] + 1e-6


def line(blocks: list[Entry], budget: int, *, stages: int = 6, seconds: float = 1.0, **machine: Any) -> Problem:
    """`stages` stages of `seconds` each; a drive of 10 bytes per second."""
    made = trace(staged("f" * stages, seconds), blocks, hardware(rate=10.0, **machine))
    return Problem.of(made, Budgets(device_bytes=budget))


def test_a_block_waits_in_one_of_two_tiers() -> None:
    """Host memory is four times as fast. There is room for one of the two blocks there."""
    problem = line([block(10, [0], [5])] * 2 + [block(20, [2], [3])], 20, host=True)
    assert solved(problem).tiers == {0: "host", 1: "host"}
    problem = Problem.of(problem.source, problem.budgets.model_copy(update={"host_bytes": 10}))
    assert sorted(solved(problem).tiers.values()) == ["host", "storage"]


FIRST = block(10, [0], [5])
MIDDLE = block(10, [2], [3])


@pytest.mark.parametrize(
    ("problem", "away", "seconds"),
    [
        # Of two blocks that would do, the one that copies less moves. Both copies hide behind the arithmetic. What is left is
        # their weight: 0.5 % of a second out, a tenth of that in.
        pytest.param(line([FIRST, block(20, [0], [5]), MIDDLE], 30), 1, 6.0 + 0.005 + 0.0005, id="two sizes"),
        pytest.param(line([FIRST], 10), 0, 6.0, id="everything fits"),
        pytest.param(line([FIRST, MIDDLE], 10, seconds=0.0), 1, 2.0 + 0.005 + 0.0005, id="no time hides the copies"),
        # The weight of a copy out alone.
        pytest.param(line([block(10, [0], [1], dies_after=5), block(10, [3], [4])], 10), 1, 6.0 + 0.005, id="it only dies"),
        # Blocks that are alike are one class, but each of the four pays 0.05 s of latency beside the 0.1 s for its byte.
        pytest.param(
            line([block(1, [0], [5])] * 4 + [block(4, [2], [3])], 4, latency=0.05), 4, 6.0 + 4 * 0.15 * 0.0055, id="latencies"
        ),
        # The block leaves twice and is copied out once; and not at all if nothing ever writes it.
        pytest.param(
            line([block(10, [0], [5, 10]), MIDDLE, block(10, [7], [8])], 10, stages=11), 2, 11.0 + 0.005 + 0.001, id="twice"
        ),
        pytest.param(
            line([block(10, [], [0, 5, 10], "parameter"), MIDDLE, block(10, [7], [8])], 10, stages=11), 2, 11.001, id="clean"
        ),
    ],
)
def test_objectives_worked_out_by_hand(problem: Problem, away: int, seconds: float) -> None:
    found = solved(problem)
    assert len(found.tiers) == away and set(found.tiers.values()) <= {"storage"}
    assert found.report.objective_seconds == pytest.approx(seconds)
    if away == 1:
        assert found.tiers == {0: "storage"}


# -- coarse time


@given(problems(most_stages=30), st.integers(1, 12))
def test_segments_cover_all_stages_and_a_block_is_idle_at_the_peaks_within_its_period(
    case: tuple[Trace, Budgets], most: int
) -> None:
    problem = Problem.of(*case)
    segments, stages = segments_of(problem, most), problem.stage_count
    grid = SegmentGrid(segments)
    assert [stage for segment in segments for stage in range(segment.first, segment.last + 1)] == list(range(stages))
    assert all(problem.live_bytes[s.peak] == max(problem.live_bytes[s.first : s.last + 1]) for s in segments)
    for period in problem.periods:
        idle = range(grid.end_of(period.after) + 1, grid.start_of(period.before))
        peaks = [segments[k % len(segments)].peak + k // len(segments) * stages for k in range(2 * len(segments))]
        assert list(idle) == [k for k, peak in enumerate(peaks) if period.after < peak < period.before]


def test_like_subgroups_are_one_class_that_gives_what_each_apart_gives() -> None:
    """Nine updates in three segments. What they move and the host computes takes longer than the rest, so that not all pay."""
    count = 9
    blocks = [each for i in range(count) for each in trained((4, 4, 16), [0, 1], 1, 2 + i)]
    updates = [subgroup(2 + i, range(3 * i, 3 * i + 3), host=1.5) for i in range(count)]
    made = trace(staged("fb" + "o" * count, 2.0), blocks, hardware(host=True, rate=10.0), subgroups=updates)
    problem = Problem.of(made, Budgets(device_bytes=120, host_bytes=210))

    def program(apart: bool) -> CoarseModel:
        coarse = Resolution(max_segments=4, window=4)
        return coarse_program(problem, coarse, made.subgroups, write_weight=0.0, apart=apart)

    each, together = (solve(program(apart), relaxed=True, vertex=True, settings=EXACT) for apart in (True, False))
    assert len(program(False).updates) < len(program(True).updates) == count
    assert together.report.bound_seconds == pytest.approx(each.report.bound_seconds)
    assert len(together.on_host) == len(each.on_host)


@pytest.mark.parametrize("most", [12, 24])
def test_no_segment_has_stages_of_the_step_and_others(most: int) -> None:
    """Else updates on the host would begin in the backward pass. Borders between other phases are too many here."""
    problem = Problem.of(microbatches(8, user=True), Budgets(device_bytes=1000))
    stages = problem.trace.stages
    for segment in segments_of(problem, most):
        phases = {stage.phase for stage in stages[segment.first : segment.last + 1]}
        assert len(phases) == 1 or "optimizer" not in phases


def test_a_long_iteration_gets_a_relaxed_solution_and_then_a_whole_one() -> None:
    made = transformer_trace(layers=9, stages_per_layer=4, rate=2e9)
    assert len(made.stages) > 64
    problem = Problem.of(made, Budgets(device_bytes=max(live_bytes(made)) // 2))
    relaxed, whole = coarse_solutions(problem, SolverSettings())
    assert relaxed.report.bound_seconds is not None and whole.report.objective_seconds is not None
    assert relaxed.report.objective_seconds is None
    assert whole.report.bound_seconds == relaxed.report.bound_seconds <= whole.report.objective_seconds * (1 + 1e-6)
    assert whole.report.status == "feasible" and whole.report.gap is not None and whole.report.gap < 0.05
    (draft,) = coarse_solutions(problem, SolverSettings(), reserve_bytes=0)
    assert draft.report.bound_seconds == pytest.approx(relaxed.report.bound_seconds)


def test_where_blocks_are_large_a_relaxed_solution_leaves_room_for_one() -> None:
    """Otherwise no whole block finds room to come in before the stage that uses it. Drafts take this solution at once.

    To let such blocks stay or leave one by one makes up for some of it.
    """
    made = transformer_trace(layers=22, stages_per_layer=1, rate=2e9)
    problem = Problem.of(made, Budgets(device_bytes=max(live_bytes(made)) // 5))
    full, _, roomy, whole = coarse_solutions(problem, SolverSettings())
    (draft,) = coarse_solutions(problem, SolverSettings(), reserve_bytes=room_bytes(problem))
    assert full.report.bound_seconds is not None and roomy.report.bound_seconds is not None
    assert full.report.bound_seconds < roomy.report.bound_seconds == whole.report.bound_seconds == draft.report.bound_seconds

    def seconds(solution: CoarseSolution) -> float:
        return min(
            each.timeline.iteration_seconds
            for each in exact_candidates(*start_of(problem, solution.tiers, solution.on_host), 0.0)
        )

    assert seconds(roomy) < seconds(full)
    made = min(exact_candidates(*start_of(problem, full.tiers, full.on_host), 0.0), key=lambda each: each.cost)
    assert with_other_large_blocks(made).cost < made.cost


def test_a_search_that_ends_early_is_followed_by_the_relaxed_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its solution has not been proved to be the best."""
    # Read twice: whether it has run at all, and how it ended.
    real, ends = highspy.Highs.getModelStatus, iter([highspy.HighsModelStatus.kTimeLimit] * 2)
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda solver: next(ends, None) or real(solver))
    whole, relaxed = coarse_solutions(line([FIRST, MIDDLE], 10), EXACT)
    assert (whole.report.status, relaxed.report.status) == ("feasible", "feasible")
    assert whole.report.objective_seconds is not None and relaxed.report.objective_seconds is None
    assert whole.tiers == relaxed.tiers == {0: "storage"}


def test_what_a_re_run_reads_is_not_away() -> None:
    """The weight is idle between forward stage 0 and backward stage 3, where group 0 reads it."""
    made = layers(2, rate=1.0)
    weight = made.blocks[2].model_copy(update={"reads": (0, 1)})
    made = made.model_copy(update={"blocks": (*made.blocks[:2], weight)})
    problem = Problem.of(made, Budgets(device_bytes=31))
    model = coarse_program(problem, Resolution(max_segments=64, window=6), (), write_weight=0.005, places=RerunPlaces(made))
    program = model.program
    (number,) = [n for n, each in enumerate(model.reruns) if each.groups == (0,)]
    end = model.reruns[number].end
    around = [entry for entry in model.periods if 2 in entry.block_class.blocks and entry.period.begin < end < entry.period.end]
    assert around
    absent = [term for entry in around for term in entry.absent(end - entry.period.begin - 1)]
    program.minimise([(variable, -10_000 * factor) for variable, factor in absent])  # the more is away, the better

    def away() -> float:
        values = solve_program(program, SolverSettings(), linear=True).values
        return sum(factor * values[variable] for variable, factor in absent)

    assert away() == pytest.approx(1.0)
    program.lower[model.again[number]] = 1.0
    assert away() == pytest.approx(0.0, abs=1e-6)
