"""Where updates run, against the closed form of the interleaved optimizer step (Maurya et al., Deep Optimizer States, 2024).

With a share f of the elements updated on the device, U elements per second on the host, B bytes per second in each direction, 12
bytes of states and 2 of a parameter or gradient per element, and a device that is much faster, a step takes
max((1 - f) / U, (12 (f - r) + 2 (1 - f)) / B) per element, where the states of a share r stay on the device: least where both
are equal.
"""

from typing import Any

import pytest

from planner import Budgets, Trace, plan, simulate

from ...thoroughness import every_other

SUBGROUPS = 72
ELEMENTS = 1_000_000


def step_trace(host_rate: float, link_rate: float) -> Trace:
    """A step of many subgroups; forward and backward take no time."""
    stages: list[dict[str, Any]] = [
        {"id": 0, "name": "forward", "phase": "forward", "duration_seconds": 0.0},
        {"id": 1, "name": "backward", "phase": "backward", "duration_seconds": 0.0},
    ]
    blocks: list[dict[str, Any]] = []
    subgroups: list[dict[str, Any]] = []
    device_seconds = ELEMENTS / link_rate / 100
    for number in range(SUBGROUPS):
        stage, first = number + 2, len(blocks)
        stages.append({"id": stage, "name": f"update {number}", "phase": "optimizer", "duration_seconds": device_seconds})
        wanted: list[tuple[str, str, int, bool, list[int], list[int]]] = [
            ("weight", "parameter", 2, True, [0, 1, stage], [stage]),
            ("gradient", "gradient", 2, False, [stage], [1]),
            ("states", "optimizer_state", 12, True, [stage], [stage]),
        ]
        for name, kind, per_element, persistent, reads, writes in wanted:
            block = {"id": len(blocks), "name": f"{name} {number}", "kind": kind, "size_bytes": per_element * ELEMENTS}
            blocks.append({**block, "persistent": persistent, "reads": reads, "writes": writes})
        subgroups.append(
            {
                "id": number,
                "stage": stage,
                "blocks": [first, first + 1, first + 2],
                "elements": ELEMENTS,
                "device_seconds": device_seconds,
                "host_seconds": ELEMENTS / host_rate,
            }
        )
    links = [{"from": a, "to": b, "bytes_per_second": link_rate} for a, b in (("device", "host"), ("host", "device"))]
    machine = {"name": "made up", "device_memory_bytes": 10**9, "links": links}
    fields = {"hardware": machine, "stages": stages, "blocks": blocks, "subgroups": subgroups}
    return Trace.model_validate({"name": "step", **fields})


@pytest.mark.parametrize(("host_rate", "link_rate"), every_other((1.5e9, 50e9), (5e9, 50e9), (1e9, 25e9)))
def test_the_share_on_the_host_is_that_of_the_closed_form(host_rate: float, link_rate: float) -> None:
    # Room for all parameters and gradients, and for the states of six subgroups, of which two or so are on their way.
    trace = step_trace(host_rate, link_rate)
    budgets = Budgets(device_bytes=ELEMENTS * (4 * SUBGROUPS + 6 * 12))
    made = plan(trace, budgets, time_limit_seconds=10)
    host, link, stay = 1 / host_rate, 1 / link_rate, 4 / SUBGROUPS
    on_host = 1 - (host - 2 * link + 12 * stay * link) / (host + 10 * link)
    assert len(made.updates) / SUBGROUPS == pytest.approx(on_host, abs=1.5 / SUBGROUPS)
    seconds = SUBGROUPS * ELEMENTS * on_host * host
    assert simulate(trace, made).iteration_seconds == pytest.approx(seconds, rel=0.05)
    # The bound takes subgroups that are alike together.
    assert made.predicted is not None
    assert 0.5 * seconds < made.predicted.lower_bound_seconds <= made.predicted.iteration_seconds * (1 + 1e-9)
