"""Small random problems, and the best plan of each by trying every combination of decisions. Loaded by path."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

from planner import Budgets, InfeasiblePlanError, Trace, floor, simulate
from planner.lifetimes import live_bytes
from planner.problem import Decision, Decisions, Problem, build_plan


def small_problem(rng: random.Random, *, most_combinations: int) -> Problem:
    """3 to 7 stages, 2 to 5 blocks, one or two lower tiers; something must move, in few enough ways to try all."""
    while True:
        trace = _small_trace(rng)
        smallest, most = floor(trace)[0], max(live_bytes(trace))
        if smallest >= most:
            continue
        problem = Problem.of(trace, Budgets(device_bytes=rng.randint(smallest, most - 1)))
        if prod(len(options) for options in _options(problem)) <= most_combinations:
            return problem


def _small_trace(rng: random.Random) -> Trace:
    count = rng.randint(3, 7)
    pairs = [("device", "storage", 10.0), ("storage", "device", rng.choice([10.0, 20.0]))]
    if rng.random() < 0.3:
        pairs += [("device", "host", 20.0), ("host", "device", rng.choice([10.0, 30.0]))]
    latency = rng.choice([0.0, 0.0, 0.1])
    links = [{"from": a, "to": b, "bytes_per_second": r, "latency_seconds": latency} for a, b, r in pairs]
    stages = [
        {
            "id": number,
            "name": f"stage{number}",
            "phase": "user",
            "duration_seconds": rng.choice([0.0, 0.3, 1.0, 1.0, 2.0]),
            "workspace_bytes": rng.choice([0, 0, 5]),
        }
        for number in range(count)
    ]
    blocks = [_block(rng, number, count) for number in range(rng.randint(2, 5))]
    machine = {"name": "made up", "device_memory_bytes": 1000, "links": links}
    return Trace.model_validate({"name": "small", "hardware": machine, "stages": stages, "blocks": blocks})


def _block(rng: random.Random, number: int, count: int) -> dict[str, Any]:
    persistent = rng.random() < 0.4
    uses = sorted(rng.sample(range(count), rng.randint(1 if persistent else 2, min(3, count))))
    writes = [] if persistent and rng.random() < 0.3 else sorted({rng.choice(uses), rng.choice(uses)})
    return {
        "id": number,
        "name": f"block{number}",
        "kind": "buffer",
        "size_bytes": rng.choice([5, 10, 10, 15, 20]),
        "persistent": persistent,
        "reads": [use for use in uses if use not in writes or rng.random() < 0.5],
        "writes": writes,
    }


def _options(problem: Problem) -> list[list[Decision | None]]:
    """Per period: stay, or every tier × stage to leave after × stage to begin the prefetch at."""
    return [
        [None]
        + [
            Decision(tier=route.tier, leave=leave, start=start)
            for route in problem.routes
            for leave in range(period.after, period.before)
            for start in range(leave + 1, period.before + 1)
        ]
        for period in problem.periods
    ]


def all_decisions(problem: Problem) -> Iterator[Decisions]:
    """Every combination of decisions that leaves enough periods to the lower tiers for each stage to fit."""
    budget = problem.budgets.device_bytes
    options = _options(problem)
    for moved in product([False, True], repeat=len(options)):
        absent = [
            sum(problem.periods[index].size_bytes for index in covering if moved[index])
            for covering in problem.covering
        ]
        if any(live - away > budget for live, away in zip(problem.live_bytes, absent, strict=True)):
            continue
        chosen = [index for index, moves in enumerate(moved) if moves]
        for combination in product(*(options[index][1:] for index in chosen)):
            yield {
                index: decision
                for index, decision in zip(chosen, combination, strict=True)
                if decision is not None
            }


def best_seconds(problem: Problem) -> float:
    """The shortest iteration over all combinations of decisions that the simulator can carry out."""
    best = float("inf")
    seen = set()
    for decisions in all_decisions(problem):
        plan = build_plan(problem, decisions, policy="exhaustive")
        if plan.moves in seen:
            continue  # a clean block is dropped right away, whatever `leave` says
        seen.add(plan.moves)
        try:
            best = min(best, simulate(problem.trace, plan).iteration_seconds)
        except InfeasiblePlanError:
            pass
    return best
