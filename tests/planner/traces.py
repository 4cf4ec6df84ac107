"""Traces and plans in few words. Ids are positions; what is not said has the plainest value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from planner import Budgets, Plan, Timeline, Trace, simulate

HAND = Path(__file__).parents[2] / "traces" / "hand"
OUT, IN = "device->storage", "storage->device"
PHASES = {"f": "forward", "b": "backward", "o": "optimizer", "u": "user"}

Entry = dict[str, Any]


def hand(name: str) -> Trace:
    """Return a hand-made trace, see `traces/README.md`."""
    return Trace.load(HAND / f"{name}.json")


# -- machines


def links(rates: Mapping[str, float], *, latency: float = 0.0, shared: Iterable[Entry] = ()) -> Entry:
    """Hardware with these rates of links such as "device->host", in bytes per second."""
    listed = [
        dict(zip(("from", "to"), name.split("->"), strict=True), bytes_per_second=rate, latency_seconds=latency)
        for name, rate in rates.items()
    ]
    return {"name": "made up", "device_memory_bytes": 10**9, "links": listed, "shared": list(shared)}


def hardware(*, host: bool = False, rate: float = 100.0, latency: float = 0.0, drive: float = 0.0, bus: float = 0.0) -> Entry:
    """Links device <-> storage at `rate` bytes per second, and device <-> host at four times that.

    drive: what both directions to storage share, in `rate`; bus: what both links out share, and both in; 0: nothing.
    """
    rates = {OUT: rate, IN: rate} | ({"device->host": 4 * rate, "host->device": 4 * rate} if host else {})
    shared = [shared_rate("drive", drive * rate, OUT, IN)] * bool(drive)
    if bus and host:
        shared.append(shared_rate("bus device->*", bus * rate, "device->host", OUT))
        shared.append(shared_rate("bus *->device", bus * rate, "host->device", IN))
    return links(rates, latency=latency, shared=shared)


def shared_rate(name: str, rate: float, *of: str) -> Entry:
    return {"name": name, "links": list(of), "bytes_per_second": rate}


# -- traces


def staged(
    names: Iterable[str], seconds: float | Sequence[float] = 1.0, workspaces: Mapping[int, int] | None = None
) -> list[Entry]:
    """Stages by the first letters of their phases ("ffbo"), or by names that begin with them ("forward/0").

    seconds: of all, or of each. workspaces: in bytes, by number.
    """
    return [
        {
            "name": f"s{number}" if name in PHASES else name,
            "phase": PHASES.get(name, name.split("/")[0]),
            "duration_seconds": seconds if isinstance(seconds, float | int) else seconds[number],
            "workspace_bytes": (workspaces or {}).get(number, 0),
        }
        for number, name in enumerate(names)
    ]


def block(size: int, writes: Iterable[int] = (), reads: Iterable[int] = (), kind: str = "activation", **more: Any) -> Entry:
    """A block. Parameters and optimizer states persist, unless `more` says otherwise."""
    persistent = kind in ("parameter", "optimizer_state")
    uses = {"reads": sorted(set(reads)), "writes": sorted(set(writes))}
    return {"kind": kind, "size_bytes": size, "persistent": persistent, **uses, **more}


def trained(sizes: tuple[int, int, int], uses: Iterable[int], born: int, update: int, **gradient: Any) -> list[Entry]:
    """Parameter, gradient and states of a subgroup that is updated in one stage. gradient: more of that block."""
    parameter, of_gradient, states = sizes
    return [
        block(parameter, [update], [*uses, update], "parameter", name="parameter"),
        block(of_gradient, [born], [update], "gradient", name="gradient", **gradient),
        block(states, [update], [update], "optimizer_state", name="state"),
    ]


def subgroup(stage: int, blocks: Iterable[int], device: float = 1.0, host: float | None = 1.0, elements: int = 1) -> Entry:
    """A subgroup. device, host: seconds of its update; None where it cannot run there."""
    times = {"device_seconds": device, "host_seconds": host}
    return {"stage": stage, "blocks": list(blocks), "elements": elements, **times}


def group(stage: int, blocks: Iterable[int], reads: Iterable[int] = (), seconds: float = 1.0, workspace: int = 0) -> Entry:
    """A recompute group."""
    costs = {"duration_seconds": seconds, "workspace_bytes": workspace}
    return {"stage": stage, "blocks": list(blocks), "reads": list(reads), **costs}


def numbered(entries: Iterable[Entry], letter: str = "") -> list[Entry]:
    """Give entries ids, and a name by `letter`, where they have none."""
    return [{"id": n, **({"name": f"{letter}{n}"} if letter else {}), **entry} for n, entry in enumerate(entries)]


def trace(
    stages: Sequence[Entry],
    blocks: Iterable[Entry] = (),
    machine: Any = None,
    *,
    subgroups: Iterable[Entry] = (),
    recompute: Iterable[Entry] = (),
    name: str = "made",
) -> Trace:
    """A trace of these stages. machine: by default 10 bytes per second to and from storage. Raises TraceError."""
    return Trace.build(
        name=name,
        hardware=hardware(rate=10.0) if machine is None else machine,
        stages=numbered(stages),
        blocks=numbered(blocks, "b"),
        subgroups=numbered(subgroups),
        recompute=numbered(recompute),
    )


def layers(count: int = 3, *, rate: float = 10.0, changed: tuple[int, ...] = ()) -> Trace:
    """A chain of `count` forward stages of 1 s, each of which makes 10 bytes from those of the stage before, and back.

    Backward stage i reads what forward stage i made. Every forward stage is a recompute group with the same number. Block i is
    what stage i makes; the last block is a weight of 10 bytes that all stages read. `changed`: stages that write the weight.
    """
    last = 2 * count - 1
    names = [f"forward/{i}" for i in range(count)] + [f"backward/{i}" for i in reversed(range(count))]
    blocks = [block(10, [i], [i + 1, last - i], name=f"a{i}") for i in range(count)]
    blocks.append(block(10, changed, range(2 * count), "parameter", name="w"))
    groups = [group(i, [i], [i - 1, count] if i else [count], workspace=1) for i in range(count)]
    return trace(staged(names), blocks, hardware(rate=rate), recompute=groups, name="layers")


def saving_layers(count: int) -> Trace:
    """A chain of `count` forward stages of 1 s and back. Each makes 90 bytes for its own backward stage and hands on 10.

    Those are read by the next forward stage and by its backward stage. Every forward stage is a recompute group.
    """
    last = 2 * count - 1
    names = [f"forward/{i}" for i in range(count)] + [f"backward/{i}" for i in reversed(range(count))]
    blocks = [block(90, [i], [last - i], name=f"saved{i}") for i in range(count)]
    blocks += [block(10, [i], [i + 1, last - i - 1], name=f"output{i}") for i in range(count - 1)]
    groups = [group(i, [i, count + i], [count + i - 1] if i else [], workspace=1) for i in range(count - 1)]
    return trace(staged(names), blocks, recompute=groups, name="saving layers")


def varying(traced: Trace, **more: Any) -> Trace:
    """Activations and times are in proportion to the length, 10 at most."""
    sizes = [{"id": each.id, "coefficients": [0, each.size_bytes / 10]} for each in traced.blocks if each.kind == "activation"]
    times = [{"id": stage.id, "coefficients": [0, 1]} for stage in traced.stages]
    lengths = {"lowest": (1,), "highest": (10,), "block_bytes": sizes, "stage_seconds": times, **more}
    return traced.rebuilt(lengths=lengths)


def transformer_trace(*, layers: int, stages_per_layer: int = 6, rate: float = 2e9, states: bool = False) -> Trace:
    """A training step in the shape of a transformer: forward, backward, one optimizer stage per layer.

    Per forward stage, of 10 ms: one parameter of 16 MiB and two activations, kept for the backward; per backward
    stage, of 20 ms, one gradient, used by the layer's optimizer stage.
    """
    size = 2**24
    count = layers * stages_per_layer
    names = [f"layers.{f // stages_per_layer}.{f % stages_per_layer}" for f in range(count)]
    listed = [f"forward/{each}" for each in names] + [f"backward/{each}" for each in reversed(names)]
    listed += [f"optimizer/{layer}" for layer in range(layers)]
    times = [0.01] * count + [0.02] * count + [0.01] * layers
    blocks = []
    for f in range(count):
        b, o = 2 * count - 1 - f, 2 * count + f // stages_per_layer
        blocks += [
            block(size, [o], [f, b, o], "parameter", name=f"parameter.{f}"),
            block(size, [b], [o], "gradient", name=f"gradient.{f}"),
            block(size, [f], [f + 1, b], name=f"activation.{f}"),
            block(size * 3 // 4, [f], [b], name=f"saved.{f}"),
        ]
        blocks += [block(2 * size, [o], [o], "optimizer_state", name=f"state.{f}")] * states
    workspaces = dict.fromkeys(range(len(listed)), size // 4)
    return trace(staged(listed, times, workspaces), blocks, hardware(rate=rate, latency=1e-4), name="transformer")


def microbatches(passes: int, layers: int = 3, *, rate: float = 10.0, user: bool = False) -> Trace:
    """So many passes through a chain of layers, with gradients that add up, and an update of each layer at the end.

    As in `layers`, activations can be made anew. The first pass makes the gradients. user: user code before each pass.
    """
    length = 2 * layers + user
    names = ["user"] * user + [f"forward/{i}" for i in range(layers)] + [f"backward/{i}" for i in reversed(range(layers))]
    listed = [*staged(names * passes), *staged([f"optimizer/{i}" for i in range(layers)])]
    blocks, groups, parameters = [], [], {i: passes * layers + 3 * i for i in range(layers)}
    for start in (number * length + user for number in range(passes)):
        for i in range(layers):
            blocks.append(block(10, [start + i], [start + i + 1, start + 2 * layers - 1 - i], name=f"a{i}"))
            reads = [parameters[i]] + [len(blocks) - 2] * (i > 0)
            groups.append(group(start + i, [len(blocks) - 1], reads))
    for i in range(layers):
        update = passes * length + i
        back = [number * length + user + 2 * layers - 1 - i for number in range(passes)]
        forward = [number * length + user + i for number in range(passes)]
        blocks += [
            block(6, [update], [*forward, *back, update], "parameter", name=f"parameter.{i}"),
            block(6, back, [*back[1:], update], "gradient", name=f"gradient.{i}"),
            block(12, [update], [update], "optimizer_state", name=f"state.{i}"),
        ]
    return trace(listed, blocks, hardware(host=True, rate=rate), recompute=groups, name="microbatches")


def with_user_code(traced: Trace, seconds: float, phases: Sequence[str] = ("forward", "backward", "optimizer")) -> Trace:
    """Return the trace with a stage of user code before each run of stages of one phase, as recorded traces have."""
    listed: list[Entry] = []
    place: list[int] = []
    phase = ""
    for stage in traced.stages:
        if stage.phase != phase and stage.phase in phases:
            listed.append({"name": "user", "phase": "user", "duration_seconds": seconds})
        phase = stage.phase
        place.append(len(listed))
        listed.append(stage.model_dump(exclude={"id"}))
    blocks = [
        {
            **b.model_dump(),
            "reads": [place[s] for s in b.reads],
            "writes": [place[s] for s in b.writes],
            "dies_after": None if b.dies_after is None else place[b.dies_after],
        }
        for b in traced.blocks
    ]
    subgroups = [{**each.model_dump(), "stage": place[each.stage]} for each in traced.subgroups]
    return trace(listed, blocks, traced.hardware, subgroups=subgroups, name=traced.name)


# -- plans


def move(
    block: int,
    after: int,
    before: int,
    start: int | None = None,
    *,
    leave: int | None = None,
    out: bool = True,
    tier: str = "storage",
) -> Entry:
    """A move that copies out after stage `leave` (default: at once) and in from `start` on.

    out: False for a block with a valid copy. start: None for a block that does not come back.
    """
    leave = after if leave is None else leave
    offload = {"start": leave, "free_after": leave} if out else None
    prefetch = None if start is None else {"start": start, "ready_by": before}
    return {"block": block, "after": after, "before": before, "tier": tier, "offload": offload, "prefetch": prefetch}


def by_hand(
    traced: Trace, device: int, moves: Iterable[Entry] = (), *, away: Mapping[int, str] | None = None, **fields: Any
) -> Plan:
    """A plan with these moves. device: its budget in bytes. away: where blocks wait when the iteration begins."""
    budgets = Budgets(device_bytes=device, storage_bytes=fields.pop("storage", None))
    waiting = [{"block": number, "tier": tier} for number, tier in (away or {}).items()]
    content = {"trace_fingerprint": traced.fingerprint, "policy": "by hand", "budgets": budgets, "initial": waiting}
    return Plan.model_validate({**content, "moves": list(moves), **fields})


def updating(phases: str, *, device_seconds: float = 1.0) -> tuple[Trace, Plan]:
    """One subgroup, updated in stage 2, on the host: gradient out 1 s, update 3 s, parameter in 1 s for stage 0."""
    count = len(phases)
    seconds = [device_seconds if number == 2 else 1.0 for number in range(count)]
    machine = hardware(host=True, rate=2.5)
    subgroups = [subgroup(2, range(3), device_seconds, 3.0)]
    made = trace(staged(phases, seconds), trained((10, 10, 10), [0, 1], 1, 2), machine, subgroups=subgroups)
    moves = [move(1, 1, 2, tier="host"), move(0, 1, count, count, out=False, tier="host")]
    return made, by_hand(made, 1000, moves, away={0: "host"}, updates=[{"subgroup": 0, "where": "host"}])


def replay(made: Trace, found: Plan) -> Timeline:
    """Replay a plan: the time must be the predicted one, within the plan's own budgets and above its lower bound."""
    timeline = simulate(made, found)
    assert found.predicted is not None
    assert timeline.iteration_seconds == pytest.approx(found.predicted.iteration_seconds, rel=1e-9)
    assert timeline.iteration_seconds >= found.predicted.lower_bound_seconds * (1 - 1e-9)
    for tier, most in (("device", "device_bytes"), ("host", "host_bytes"), ("storage", "storage_bytes")):
        limit = getattr(found.budgets, most)
        assert limit is None or timeline.peak_bytes[tier] <= limit
    assert {update.subgroup for update in timeline.updates} == {u.subgroup for u in found.updates if u.where == "host"}
    return timeline
