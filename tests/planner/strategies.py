"""Random traces, budgets and plans, and a trace in the shape of a transformer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Plan, Timeline, Trace, floor, simulate
from planner.ilp import in_order_of_need
from planner.problem import Decision, Decisions, Problem, TierCapacity, build_plan, host_start, host_updatable, live_bytes
from planner.schedule import evict_furthest

KINDS = ("parameter", "gradient", "optimizer_state", "activation", "buffer")


def hardware(
    *, host: bool = False, rate: float = 100.0, latency: float = 0.0, drive: float = 0.0, bus: float = 0.0
) -> dict[str, Any]:
    """Links device <-> storage at `rate` bytes per second, and device <-> host at four times that.

    drive: what both directions to storage share, in `rate`; bus: what both links out share, and both in; 0: nothing.
    """
    pairs = [("device", "storage", rate), ("storage", "device", rate)]
    if host:
        pairs += [("device", "host", 4 * rate), ("host", "device", 4 * rate)]
    return {
        "name": "made up",
        "device_memory_bytes": 10**9,
        "links": [{"from": a, "to": b, "bytes_per_second": r, "latency_seconds": latency} for a, b, r in pairs],
        "shared": shared_rates(host=host, drive=drive * rate, bus=bus * rate),
    }


def shared_rates(*, host: bool, drive: float, bus: float) -> list[dict[str, Any]]:
    """Shared rates of the drive and the bus, in bytes per second; 0: not shared."""
    shared = []
    if drive:
        shared.append({"name": "drive", "links": ["device->storage", "storage->device"], "bytes_per_second": drive})
    if bus and host:
        shared += [
            {"name": f"bus {way}", "links": [way.replace("*", "host"), way.replace("*", "storage")], "bytes_per_second": bus}
            for way in ("device->*", "*->device")
        ]
    return shared


def activation(number: int, size: int, reads: list[int], writes: list[int], *, persistent: bool = False) -> dict[str, Any]:
    """An activation of a hand-made trace."""
    return {
        "id": number,
        "name": f"b{number}",
        "kind": "activation",
        "size_bytes": size,
        "persistent": persistent,
        "reads": reads,
        "writes": writes,
    }


@st.composite
def traces(draw: st.DrawFn, *, most_stages: int = 12, most_blocks: int = 14) -> Trace:
    """Any valid trace with links to storage, sometimes to host too."""
    count = draw(st.integers(1, most_stages))
    seconds = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])
    stages = [
        {
            "id": number,
            "name": f"stage{number}",
            "phase": draw(st.sampled_from(["forward", "backward", "optimizer", "user"])),
            "duration_seconds": draw(seconds),
            "workspace_bytes": draw(st.sampled_from([0, 0, 7, 30])),
        }
        for number in range(count)
    ]
    stage_sets = st.lists(st.integers(0, count - 1), max_size=4, unique=True).map(sorted)
    blocks: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, most_blocks))):
        reads, writes = draw(stage_sets), draw(stage_sets)
        if not reads and not writes:
            continue
        number, last, persistent = len(blocks), max(reads + writes), draw(st.booleans())
        outlives = not persistent and last + 1 < count and draw(st.booleans())
        blocks.append(
            {
                "id": number,
                "name": f"block{number}",
                "kind": draw(st.sampled_from(KINDS)),
                "size_bytes": draw(st.integers(0, 60)),
                "persistent": persistent,
                "reads": reads,
                "writes": writes,
                "movable": draw(st.integers(0, 5)) > 0,
                "dies_after": draw(st.integers(last + 1, count - 1)) if outlives else None,
            }
        )
    machine = hardware(
        host=draw(st.booleans()),
        latency=draw(st.sampled_from([0.0, 0.05])),
        drive=draw(st.sampled_from([0.0, 0.0, 0.5, 1.2])),
        bus=draw(st.sampled_from([0.0, 0.0, 0.8, 4.0])),
    )
    return Trace.model_validate({"name": "random", "hardware": machine, "stages": stages, "blocks": blocks})


@st.composite
def problems(draw: st.DrawFn, **sizes: int) -> tuple[Trace, Budgets]:
    """A trace and a device budget between its floor and what it needs to move nothing."""
    trace = draw(traces(**sizes))
    smallest, _ = floor(trace)
    return trace, Budgets(device_bytes=draw(st.integers(smallest, max(live_bytes(trace)))))


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
    names = [f"forward/{i}" for i in range(layers)] + [f"backward/{i}" for i in reversed(range(layers))]
    names += [f"optimizer/{i}" for i in range(layers)]
    stages: list[dict[str, Any]] = [
        {
            "id": number,
            "name": name,
            "phase": name.split("/")[0],
            "duration_seconds": draw(seconds),
            "workspace_bytes": draw(st.sampled_from([0, 0, 7])),
        }
        for number, name in enumerate(names)
    ]
    blocks: list[dict[str, Any]] = []
    subgroups = []
    for layer, size in enumerate(sizes):
        forward, backward, update = layer, 2 * layers - 1 - layer, 2 * layers + (0 if together else layer)
        movable, accumulates = draw(st.integers(0, 5)) > 0, draw(st.booleans())
        wanted: list[tuple[str, int, bool, list[int], list[int]]] = [
            ("parameter", size, True, sorted({forward, backward, update}), [update]),
            ("gradient", size, False, [update], sorted({backward, 2 * layers - 1} if accumulates else {backward})),
            ("optimizer_state", 2 * size, True, [update], [update]),
            ("activation", draw(st.sampled_from([5, 20])), False, [backward], [forward]),
        ]
        for kind, bytes_, persistent, reads, writes in wanted:
            block = {"id": len(blocks), "name": f"{kind}.{layer}", "kind": kind, "size_bytes": bytes_}
            dies_after = len(names) - 1 if kept and kind == "gradient" and update < len(names) - 1 else None
            blocks.append(
                {
                    **block,
                    "persistent": persistent,
                    "reads": reads,
                    "writes": writes,
                    "movable": movable,
                    "dies_after": dies_after,
                }
            )
        share = draw(st.sampled_from([1.0, 0.5])) / (layers if together else 1)
        device_seconds = stages[update]["duration_seconds"] * share
        first = 4 * layer
        subgroups.append(
            {
                "id": layer,
                "stage": update,
                "blocks": [first, first + 1, first + 2],
                "elements": size // 4,
                "device_seconds": device_seconds,
                "host_seconds": draw(st.sampled_from([None, 0.1, 0.5, 2.0])),
            }
        )
    machine = hardware(host=True, rate=20.0, drive=draw(st.sampled_from([0.0, 1.2])), bus=draw(st.sampled_from([0.0, 3.0])))
    fields = {"hardware": machine, "stages": stages, "blocks": blocks, "subgroups": subgroups}
    trace = Trace.model_validate({"name": "training", **fields})
    return with_user_code(trace, draw(seconds)) if draw(st.booleans()) else trace


def with_user_code(trace: Trace, seconds: float, phases: Sequence[str] = ("forward", "backward", "optimizer")) -> Trace:
    """Return the trace with a stage of user code before each run of stages of one phase, as recorded traces have."""
    stages: list[dict[str, Any]] = []
    place: list[int] = []
    phase = ""
    for stage in trace.stages:
        if stage.phase != phase and stage.phase in phases:
            stages.append({"id": len(stages), "name": "user", "phase": "user", "duration_seconds": seconds})
        phase = stage.phase
        place.append(len(stages))
        stages.append({**stage.model_dump(), "id": len(stages)})
    blocks = [
        {
            **b.model_dump(),
            "reads": [place[s] for s in b.reads],
            "writes": [place[s] for s in b.writes],
            "dies_after": None if b.dies_after is None else place[b.dies_after],
        }
        for b in trace.blocks
    ]
    subgroups = [{**subgroup.model_dump(), "stage": place[subgroup.stage]} for subgroup in trace.subgroups]
    fields = {"name": trace.name, "hardware": trace.hardware, "stages": stages, "blocks": blocks, "subgroups": subgroups}
    return Trace.model_validate(fields)


@st.composite
def training_problems(draw: st.DrawFn, **sizes: int) -> tuple[Trace, Budgets]:
    """A training step, a device budget between its floor and what it needs to move nothing, and sometimes a host budget."""
    trace = draw(trainings(**sizes))
    smallest, _ = floor(trace)
    host = draw(st.sampled_from([None, None, 50, 150]))
    return trace, Budgets(device_bytes=draw(st.integers(smallest, max(live_bytes(trace)))), host_bytes=host)


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


def transformer_trace(
    *,
    layers: int,
    stages_per_layer: int = 6,
    seconds: float = 0.01,
    rate: float = 2e9,
    size: int = 2**24,
    states: bool = False,
) -> Trace:
    """A training step in the shape of a transformer: forward, backward, one optimizer stage per layer.

    Per forward stage: one parameter of `size` bytes and two activations, kept for the backward; per backward
    stage one gradient, used by the layer's optimizer stage. Backward stages take twice `seconds`.
    """
    forward = layers * stages_per_layer
    stages: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []

    def stage(name: str, phase: str, duration: float) -> None:
        stages.append(
            {
                "id": len(stages),
                "name": name,
                "phase": phase,
                "duration_seconds": duration,
                "workspace_bytes": size // 4,
            }
        )

    def block(name: str, kind: str, bytes_: int, persistent: bool, reads: list[int], writes: list[int]) -> None:
        blocks.append(
            {
                "id": len(blocks),
                "name": name,
                "kind": kind,
                "size_bytes": bytes_,
                "persistent": persistent,
                "reads": reads,
                "writes": writes,
            }
        )

    for f in range(forward):
        stage(f"forward/layers.{f // stages_per_layer}.{f % stages_per_layer}", "forward", seconds)
    for f in reversed(range(forward)):
        stage(f"backward/layers.{f // stages_per_layer}.{f % stages_per_layer}", "backward", 2 * seconds)
    for layer in range(layers):
        stage(f"optimizer/{layer}", "optimizer", seconds)
    for f in range(forward):
        b, o = 2 * forward - 1 - f, 2 * forward + f // stages_per_layer
        block(f"parameter.{f}", "parameter", size, True, [f, b, o], [o])
        block(f"gradient.{f}", "gradient", size, False, [o], [b])
        block(f"activation.{f}", "activation", size, False, sorted({f + 1, b}), [f])
        block(f"saved.{f}", "activation", size * 3 // 4, False, [b], [f])
        if states:
            block(f"state.{f}", "optimizer_state", 2 * size, True, [o], [o])
    machine = hardware(rate=rate, latency=1e-4)
    return Trace.model_validate({"name": "transformer", "hardware": machine, "stages": stages, "blocks": blocks})
