"""Generated iterations against figures that were worked out apart: parameters, arithmetic, activations."""

import pytest

from benchmarks.transformer_trace import WORKLOADS
from planner import Trace, floor
from planner.problem import live_bytes

PUBLISHED_PARAMETERS = {"Llama-3-8B": 8_030_261_248, "Granite-8B": 8_054_000_000, "Llama-3-70B": 70_553_706_496}
LEAST_STAGES = {"Llama-3-8B": 390, "Granite-8B": 390, "Llama-3-70B": 960}
PUBLISHED_PEAK_SHARES = {"Llama-3-8B": (1.88, 1.91), "Granite-8B": (3.79, 3.87), "Llama-3-70B": (9.40, 12.43)}


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: workload.trace() for name, workload in WORKLOADS.items()}


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameters_peaks_and_stages_are_the_published_ones(name: str, traces: dict[str, Trace]) -> None:
    published, trace = PUBLISHED_PARAMETERS[name], traces[name]
    assert WORKLOADS[name].work().parameters == pytest.approx(published, rel=0.01)
    assert sum(group.elements for group in trace.subgroups) == pytest.approx(published, rel=0.01)
    parameters, gradients, states = (
        sum(each.size_bytes for each in trace.blocks if each.kind == kind)
        for kind in ("parameter", "gradient", "optimizer_state")
    )
    assert parameters == gradients == states // 2 == pytest.approx(4 * published, rel=0.01)
    peak = max(live_bytes(trace))
    least, most = PUBLISHED_PEAK_SHARES[name]
    assert least * 0.98 <= peak / 94e9 <= most * 1.02
    assert floor(trace)[0] < 0.2 * 94e9 < peak
    assert len(trace.stages) == 12 * WORKLOADS[name].model.layers + 8 >= LEAST_STAGES[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_arithmetic_is_six_flops_per_parameter_and_token_and_attention(name: str) -> None:
    workload = WORKLOADS[name]
    model, work = workload.model, workload.work()
    tokens = workload.batch * workload.sequence
    looked_up = 0 if model.tied else model.vocabulary * model.width
    # Every token attends to half a sequence; 12 FLOPs per pair and element without flash, 2 more for its second scores.
    attention = 14 * model.layers * model.width * tokens * workload.sequence / 2
    expected = 6 * (work.parameters - looked_up) * tokens + attention
    assert sum(stage.flops for stage in work.stages) == pytest.approx(expected, rel=1e-6)
    assert sum(stage.flops for stage in work.stages) == pytest.approx(6 * work.parameters * tokens, rel=0.08)


@pytest.mark.parametrize("name", WORKLOADS)
def test_activations_that_wait_for_the_backward_pass_follow_the_formula(name: str, traces: dict[str, Trace]) -> None:
    workload, trace = WORKLOADS[name], traces[name]
    model = workload.model
    turn = next(stage.id for stage in trace.stages if stage.phase == "backward")
    waiting = sum(each.size_bytes for each in trace.blocks if each.kind == "activation" and each.uses[0] < turn <= each.uses[-1])
    narrow = model.width * model.key_value_heads // model.heads
    per_layer = 6 * model.width + 2 * narrow + 3 * model.feed_forward + model.heads
    per_token = model.layers * per_layer + 2 * model.width + model.vocabulary
    assert waiting == 4 * workload.batch * workload.sequence * per_token
