"""Small random problems, and the best plan of each, found by trying every combination of decisions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations_with_replacement, permutations, product
from math import prod
from typing import Any

from planner import BudgetError, Budgets, InfeasiblePlanError, PlanError, Recompute, Trace, floor, recomputed, simulate
from planner.problem import Decision, Decisions, Problem, build_plan, host_updatable, live_bytes

from .strategies import with_user_code


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
        trace = make(rng)
        smallest, most = floor(trace)[0], max(live_bytes(trace))
        if smallest >= most:
            continue
        problem = Problem.of(trace, Budgets(device_bytes=rng.randint(smallest, most - 1)))
        if sum(prod(len(options) for options in _options(each)) for each in variants(problem)) <= most_combinations:
            return problem


def placements(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with every choice and order of subgroups that update on the host."""
    updatable = [subgroup.id for subgroup in host_updatable(problem.source)]
    for count in range(len(updatable) + 1):
        for on_host in permutations(updatable, count):
            yield Problem.of(problem.source, problem.budgets, on_host)


def small_with_groups(rng: random.Random, *, most_combinations: int) -> Problem:
    """Return a problem with two or three forward stages, most of which can run again, and few enough decisions to try all."""
    return _small_enough(rng, _trace_with_groups, recomputations, most_combinations)


def recomputations(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with every choice, place and order of groups that run again, and with every placement of updates."""
    trace = problem.source
    groups = [group.id for group in trace.recompute]
    backward = [stage.id for stage in trace.stages if stage.phase == "backward"]
    for count in range(len(groups) + 1):
        for chosen in permutations(groups, count):
            for places in combinations_with_replacement(backward, count):
                again = [Recompute(group=group, at=at) for group, at in zip(chosen, places, strict=True)]
                try:
                    yield from placements(Problem.of(recomputed(trace, again), problem.budgets))
                except (PlanError, BudgetError):
                    continue


def _trace_with_groups(rng: random.Random) -> Trace:
    forward = rng.choice([2, 2, 3])
    count = 2 * forward
    names = ["forward"] * forward + ["backward"] * forward
    if rng.random() < 0.4:
        names.append("optimizer")
    stages = [
        {
            "id": number,
            "name": f"{name}/{number}",
            "phase": name,
            "duration_seconds": rng.choice([0.3, 1.0, 1.0, 2.0]),
            "workspace_bytes": rng.choice([0, 0, 5]),
        }
        for number, name in enumerate(names)
    ]
    blocks: list[dict[str, Any]] = []

    def block(kind: str, size: int, persistent: bool, reads: list[int], writes: list[int], **fields: Any) -> int:
        number = len(blocks)
        shown = {"id": number, "name": f"{kind}{number}", "kind": kind, "size_bytes": size, "persistent": persistent}
        blocks.append({**shown, "reads": sorted(set(reads)), "writes": writes, **fields})
        return number

    for stage in range(forward):
        for _ in range(rng.choice([1, 1, 2])):
            again = rng.sample(range(forward, count), rng.choice([1, 1, 2]))
            dies = {"dies_after": count - 1} if max(again) < count - 1 and rng.random() < 0.2 else {}
            onward = [stage + 1] if stage + 1 < forward and rng.random() < 0.6 else []
            block("activation", rng.choice([5, 10, 10, 20]), False, onward + again, [stage], **dies)
    subgroups: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        update = len(names) - 1 if len(names) > count else None
        readers = sorted({rng.randrange(forward), rng.randrange(count)}) + ([update] if update is not None else [])
        parts = [block("parameter", 10, True, readers, [] if update is None else [update])]
        if update is not None:
            parts.append(block("gradient", 5, False, [update], [count - 1]))
            parts.append(block("optimizer_state", 10, True, [update], [update]))
            times = {"device_seconds": stages[update]["duration_seconds"], "host_seconds": rng.choice([0.2, 1.0])}
            subgroups.append({"id": 0, "stage": update, "blocks": parts, "elements": 1, **times})
    recompute = []
    for stage in range(forward):
        made = [each["id"] for each in blocks if each["writes"] == [stage] and not each["persistent"]]
        reads = [each["id"] for each in blocks if stage in each["reads"]]
        if rng.random() < 0.8:
            extra = {"duration_seconds": stages[stage]["duration_seconds"], "workspace_bytes": rng.choice([0, 3])}
            recompute.append({"id": len(recompute), "stage": stage, "blocks": made, "reads": reads, **extra})
    pairs = [("device", "storage", rng.choice([2.0, 10.0])), ("storage", "device", rng.choice([2.0, 10.0]))]
    if rng.random() < 0.4:
        pairs += [("device", "host", 10.0), ("host", "device", 10.0)]
    links = [{"from": a, "to": b, "bytes_per_second": r, "latency_seconds": 0.0} for a, b, r in pairs]
    machine = {"name": "made up", "device_memory_bytes": 1000, "links": links}
    fields = {"hardware": machine, "stages": stages, "blocks": blocks, "recompute": recompute, "subgroups": subgroups}
    return Trace.model_validate({"name": "small with groups", **fields})


def _training_trace(rng: random.Random) -> Trace:
    layers = rng.choice([1, 1, 2])
    names = [f"forward/{i}" for i in range(layers)] + [f"backward/{i}" for i in reversed(range(layers))]
    names += [f"optimizer/{i}" for i in range(layers)]
    stages = [
        {
            "id": number,
            "name": name,
            "phase": name.split("/")[0],
            "duration_seconds": rng.choice([0.5, 1.0, 2.0]),
            "workspace_bytes": rng.choice([0, 0, 5, 20]),
        }
        for number, name in enumerate(names)
    ]
    blocks: list[dict[str, Any]] = []
    subgroups = []
    for layer in range(layers):
        uses = sorted({layer, rng.choice([layer, 2 * layers - 1 - layer]), 2 * layers + layer})
        size, update, end = rng.choice([5, 10]), uses[-1], len(names) - 1
        dies_after = end if update < end and rng.random() < 0.5 else None
        parts: list[tuple[str, int, bool, list[int], list[int]]] = [
            ("parameter", size, True, uses, [update]),
            ("gradient", size, False, [update], [2 * layers - 1 - layer]),
            ("optimizer_state", 2 * size, True, [update], [update]),
        ]
        first = len(blocks)
        for kind, bytes_, persistent, reads, writes in parts:
            block = {"id": len(blocks), "name": kind, "kind": kind, "size_bytes": bytes_, "persistent": persistent}
            outlives = {"dies_after": dies_after} if kind == "gradient" else {}
            blocks.append({**block, "reads": reads, "writes": writes, **outlives})
        share = stages[update]["duration_seconds"] * rng.choice([0.5, 1.0])
        times = {"device_seconds": share, "host_seconds": rng.choice([0.2, 1.0, 3.0])}
        subgroups.append({"id": layer, "stage": update, "blocks": [first, first + 1, first + 2], "elements": 1, **times})
    latency = rng.choice([0.0, 0.1])
    pairs = [("device", "host", 20.0), ("host", "device", rng.choice([10.0, 20.0]))]
    links = [{"from": a, "to": b, "bytes_per_second": r, "latency_seconds": latency} for a, b, r in pairs]
    machine: dict[str, Any] = {"name": "made up", "device_memory_bytes": 1000, "links": links}
    if rng.random() < 0.3:
        machine["shared"] = [{"name": "bus", "links": ["device->host", "host->device"], "bytes_per_second": 20.0}]
    fields = {"hardware": machine, "stages": stages, "blocks": blocks, "subgroups": subgroups}
    trace = Trace.model_validate({"name": "small training", **fields})
    # One stage of user code only: each one multiplies the decisions.
    return with_user_code(trace, 0.1, [rng.choice(["forward", "optimizer"])]) if rng.random() < 0.8 else trace


def _small_trace(rng: random.Random) -> Trace:
    count = rng.randint(3, 7)
    user_code = rng.random() < 0.5
    pairs = [("device", "storage", 10.0), ("storage", "device", rng.choice([10.0, 20.0]))]
    if rng.random() < 0.3:
        pairs += [("device", "host", 20.0), ("host", "device", rng.choice([10.0, 30.0]))]
    latency = rng.choice([0.0, 0.0, 0.1])
    links = [{"from": a, "to": b, "bytes_per_second": r, "latency_seconds": latency} for a, b, r in pairs]
    shared = [{"name": "drive", "links": ["device->storage", "storage->device"], "bytes_per_second": rng.choice([8.0, 15.0])}]
    stages = [
        {
            "id": number,
            "name": f"stage{number}",
            "phase": "user" if user_code and rng.random() < 0.4 else "forward",
            "duration_seconds": rng.choice([0.0, 0.3, 1.0, 1.0, 2.0]),
            "workspace_bytes": rng.choice([0, 0, 5]),
        }
        for number in range(count)
    ]
    blocks = [_block(rng, number, count) for number in range(rng.randint(2, 5))]
    machine = {"name": "made up", "device_memory_bytes": 1000, "links": links}
    if rng.random() < 0.3:
        machine["shared"] = shared
    return Trace.model_validate({"name": "small", "hardware": machine, "stages": stages, "blocks": blocks})


def _block(rng: random.Random, number: int, count: int) -> dict[str, Any]:
    persistent = rng.random() < 0.4
    uses = sorted(rng.sample(range(count), rng.randint(1 if persistent else 2, min(3, count))))
    writes = [] if persistent and rng.random() < 0.3 else sorted({rng.choice(uses), rng.choice(uses)})
    outlives = not persistent and uses[-1] + 1 < count and rng.random() < 0.3
    return {
        "id": number,
        "name": f"block{number}",
        "kind": rng.choice(["activation", "parameter"]),
        "size_bytes": rng.choice([5, 10, 10, 15, 20]),
        "persistent": persistent,
        "reads": [use for use in uses if use not in writes or rng.random() < 0.5],
        "writes": writes,
        "dies_after": rng.randint(uses[-1] + 1, count - 1) if outlives else None,
    }


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
    for moved in product(*([False, True] if choices[0] is None else [True] for choices in options)):
        absent = [sum(problem.periods[index].size_bytes for index in covering if moved[index]) for covering in problem.covering]
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
