"""Updates on the host: which subgroups can update there, what plans may do, and the bound with little memory or few threads."""

from typing import Any

import pytest

from planner import Budgets, InfeasiblePlanError, Plan, Trace, TraceError, plan, simulate
from planner.bound import lower_bound_seconds
from planner.problem import Problem, host_updatable

from ..strategies import hardware

PARAMETER, GRADIENT, STATE = 0, 1, 2


def training(
    seconds: list[float],
    *,
    uses: tuple[int, ...] = (0, 2, 3),
    born: int = 2,
    update: int = 3,
    device_seconds: float = 1.0,
    host_seconds: float = 1.0,
    workspace: int = 60,
    host: bool = True,
    subgroups: int = 1,
) -> Trace:
    """Four stages: forward, something that takes a workspace, backward, update (or the update where `update` says)."""
    phases = ["forward", "user", "backward", "forward"]
    phases[update] = "optimizer"
    stages = [
        {
            "id": number,
            "name": f"stage {number}",
            "phase": phases[number],
            "duration_seconds": duration,
            "workspace_bytes": workspace if number == 1 else 0,
        }
        for number, duration in enumerate(seconds)
    ]
    wanted: list[tuple[str, int, bool, list[int], list[int]]] = [
        ("parameter", 20, True, list(uses), [update]),
        ("gradient", 20, False, [update], [born]),
        ("optimizer_state", 40, True, [update], [update]),
    ]
    blocks = [
        {"id": i, "name": kind, "kind": kind, "size_bytes": size, "persistent": keeps, "reads": reads, "writes": writes}
        for i, (kind, size, keeps, reads, writes) in enumerate(wanted)
    ]
    groups = [
        {
            "id": number,
            "stage": update,
            "blocks": [PARAMETER, GRADIENT, STATE] if number == 0 else [],
            "elements": 1,
            "device_seconds": device_seconds,
            "host_seconds": host_seconds,
        }
        for number in range(subgroups)
    ]
    machine: dict[str, Any] = hardware(host=host, rate=50.0)
    fields = {"hardware": machine, "stages": stages, "blocks": blocks, "subgroups": groups}
    return Trace.model_validate({"name": "training", **fields})


def test_which_subgroups_can_update_on_the_host() -> None:
    assert [subgroup.id for subgroup in host_updatable(training([1, 1, 1, 1]))] == [0]
    assert host_updatable(training([1, 1, 1, 1], host=False)) == ()
    # Nothing would hold the next iteration back until the update is done: its parameters are used only after it,
    assert host_updatable(training([1, 1, 1, 1], uses=(0, 2, 3), born=0, update=1)) != ()
    assert host_updatable(training([1, 1, 1, 1], uses=(2, 3), born=1, update=2)) == ()
    # ... or only after the gradients have come into being anew.
    assert host_updatable(training([1, 1, 1, 1], uses=(2, 3), born=1, update=3)) == ()


@pytest.mark.parametrize("threads", [1, 4, 2])
def test_any_number_of_threads_in_one_process(threads: int) -> None:
    trace = training([5, 1, 5, 5], device_seconds=5, host_seconds=1)
    made = plan(trace, Budgets(device_bytes=90), threads=threads)
    assert made.solver.status == "optimal"
    assert made.predicted is not None and len(made.updates) == 1
    assert made.predicted.lower_bound_seconds <= made.predicted.iteration_seconds * (1 + 1e-9)
    assert made.predicted.lower_bound_seconds > 12


def test_a_place_in_the_host_tier_counts_once() -> None:
    trace = training([1, 1, 1, 10], device_seconds=10, host_seconds=0.1)
    made = plan(trace, Budgets(device_bytes=80, host_bytes=80))
    assert made.predicted is not None and len(made.updates) == 1
    assert simulate(trace, made).peak_bytes["host"] == 80
    assert made.predicted.lower_bound_seconds <= made.predicted.iteration_seconds * (1 + 1e-9)
    without = plan(trace, Budgets(device_bytes=80, host_bytes=79))
    assert without.updates == ()


def test_where_everything_fits_the_host_may_still_help() -> None:
    trace = training([5, 1, 5, 5], device_seconds=5, host_seconds=1)
    assert plan(trace, Budgets(device_bytes=1000), policy="keep-all").predicted is not None
    made = plan(trace, Budgets(device_bytes=1000)).predicted
    assert made is not None and made.iteration_seconds < trace.ideal_seconds


def by_hand(trace: Trace, moves: list[dict[str, Any]], tier: str = "host") -> Plan:
    return Plan.model_validate(
        {
            "trace_fingerprint": trace.fingerprint,
            "policy": "by hand",
            "budgets": Budgets(device_bytes=1000),
            "moves": moves,
            "initial": [{"block": PARAMETER, "tier": "device" if moves[-1]["prefetch"]["start"] < 4 else tier}],
            "updates": [{"subgroup": 0, "where": "host"}],
        }
    )


OUT = {
    "block": GRADIENT,
    "after": 2,
    "before": 3,
    "tier": "host",
    "offload": {"start": 2, "free_after": 2},
    "prefetch": None,
}
BACK = {
    "block": PARAMETER,
    "after": 2,
    "before": 4,
    "tier": "host",
    "offload": None,
    "prefetch": {"start": 3, "ready_by": 4},
}


def test_a_parameter_waits_for_its_update() -> None:
    trace = training([1, 1, 1, 1], host_seconds=7)
    timeline = simulate(trace, by_hand(trace, [OUT, BACK]))
    # Gradient out 0.1 s, update 7 s, parameter in 0.1 s; the update's stage takes no time.
    assert timeline.iteration_seconds == pytest.approx(3 + 0.1 + 7 + 0.1)
    assert timeline.updates[0].end_seconds - timeline.updates[0].start_seconds == pytest.approx(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offload": {"start": 2, "free_after": 2}}, "no move takes its block 'parameter' there"),
        ({"tier": "storage"}, "no move takes its block 'parameter' there"),
    ],
)
def test_what_a_parameter_may_not_do(change: dict[str, Any], message: str) -> None:
    trace = training([1, 1, 1, 1])
    with pytest.raises(InfeasiblePlanError, match=message):
        simulate(trace, by_hand(trace, [OUT, {**BACK, **change}], change.get("tier", "host")))


def test_a_copy_in_another_tier_is_stale_after_the_update() -> None:
    trace = training([1, 1, 1, 1])
    between = {**BACK, "after": 0, "before": 2, "tier": "storage", "prefetch": {"start": 2, "ready_by": 2}}
    with pytest.raises(InfeasiblePlanError, match="although no valid copy waits in the storage tier"):
        simulate(trace, by_hand(trace, [OUT, between, BACK]))


def test_subgroups_cannot_take_longer_than_their_stage() -> None:
    with pytest.raises(ValueError, match=r"subgroups up to 1 take 2\.0 s of stage 3, which lasts 1\.0 s"):
        training([1, 1, 1, 1], subgroups=2)


def test_no_prefetch_takes_the_room_that_the_next_stage_needs() -> None:
    """Stage 2 needs all the memory: a copy in that is queued as stage 1 ends must wait for it."""
    stages = [
        {"id": s, "name": f"s{s}", "phase": "user", "duration_seconds": 1.0, "workspace_bytes": w}
        for s, w in enumerate([0, 0, 20, 0])
    ]
    block = {"id": 0, "name": "w", "kind": "parameter", "size_bytes": 20, "persistent": True, "reads": [3], "writes": []}
    fields = {"hardware": hardware(rate=20.0), "stages": stages, "blocks": [block]}
    trace = Trace.model_validate({"name": "room", **fields})
    move = {**BACK, "block": 0, "after": 3, "before": 7, "tier": "storage", "prefetch": {"start": 6, "ready_by": 7}}
    made = {
        "trace_fingerprint": trace.fingerprint,
        "policy": "by hand",
        "budgets": Budgets(device_bytes=20),
        "moves": [move],
        "initial": [{"block": 0, "tier": "storage"}],
    }
    assert simulate(trace, Plan.model_validate(made)).iteration_seconds == pytest.approx(5.0)
    assert lower_bound_seconds(Problem.of(trace, Budgets(device_bytes=20))) <= 5.0


def test_a_trace_error_names_the_place() -> None:
    with pytest.raises(TraceError, match="shared rate 'x' names links that do not exist: host->device"):
        Trace.build(
            name="x",
            hardware={
                **hardware(),
                "shared": [{"name": "x", "links": ["device->storage", "host->device"], "bytes_per_second": 1.0}],
            },
            stages=[{"id": 0, "name": "s", "phase": "user", "duration_seconds": 1.0}],
        )
