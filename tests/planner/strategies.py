"""Random traces, budgets and plans."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Plan, Timeline, Trace, floor, simulate
from planner.ilp import in_order_of_need
from planner.problem import Decision, Decisions, Problem, TierCapacity, build_plan, host_start, host_updatable, live_bytes
from planner.schedule import evict_furthest

from .traces import Entry, block, hardware, staged, subgroup, trace, trained, with_user_code

KINDS = ("parameter", "gradient", "optimizer_state", "activation", "buffer")


@st.composite
def traces(draw: st.DrawFn, *, most_stages: int = 12, most_blocks: int = 14) -> Trace:
    """Any valid trace with links to storage, sometimes to host too."""
    count = draw(st.integers(1, most_stages))
    seconds = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])
    stages = [
        {
            "name": f"stage{number}",
            "phase": draw(st.sampled_from(["forward", "backward", "optimizer", "user"])),
            "duration_seconds": draw(seconds),
            "workspace_bytes": draw(st.sampled_from([0, 0, 7, 30])),
        }
        for number in range(count)
    ]
    stage_sets = st.lists(st.integers(0, count - 1), max_size=4, unique=True).map(sorted)
    blocks: list[Entry] = []
    for _ in range(draw(st.integers(0, most_blocks))):
        reads, writes = draw(stage_sets), draw(stage_sets)
        if not reads and not writes:
            continue
        last, persistent = max(reads + writes), draw(st.booleans())
        outlives = not persistent and last + 1 < count and draw(st.booleans())
        kind, size, movable = draw(st.sampled_from(KINDS)), draw(st.integers(0, 60)), draw(st.integers(0, 5)) > 0
        dies_after = draw(st.integers(last + 1, count - 1)) if outlives else None
        blocks.append(block(size, writes, reads, kind, persistent=persistent, movable=movable, dies_after=dies_after))
    machine = hardware(
        host=draw(st.booleans()),
        latency=draw(st.sampled_from([0.0, 0.05])),
        drive=draw(st.sampled_from([0.0, 0.0, 0.5, 1.2])),
        bus=draw(st.sampled_from([0.0, 0.0, 0.8, 4.0])),
    )
    return trace(stages, blocks, machine)


@st.composite
def problems(draw: st.DrawFn, **sizes: int) -> tuple[Trace, Budgets]:
    """A trace and a device budget between its floor and what it needs to move nothing."""
    made = draw(traces(**sizes))
    return made, Budgets(device_bytes=draw(st.integers(floor(made)[0], max(live_bytes(made)))))


@st.composite
def trainings(draw: st.DrawFn, *, most_layers: int = 4) -> Trace:
    """A training step with a host tier. Most of its optimizer subgroups can update on the host.

    Per layer a forward and a backward stage; a parameter, a gradient, states and an activation.
    """
    layers = draw(st.integers(1, most_layers))
    seconds = st.sampled_from([0.1, 0.5, 1.0])
    sizes = [draw(st.sampled_from([0, 5, 10, 40])) for _ in range(layers)]
    together = draw(st.booleans())  # all subgroups in one stage
    kept = draw(st.booleans())  # gradients, until all updates are over
    phases = "f" * layers + "b" * layers + "o" * layers
    costs = [(draw(seconds), draw(st.sampled_from([0, 0, 7]))) for _ in phases]
    stages = staged(phases, [each for each, _ in costs], {n: size for n, (_, size) in enumerate(costs)})
    blocks: list[Entry] = []
    subgroups = []
    for layer, size in enumerate(sizes):
        backward, update = 2 * layers - 1 - layer, 2 * layers + (0 if together else layer)
        movable, accumulates = draw(st.integers(0, 5)) > 0, draw(st.booleans())
        activation = block(draw(st.sampled_from([5, 20])), [layer], [backward])
        first = len(blocks)
        blocks += [
            {**each, "movable": movable}
            for each in (*trained((size, size, 2 * size), {layer, backward}, backward, update), activation)
        ]
        if accumulates:
            blocks[first + 1]["writes"] = sorted({backward, 2 * layers - 1})
        if kept and update < 3 * layers - 1:
            blocks[first + 1]["dies_after"] = 3 * layers - 1
        share = draw(st.sampled_from([1.0, 0.5])) / (layers if together else 1)
        times = costs[update][0] * share, draw(st.sampled_from([None, 0.1, 0.5, 2.0]))
        subgroups.append(subgroup(update, range(first, first + 3), *times, elements=size // 4))
    machine = hardware(host=True, rate=20.0, drive=draw(st.sampled_from([0.0, 1.2])), bus=draw(st.sampled_from([0.0, 3.0])))
    made = trace(stages, blocks, machine, subgroups=subgroups)
    return with_user_code(made, draw(seconds)) if draw(st.booleans()) else made


@st.composite
def training_problems(draw: st.DrawFn, **sizes: int) -> tuple[Trace, Budgets]:
    """A training step, a device budget between its floor and what it needs to move nothing, and sometimes a host budget."""
    made = draw(trainings(**sizes))
    host = draw(st.sampled_from([None, None, 50, 150]))
    return made, Budgets(device_bytes=draw(st.integers(floor(made)[0], max(live_bytes(made)))), host_bytes=host)


def random_plan(trace: Trace, budgets: Budgets, rng: random.Random) -> Plan:
    """Return a plan with random moves, starts and tiers that can be carried out.

    Replayed in the simulator before it is returned. Raises BudgetError below the floor.
    """
    plan = build_plan(*random_decisions(trace, budgets, rng), policy="random")
    simulate(trace, plan)
    return plan


def random_decisions(trace: Trace, budgets: Budgets, rng: random.Random) -> tuple[Problem, Decisions]:
    """Return what such a plan carries out: the problem with random updates on the host, and random moves that fit."""
    updatable = [subgroup.id for subgroup in host_updatable(trace)]
    on_host = rng.sample(updatable, rng.randint(0, len(updatable)))
    if budgets.host_bytes is not None:
        on_host = in_order_of_need(Problem.of(trace, budgets), on_host)
        rng.shuffle(on_host)
    problem = Problem.of(trace, budgets, on_host)
    decisions: Decisions = {}
    for index, period in enumerate(problem.periods):
        if index in problem.updated or rng.random() < 0.5:
            leave = rng.randint(period.after, period.last_leave)
            route = rng.choice(problem.routes_of(index))
            if index in problem.updated or TierCapacity(problem, decisions).fits(index, route.tier):
                decisions[index] = Decision(tier=route.tier, leave=leave, start=period.before)
    decisions = evict_furthest(problem, decisions, early=rng.random() < 0.5)
    occupied = problem.occupancy(decisions)
    for index in rng.sample(sorted(decisions), len(decisions)):
        decision, size = decisions[index], problem.periods[index].size_bytes
        start = decision.start
        if problem.periods[index].final:
            continue
        earliest = decision.leave + 1
        if index in problem.updated:  # before, it would hold up what the update's gradients are made from
            earliest = max(earliest, host_start(trace, trace.subgroups[problem.updated[index]]))
        lowest = rng.randint(min(earliest, start), start)
        while start > lowest and occupied[(start - 1) % problem.stage_count] + size <= budgets.device_bytes:
            start -= 1
            occupied[start % problem.stage_count] += size
        decisions[index] = Decision(tier=decision.tier, leave=decision.leave, start=start)
    return problem, decisions


def replay_of_random_plan(trace: Trace, budgets: Budgets, seed: int) -> Timeline | None:
    """Replay a random plan; None where the host tier is too small for it."""
    try:
        return simulate(trace, random_plan(trace, budgets, random.Random(seed)))
    except InfeasiblePlanError:
        assert budgets.host_bytes is not None
        return None
