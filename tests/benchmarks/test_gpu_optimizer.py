"""The part that trains a Llama by the plan of one policy after the other: which trainings run, and what is shown of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_optimizer
from benchmarks.__main__ import llama_parts
from benchmarks.alone import Missing
from benchmarks.gpu_optimizer import policy_figures
from planner import Budgets, Plan, plan
from planner.schema import Subgroup, Update

from .test_gpu_parts import GIB, MadeUp, a_trace, by_name, run


def test_every_policy_plans_for_the_first_trainings_trace_and_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_optimizer, "POLICIES", ("ilp", "zero-infinity", "no-such-policy"))
    runner = MadeUp(tmp_path)
    figures = by_name(llama_parts(runner)["gpu_optimizer"]()[0])
    for policy in ("ilp", "zero-infinity"):
        options = runner.settings[f"tiny, {policy}"].options
        made = Plan.load(options["plan"])
        assert (made.policy, made.trace_fingerprint) == (policy, a_trace().fingerprint)
        assert made.budgets.device_bytes == options["memory_budget"] == 3 * GIB
        assert "host_budget" in options and "storage" not in options
        assert figures[f"tiny, {policy}: tokens/s"].value == 300
        assert figures[f"tiny, {policy}: tokens/s"].note.startswith("0.800 x Inductor")
        assert figures[f"tiny, {policy}: peak / budget"].value == 1
    refused = figures["tiny, no-such-policy: tokens/s"]
    assert refused.value is None and refused.note.startswith("no plan: OptionsError: policy 'no-such-policy' is not known")
    assert "tiny, no-such-policy" not in runner.settings


def test_without_the_first_training_there_is_one_row_that_says_why(tmp_path: Path) -> None:
    (only,) = llama_parts(MadeUp(tmp_path, fails=("host",)))["gpu_optimizer"]()[0]
    assert (only.value, only.note) == (None, "tiny, 30 %, host failed")


def test_figures_of_a_policy() -> None:
    subgroups = tuple(Subgroup(id=i, stage=2 * i, blocks=(i,), elements=1, device_seconds=0.5) for i in range(2))
    trace = a_trace().model_copy(update={"subgroups": subgroups})
    made = plan(trace, Budgets(device_bytes=2 * GIB)).model_copy(update={"updates": (Update(subgroup=1, where="host"),)})
    outcome = run(2.0, 2.0, peak=GIB, trace=trace, plan=made, moved_bytes={"device->storage": 1e9}, phase="planned")
    pairs = zip(outcome.steps, (0.5, 1.0), strict=True)
    outcome = replace(outcome, steps=[step.model_copy(update={"optimizer_seconds": seconds}) for step, seconds in pairs])
    figures = by_name(policy_figures("x", outcome, run(1.0), 2 * GIB))
    assert figures["x: optimizer step"].value == pytest.approx(0.75)
    assert figures["x: optimizer step"].note == "1 of 2 subgroups update on the host"
    assert figures["x: tokens/s"].value == 300 and figures["x: peak / budget"].value == 0.5
    assert figures["x: use of device->storage"].value == pytest.approx(0.5)
    (only,) = policy_figures("x", Missing(reason="no room"), run(1.0), GIB)
    assert only.note == "no room"
