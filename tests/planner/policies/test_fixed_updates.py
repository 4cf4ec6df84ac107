"""Policies with fixed rules for where optimizer subgroups update."""

from pathlib import Path
from typing import Any

import pytest

from planner import Budgets, InfeasiblePlanError, Trace, UnsupportedError, floor, plan, simulate
from planner.problem import live_bytes

from ..strategies import hardware, with_user_code

HAND = Path(__file__).parents[3] / "traces" / "hand"


def layered(layers: int, *, on_device_only: frozenset[int] = frozenset(), host_seconds: float = 0.5) -> Trace:
    """A training step with one optimizer subgroup for each layer; that of the last layer is updated first."""
    names = [f"forward/{i}" for i in range(layers)] + [f"backward/{i}" for i in reversed(range(layers))]
    names += [f"optimizer/{i}" for i in reversed(range(layers))]
    stages = [{"id": n, "name": name, "phase": name.split("/")[0], "duration_seconds": 1.0} for n, name in enumerate(names)]
    blocks: list[dict[str, Any]] = []
    subgroups = []
    for layer in range(layers):
        backward, update = 2 * layers - 1 - layer, 3 * layers - 1 - layer
        parts: list[tuple[str, int, bool, list[int], list[int]]] = [
            ("parameter", 10, True, [layer, backward, update], [update]),
            ("gradient", 10, False, [update], [backward]),
            ("optimizer_state", 20, True, [update], [update]),
        ]
        first = len(blocks)
        for kind, size, persistent, reads, writes in parts:
            block = {"id": len(blocks), "name": f"{kind}.{layer}", "kind": kind, "size_bytes": size, "persistent": persistent}
            blocks.append({**block, "reads": reads, "writes": writes})
        seconds = None if layer in on_device_only else host_seconds
        times = {"device_seconds": 1.0, "host_seconds": seconds}
        subgroups.append({"id": layer, "stage": update, "blocks": [first, first + 1, first + 2], "elements": 1, **times})
    machine: dict[str, Any] = hardware(host=True, rate=20.0)
    fields = {"name": "layered", "hardware": machine, "stages": stages, "blocks": blocks, "subgroups": subgroups}
    return Trace.model_validate(fields)


def where(trace: Trace, policy: str, budgets: Budgets) -> set[int]:
    made = plan(trace, budgets, policy=policy)
    assert made.policy == policy and made.predicted is not None
    timeline = simulate(trace, made)
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert made.predicted.iteration_seconds == pytest.approx(timeline.iteration_seconds)
    assert timeline.iteration_seconds >= made.predicted.lower_bound_seconds * (1 - 1e-9)
    found = {update.subgroup for update in timeline.updates}
    assert found == {update.subgroup for update in made.updates if update.where == "host"}
    return found


@pytest.mark.parametrize("user_code", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_where_updates_run_under_each_policy(user_code: bool, share: float) -> None:
    trace = layered(4, on_device_only=frozenset({1}))
    trace = with_user_code(trace, 0.1) if user_code else trace
    budgets = Budgets(device_bytes=max(floor(trace)[0], int(share * max(live_bytes(trace)))))
    assert where(trace, "device-updates", budgets) == set()
    assert where(trace, "host-updates", budgets) == {0, 2, 3}
    # In the order of their stages 3, 2, 0 can update on the host; every second of these stays on the device.
    assert where(trace, "stride-2", budgets) == {3, 0}
    assert where(layered(5), "stride-2", Budgets(device_bytes=1000)) == {4, 2, 0}


def test_the_program_is_as_good_as_what_is_decided_beforehand() -> None:
    trace = layered(4, host_seconds=1.5)
    budgets = Budgets(device_bytes=int(0.6 * max(live_bytes(trace))))
    seconds = {
        p: simulate(trace, plan(trace, budgets, policy=p, lower_bound=False)).iteration_seconds
        for p in ("ilp", "device-updates", "host-updates", "stride-2")
    }
    assert seconds["ilp"] == min(seconds.values())
    assert len(set(seconds.values())) > 2


@pytest.mark.parametrize(("layers", "host_seconds", "user_seconds", "device_bytes"), [(2, 0.5, 0.5, 55), (3, 1.5, 1.0, 53)])
def test_a_fixed_rule_is_never_faster_than_the_program(
    layers: int, host_seconds: float, user_seconds: float, device_bytes: int
) -> None:
    trace = with_user_code(layered(layers, on_device_only=frozenset({1}), host_seconds=host_seconds), user_seconds)
    made = {
        policy: plan(trace, Budgets(device_bytes=device_bytes), policy=policy)
        for policy in ("ilp", "offload-only", "device-updates", "host-updates", "stride-2")
    }
    seconds = {policy: simulate(trace, each).iteration_seconds for policy, each in made.items()}
    assert seconds["ilp"] == seconds["offload-only"] == min(seconds.values())
    assert made["ilp"].policy == "ilp" and made["offload-only"].policy == "offload-only"


@pytest.mark.parametrize("policy", ["host-updates", "stride-2"])
def test_nothing_can_update_on_the_host(policy: str) -> None:
    budgets = Budgets(device_bytes=20)
    with pytest.raises(UnsupportedError, match=f"'{policy}': none of the 0 optimizer subgroups .* use 'device-updates' or 'ilp'"):
        plan(Trace.load(HAND / "chain.json"), budgets, policy=policy)
    only_device = layered(2, on_device_only=frozenset({0, 1}))
    with pytest.raises(UnsupportedError, match="none of the 2 optimizer subgroups"):
        plan(only_device, Budgets(device_bytes=1000), policy=policy)


def test_no_room_in_the_host_tier() -> None:
    trace = layered(4)
    for policy, count, size in (("host-updates", 4, 160), ("stride-2", 2, 80)):
        assert len(where(trace, policy, Budgets(device_bytes=1000, host_bytes=size))) == count
        with pytest.raises(InfeasiblePlanError, match=f"the {count} optimizer subgroups .* take {size} bytes .* is {size - 1}"):
            plan(trace, Budgets(device_bytes=1000, host_bytes=size - 1), policy=policy)
    with pytest.raises(InfeasiblePlanError, match="raise host_budget"):
        plan(trace, Budgets(device_bytes=1000, host_bytes=0), policy="host-updates")


def test_where_everything_fits_nothing_moves_but_for_updates_on_the_host() -> None:
    trace = layered(3)
    assert plan(trace, Budgets(device_bytes=1000), policy="device-updates").moves == ()
    assert len(plan(trace, Budgets(device_bytes=1000), policy="host-updates").moves) == 6  # gradients out, parameters back
