"""The critical path on traces with a known optimum, and the check that it never has a gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from planner import Budgets, Plan, Trace, floor, plan, simulate
from planner.simulator import STAGES, CriticalPath, critical_path

from ..strategies import activation, hardware, problems, transformer_trace

HAND = Path(__file__).parents[3] / "traces" / "hand"
OUT, IN = "device->storage", "storage->device"


def path_of(trace: Trace, made: Plan) -> CriticalPath:
    """Return the critical path. Check that it fills the iteration without a gap, and that its segments are in the replay."""
    timeline = simulate(trace, made)
    path = critical_path(trace, made, timeline)
    now = 0.0
    for segment in path.segments:
        assert segment.start_seconds == pytest.approx(now, rel=1e-9, abs=1e-9 * timeline.iteration_seconds)
        now = segment.end_seconds
    assert now == pytest.approx(timeline.iteration_seconds, rel=1e-9)
    assert sum(path.seconds().values()) == pytest.approx(timeline.iteration_seconds, rel=1e-9)
    times = {(STAGES, n): (s.start_seconds, s.end_seconds) for n, s in enumerate(timeline.stages)}
    times |= {(t.link, t.move): (t.start_seconds, t.end_seconds) for t in timeline.transfers}
    times |= {("host updates", u.subgroup): (u.start_seconds, u.end_seconds) for u in timeline.updates}
    for segment in path.segments:
        began, ended = times[segment.resource, segment.index]
        assert (segment.start_seconds, segment.end_seconds) == (max(began, 0.0), ended)
    assert (path.segments[-1].resource, path.segments[-1].index) == (STAGES, len(trace.stages) - 1)
    return path


@pytest.mark.parametrize(
    ("name", "budget", "wanted"),
    [
        ("chain", 20, [(STAGES, n) for n in range(6)]),
        ("wrap", 20, [(STAGES, n) for n in range(4)]),
        (
            "chain",
            10,
            [(STAGES, 0), (OUT, 0), (STAGES, 1), (OUT, 1), (STAGES, 2), (STAGES, 3), (IN, 1), (STAGES, 4), (IN, 0), (STAGES, 5)],
        ),
        ("diamond", 20, [(STAGES, 0), (STAGES, 1), (OUT, 1), (STAGES, 2), (IN, 1), (STAGES, 3)]),
        ("clean_and_dirty", 20, [(IN, 1), (STAGES, 0), (STAGES, 1), (STAGES, 2), (STAGES, 3)]),
        ("copy_stays_valid", 15, [(STAGES, 0), (OUT, 0), (STAGES, 1), (IN, 0), (STAGES, 2), (STAGES, 3), (IN, 0), (STAGES, 4)]),
        ("user_code", 20, [(STAGES, n) for n in range(6)]),
        ("swap", 30, [(OUT, 1), (IN, 0), (STAGES, 0), (OUT, 0), (IN, 1), (STAGES, 1)]),
    ],
)
def test_on_the_hand_made_traces(name: str, budget: int, wanted: list[tuple[str, int]]) -> None:
    """Copies are named by their block. In 'swap' a copy in waits for the copy out that makes room for it."""
    trace = Trace.load(HAND / f"{name}.json")
    path = path_of(trace, plan(trace, Budgets(device_bytes=budget), lower_bound=False))
    assert [(p.resource, p.index if p.block is None else p.block) for p in path.segments] == wanted


def made(seconds: list[float], blocks: list[dict[str, Any]], moves: list[dict[str, Any]], device: int) -> tuple[Trace, Plan]:
    """A trace with links of 10 bytes per second, and a plan with just these moves; copies out at once."""
    stages = [
        {"id": number, "name": f"s{number}", "phase": "forward", "duration_seconds": each} for number, each in enumerate(seconds)
    ]
    trace = Trace.model_validate({"name": "made", "hardware": hardware(rate=10.0), "stages": stages, "blocks": blocks})
    laid_out = [
        {
            "block": move["block"],
            "after": move["after"],
            "before": move["before"],
            "tier": "storage",
            "offload": {"start": move["after"], "free_after": move["after"]},
            "prefetch": {"start": move["start"], "ready_by": move["before"]},
        }
        for move in moves
    ]
    return trace, plan_of(trace, laid_out, device)


def plan_of(trace: Trace, moves: list[dict[str, Any]], device: int, **more: object) -> Plan:
    content = {"trace_fingerprint": trace.fingerprint, "policy": "by hand", "budgets": {"device_bytes": device}}
    return Plan.model_validate({**content, "moves": moves, **more})


def test_a_copy_waits_for_the_one_before_it_on_the_link() -> None:
    """Two blocks go out after stage 0, 1 s each on one link; stage 1 has room only when both are gone."""
    blocks = [activation(0, 10, [2], [0]), activation(1, 10, [2], [0]), activation(2, 20, [1], [1])]
    moves = [dict(block=number, after=0, before=2, start=2) for number in (0, 1)]
    path = path_of(*made([1.0, 1.0, 1.0], blocks, moves, 20))
    assert [(p.resource, p.block) for p in path.segments] == [
        (STAGES, None),
        (OUT, 0),
        (OUT, 1),
        (STAGES, None),
        (IN, 0),
        (IN, 1),
        (STAGES, None),
    ]


def test_a_copy_in_waits_for_the_stage_that_frees_its_room() -> None:
    """Block 0 is asked for when stage 2 is reached, but block 1 fills the device until stage 2 has ended."""
    blocks = [activation(0, 10, [4], [0]), activation(1, 20, [2], [1]), activation(2, 0, [3], [3])]
    path = path_of(*made([1.0, 3.0, 1.0, 0.5, 1.0], blocks, [dict(block=0, after=0, before=4, start=2)], 20))
    # 0..1, out 1..2, stage 1 2..5, stage 2 5..6, in 6..7 while stage 3 runs 6..6.5, stage 4 7..8
    assert [(p.resource, p.index if p.block is None else p.block) for p in path.segments] == [
        (STAGES, 0),
        (OUT, 0),
        (STAGES, 1),
        (STAGES, 2),
        (IN, 0),
        (STAGES, 4),
    ]


def test_a_copy_from_the_iteration_before_is_cut_at_the_begin() -> None:
    """A parameter goes out after the last stage and comes back for the first one: 4 s in between, none of it hidden."""
    blocks = [activation(0, 20, [0], [1], persistent=True), activation(1, 10, [2], [2])]
    trace, by_hand = made([1.0, 1.0, 1.0], blocks, [dict(block=0, after=1, before=3, start=3)], 20)
    by_hand = Plan.model_validate({**by_hand.model_dump(), "initial": [{"block": 0, "tier": "storage"}]})
    path = path_of(trace, by_hand)
    assert [(p.resource, p.start_seconds, p.end_seconds) for p in path.segments] == [
        (IN, 0.0, 2.0),
        (STAGES, 2.0, 3.0),
        (STAGES, 3.0, 4.0),
        (OUT, 4.0, 6.0),
        (STAGES, 6.0, 7.0),
    ]


def test_a_copy_that_began_in_the_iteration_before() -> None:
    """A clean weight of 3 s is asked for when the last stage is reached, 1 s before the iteration ends."""
    blocks = [activation(0, 30, [0], [], persistent=True)]
    trace, _ = made([1.0] * 4, blocks, [], 30)
    move: dict[str, Any] = dict(block=0, after=0, before=4, tier="storage", offload=None, prefetch=dict(start=3, ready_by=4))
    by_hand = plan_of(trace, [move], 30)
    assert simulate(trace, by_hand).transfers[0].start_seconds == -1.0
    assert [(p.resource, p.start_seconds, p.seconds) for p in path_of(trace, by_hand).segments] == [
        (IN, 0.0, 2.0),
        (STAGES, 2.0, 1.0),
        (STAGES, 3.0, 1.0),
        (STAGES, 4.0, 1.0),
        (STAGES, 5.0, 1.0),
    ]


def test_the_host_updates_while_the_device_waits() -> None:
    """The gradient goes out (1 s), the host updates (3 s), the weight comes back (1 s), and only then stage 0 can run."""
    stages = [dict(id=n, name=f"s{n}", phase=phase, duration_seconds=1.0) for n, phase in enumerate(("forward", "backward"))]
    stages.append(dict(id=2, name="update", phase="optimizer", duration_seconds=1.0))
    blocks = [activation(0, 40, [0, 2], [2], persistent=True), activation(1, 40, [2], [1])]
    subgroup = dict(id=0, stage=2, blocks=[0, 1], elements=10, device_seconds=1.0, host_seconds=3.0)
    machine = hardware(host=True, rate=10.0)  # 40 bytes per second to and from the host
    trace = Trace.model_validate(dict(name="made", hardware=machine, stages=stages, blocks=blocks, subgroups=[subgroup]))
    gone: dict[str, Any] = dict(block=1, after=1, before=2, tier="host", offload=dict(start=1, free_after=1), prefetch=None)
    back: dict[str, Any] = dict(block=0, after=0, before=3, tier="host", offload=None, prefetch=dict(start=3, ready_by=3))
    more = {"updates": [dict(subgroup=0, where="host")], "initial": [dict(block=0, tier="host")]}
    path = path_of(trace, plan_of(trace, [gone, back], 80, **more))
    assert [(p.resource, p.index, p.seconds) for p in path.segments] == [
        ("device->host", 0, 1.0),
        ("host updates", 0, 3.0),
        ("host->device", 1, 1.0),
        (STAGES, 0, 1.0),
        (STAGES, 1, 1.0),
        (STAGES, 2, 0.0),
    ]


def test_a_host_update_waits_for_the_optimizer_stages() -> None:
    """Its gradient left long before, but the update begins when stage 3 is reached. A last stage reads the new weight."""
    phases = ("forward", "backward", "backward", "optimizer", "user")
    stages = [dict(id=n, name=f"s{n}", phase=phase, duration_seconds=2.0) for n, phase in enumerate(phases)]
    blocks = [activation(0, 40, [0, 3, 4], [3], persistent=True), activation(1, 40, [3], [1])]
    subgroup = dict(id=0, stage=3, blocks=[0, 1], elements=10, device_seconds=2.0, host_seconds=3.0)
    machine = hardware(host=True, rate=10.0)
    trace = Trace.model_validate(dict(name="made", hardware=machine, stages=stages, blocks=blocks, subgroups=[subgroup]))
    gone: dict[str, Any] = dict(block=1, after=1, before=3, tier="host", offload=dict(start=1, free_after=1), prefetch=None)
    back: dict[str, Any] = dict(block=0, after=0, before=4, tier="host", offload=None, prefetch=dict(start=4, ready_by=4))
    path = path_of(trace, plan_of(trace, [gone, back], 80, updates=[dict(subgroup=0, where="host")]))
    assert [(p.resource, p.index, p.seconds) for p in path.segments] == [
        (STAGES, 0, 2.0),
        (STAGES, 1, 2.0),
        (STAGES, 2, 2.0),
        ("host updates", 0, 3.0),
        ("host->device", 1, 1.0),
        (STAGES, 4, 2.0),
    ]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_there_is_never_a_gap(problem: tuple[Trace, Budgets]) -> None:
    trace, budgets = problem
    for policy in ("belady", "teraio", "g10"):
        path_of(trace, plan(trace, budgets, policy=policy, lower_bound=False))


def test_a_long_iteration() -> None:
    trace = transformer_trace(layers=6, states=True)
    path = path_of(trace, plan(trace, Budgets(device_bytes=floor(trace)[0] * 2), policy="g10", lower_bound=False))
    assert set(path.seconds()) == {STAGES, IN, OUT}
    assert list(path.seconds().values()) == sorted(path.seconds().values(), reverse=True)
