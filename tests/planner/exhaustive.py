"""Small random problems, and the best plan of each, found by trying every combination of decisions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations_with_replacement, permutations, product
from math import prod

from planner import BudgetError, Budgets, InfeasiblePlanError, PlanError, Recompute, Trace, floor, recomputed, simulate
from planner.problem import Decision, Decisions, Problem, build_plan, host_updatable, live_bytes

from .traces import IN, OUT, Entry, block, group, links, shared_rate, staged, subgroup, trace, trained, with_user_code


def small_problem(rng: random.Random, *, most_combinations: int) -> Problem:
    """Return a problem with 3 to 7 stages, 2 to 5 blocks and one or two lower tiers.

    Some block must move, and there are at most `most_combinations` of decisions.
    """
    return _small_enough(rng, _small_trace, lambda problem: [problem], most_combinations)


def small_training(rng: random.Random, *, most_combinations: int) -> Problem:
    """Return a problem with one or two layers whose subgroups can update on the host, and few enough decisions to try all."""
    return _small_enough(rng, _training_trace, placements, most_combinations)


def _small_enough(
    rng: random.Random,
    make: Callable[[random.Random], Trace],
    variants: Callable[[Problem], Iterable[Problem]],
    most_combinations: int,
) -> Problem:
    """Make traces until some block must move and there are few enough decisions, over all `variants` of the problem."""
    while True:
        made = make(rng)
        smallest, most = floor(made)[0], max(live_bytes(made))
        if smallest >= most:
            continue
        problem = Problem.of(made, Budgets(device_bytes=rng.randint(smallest, most - 1)))
        if sum(prod(len(options) for options in _options(each)) for each in variants(problem)) <= most_combinations:
            return problem


def placements(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with every choice and order of subgroups that update on the host."""
    updatable = [each.id for each in host_updatable(problem.source)]
    for count in range(len(updatable) + 1):
        for on_host in permutations(updatable, count):
            yield Problem.of(problem.source, problem.budgets, on_host)


def small_with_groups(rng: random.Random, *, most_combinations: int) -> Problem:
    """Return a problem with two or three forward stages, most of which can run again, and few enough decisions to try all."""
    return _small_enough(rng, _trace_with_groups, recomputations, most_combinations)


def recomputations(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with every choice, place and order of groups that run again, and with every placement of updates."""
    source = problem.source
    groups = [each.id for each in source.recompute]
    backward = [stage.id for stage in source.stages if stage.phase == "backward"]
    for count in range(len(groups) + 1):
        for chosen in permutations(groups, count):
            for places in combinations_with_replacement(backward, count):
                again = [Recompute(group=one, at=at) for one, at in zip(chosen, places, strict=True)]
                try:
                    yield from placements(Problem.of(recomputed(source, again), problem.budgets))
                except (PlanError, BudgetError):
                    continue


def _trace_with_groups(rng: random.Random) -> Trace:
    forward = rng.choice([2, 2, 3])
    count = 2 * forward
    phases = "f" * forward + "b" * forward + "o" * (rng.random() < 0.4)
    costs = [(rng.choice([0.3, 1.0, 1.0, 2.0]), rng.choice([0, 0, 5])) for _ in phases]
    stages = staged(phases, [seconds for seconds, _ in costs], {n: size for n, (_, size) in enumerate(costs)})
    blocks: list[Entry] = []
    for stage in range(forward):
        for _ in range(rng.choice([1, 1, 2])):
            again = rng.sample(range(forward, count), rng.choice([1, 1, 2]))
            dies = {"dies_after": count - 1} if max(again) < count - 1 and rng.random() < 0.2 else {}
            onward = [stage + 1] if stage + 1 < forward and rng.random() < 0.6 else []
            blocks.append(block(rng.choice([5, 10, 10, 20]), [stage], onward + again, **dies))
    subgroups: list[Entry] = []
    if rng.random() < 0.6:
        readers = [rng.randrange(forward), rng.randrange(count)]
        if len(phases) > count:
            first = len(blocks)
            blocks += trained((10, 5, 10), readers, count - 1, count)
            subgroups.append(subgroup(count, range(first, first + 3), costs[count][0], rng.choice([0.2, 1.0])))
        else:
            blocks.append(block(10, [], readers, "parameter"))
    groups = []
    for stage in range(forward):
        made = [n for n, each in enumerate(blocks) if each["writes"] == [stage] and not each["persistent"]]
        reads = [n for n, each in enumerate(blocks) if stage in each["reads"]]
        if rng.random() < 0.8:
            groups.append(group(stage, made, reads, costs[stage][0], rng.choice([0, 3])))
    rates = {OUT: rng.choice([2.0, 10.0]), IN: rng.choice([2.0, 10.0])}
    if rng.random() < 0.4:
        rates |= {"device->host": 10.0, "host->device": 10.0}
    return trace(stages, blocks, links(rates), subgroups=subgroups, recompute=groups)


def _training_trace(rng: random.Random) -> Trace:
    layers = rng.choice([1, 1, 2])
    phases = "f" * layers + "b" * layers + "o" * layers
    costs = [(rng.choice([0.5, 1.0, 2.0]), rng.choice([0, 0, 5, 20])) for _ in phases]
    stages = staged(phases, [seconds for seconds, _ in costs], {n: size for n, (_, size) in enumerate(costs)})
    blocks: list[Entry] = []
    subgroups = []
    for layer in range(layers):
        uses, update = {layer, rng.choice([layer, 2 * layers - 1 - layer])}, 2 * layers + layer
        size, end = rng.choice([5, 10]), len(phases) - 1
        outlives = {"dies_after": end} if update < end and rng.random() < 0.5 else {}
        first = len(blocks)
        blocks += trained((size, size, 2 * size), uses, 2 * layers - 1 - layer, update, **outlives)
        times = costs[update][0] * rng.choice([0.5, 1.0]), rng.choice([0.2, 1.0, 3.0])
        subgroups.append(subgroup(update, range(first, first + 3), *times))
    latency = rng.choice([0.0, 0.1])
    rates = {"device->host": 20.0, "host->device": rng.choice([10.0, 20.0])}
    bus = [shared_rate("bus", 20.0, *rates)] if rng.random() < 0.3 else []
    made = trace(stages, blocks, links(rates, latency=latency, shared=bus), subgroups=subgroups)
    # One stage of user code only: each one multiplies the decisions.
    return with_user_code(made, 0.1, [rng.choice(["forward", "optimizer"])]) if rng.random() < 0.8 else made


def _small_trace(rng: random.Random) -> Trace:
    count = rng.randint(3, 7)
    user_code = rng.random() < 0.5
    rates = {OUT: 10.0, IN: rng.choice([10.0, 20.0])}
    if rng.random() < 0.3:
        rates |= {"device->host": 20.0, "host->device": rng.choice([10.0, 30.0])}
    latency, drive = rng.choice([0.0, 0.0, 0.1]), rng.choice([8.0, 15.0])
    costs = [
        ("u" if user_code and rng.random() < 0.4 else "f", rng.choice([0.0, 0.3, 1.0, 1.0, 2.0]), rng.choice([0, 0, 5]))
        for _ in range(count)
    ]
    stages = staged(
        [phase for phase, _, _ in costs], [each for _, each, _ in costs], {n: size for n, (_, _, size) in enumerate(costs)}
    )
    blocks = [_block(rng, count) for _ in range(rng.randint(2, 5))]
    shared = [shared_rate("drive", drive, OUT, IN)] if rng.random() < 0.3 else []
    return trace(stages, blocks, links(rates, latency=latency, shared=shared))


def _block(rng: random.Random, count: int) -> Entry:
    persistent = rng.random() < 0.4
    uses = sorted(rng.sample(range(count), rng.randint(1 if persistent else 2, min(3, count))))
    writes = [] if persistent and rng.random() < 0.3 else sorted({rng.choice(uses), rng.choice(uses)})
    outlives = not persistent and uses[-1] + 1 < count and rng.random() < 0.3
    kind, size = rng.choice(["activation", "parameter"]), rng.choice([5, 10, 10, 15, 20])
    reads = [use for use in uses if use not in writes or rng.random() < 0.5]
    dies_after = rng.randint(uses[-1] + 1, count - 1) if outlives else None
    return block(size, writes, reads, kind, persistent=persistent, dies_after=dies_after)


def _options(problem: Problem) -> list[list[Decision | None]]:
    """Per period: stay, or every tier × stage to leave after × stage to begin the prefetch at.

    Clean blocks are dropped right away, and what an update on the host needs cannot stay.
    """
    return [
        [None] * (index not in problem.updated)
        + [
            Decision(tier=route.tier, leave=leave, start=start)
            for route in problem.routes_of(index)
            for leave in range(period.after, (period.after if period.read_only else period.last_leave) + 1)
            for start in range(period.before if period.final else leave + 1, period.before + 1)
        ]
        for index, period in enumerate(problem.periods)
    ]


def all_decisions(problem: Problem) -> Iterator[Decisions]:
    """Yield every combination of decisions in which enough blocks move for each stage to fit."""
    budget = problem.budgets.device_bytes
    options = _options(problem)
    around = [problem.covering(stage) for stage in range(problem.stage_count)]
    for moved in product(*([False, True] if choices[0] is None else [True] for choices in options)):
        absent = [sum(problem.periods[index].size_bytes for index in covering if moved[index]) for covering in around]
        if any(live - away > budget for live, away in zip(problem.live_bytes, absent, strict=True)):
            continue
        chosen = [index for index, moves in enumerate(moved) if moves]
        moves = [[choice for choice in options[index] if choice is not None] for index in chosen]
        for combination in product(*moves):
            yield {index: decision for index, decision in zip(chosen, combination, strict=True) if decision is not None}


def best_seconds(problem: Problem) -> float:
    """Return the shortest iteration among all combinations of decisions that the simulator can carry out."""
    best = float("inf")
    seen = set()
    for decisions in all_decisions(problem):
        plan = build_plan(problem, decisions, policy="exhaustive")
        if plan.moves in seen:
            continue  # a clean block is dropped right away, whatever `leave` says
        seen.add(plan.moves)
        try:
            best = min(best, simulate(problem.source, plan).iteration_seconds)
        except InfeasiblePlanError:
            pass
    return best
