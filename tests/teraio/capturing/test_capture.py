"""Captured traces against those of real runs, and what a capture refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import planner
import teraio
from runtime.execution import Program
from teraio.capturing import MachineDescription, capture, known_machines
from teraio.capturing.calibration import calibrated
from teraio.cli.commands import app
from teraio.stages import Kernel, StageCompiler
from tests.teraio.capturing import trainings
from tests.teraio.capturing.trainings import Transformer, compiles_nothing, loss_of, reads_the_loss, training

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    teraio.reset()
    yield
    teraio.reset()
    torch._dynamo.reset()


def shape(trace: planner.Trace) -> tuple[object, ...]:
    """All of a trace but times, workspaces and hardware."""
    return (
        [(stage.name, stage.phase) for stage in trace.stages],
        [block.model_dump() for block in trace.blocks],
        [(group.stage, group.blocks, group.reads) for group in trace.recompute],
        [(subgroup.stage, subgroup.blocks, subgroup.elements) for subgroup in trace.subgroups],
    )


def test_a_capture_has_the_stages_blocks_and_groups_of_a_real_run(tmp_path: Path) -> None:
    options = {
        "codegen": "eager",
        "memory_budget": 4 << 30,
        "storage": str(tmp_path),
        "trace_out": str(tmp_path / "trace.json"),
        "profile_iterations": 1,
    }
    step = training(options)
    for _ in range(4):
        step()
    teraio.reset()
    real = planner.Trace.load(tmp_path / "trace.json")
    captured = teraio.capture(lambda: training({"codegen": "eager"}), subgroup_bytes=real.subgroup_bytes)
    assert shape(captured) == shape(real)
    assert captured.recompute and captured.subgroups


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_workspaces_are_those_that_a_run_of_the_same_codegen_estimates(codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    estimated: dict[str, int] = {}
    compile_graph = StageCompiler.compile

    def noting(self: StageCompiler, *given: Any, **named: Any) -> Program:
        program = compile_graph(self, *given, **named)
        estimated.update({stage.name: stage.workspace_bytes for stage in program.stages})
        return program

    monkeypatch.setattr(StageCompiler, "compile", noting)
    captured = teraio.capture(lambda: training({"codegen": codegen}))
    found = {stage.name: stage.workspace_bytes for stage in captured.stages if stage.phase in ("forward", "backward")}
    assert found == estimated and any(found.values())


def test_a_model_on_the_meta_device_is_captured_like_its_training() -> None:
    """On a machine without a GPU."""
    machine = MachineDescription.load("h100").model_copy(update={"gpu": None})
    with torch.device("meta"):
        model = Transformer()
    captured = capture(model, (torch.zeros(8, 256, dtype=torch.long),), loss=loss_of, hardware=machine)
    assert shape(captured) == shape(capture(training, hardware=machine))
    assert captured.name == "Transformer"
    assert next(model.parameters()).device.type == "meta", "the model itself stays as it is"


def test_shared_parameters_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(600, 600, bias=False), nn.Linear(600, 600, bias=False))
    model[1].weight = model[0].weight
    captured = teraio.capture(model, (torch.zeros(2, 600),), loss=lambda output: output.sum())
    assert sum(block.kind == "parameter" and block.size_bytes >= MIB for block in captured.blocks) == 1


def test_a_model_larger_than_this_machine_is_captured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(3)))  # 120 GB
    captured = teraio.capture(model, [torch.empty(16, 100_000, device="meta")], loss=lambda output: output.sum())
    assert sum(block.size_bytes for block in captured.blocks if block.kind == "parameter") == 3 * 4 * 10**10


def test_times_come_from_the_machine() -> None:
    description = MachineDescription.load("h100")
    slow = description.model_copy(
        update={
            "flops_per_second": {name: rate / 2 for name, rate in description.flops_per_second.items()},
            "memory_bytes_per_second": description.memory_bytes_per_second / 2,
            "launch_seconds": 2 * description.launch_seconds,
        }
    )
    fast, twice = (capture(training, hardware=each) for each in (description, slow))
    assert all(stage.duration_seconds > 0 for stage in fast.stages)
    for one, other in zip(fast.stages, twice.stages, strict=True):
        assert other.duration_seconds == pytest.approx(2 * one.duration_seconds)
    assert fast.hardware == description.hardware


def test_efficiencies_are_fitted_to_a_measured_trace_of_a_smaller_size() -> None:
    """The "measured" trace is itself a capture, for a machine whose efficiencies are known; other figures are as assumed."""
    assumed = MachineDescription.load("rtx4090")
    true = assumed.model_copy(update={"matmul_efficiency": 0.31, "memory_efficiency": 0.57})
    measured = capture(trainings.training, hardware=true)
    fitted = capture(trainings.larger, hardware=assumed, calibrate=measured, smaller=trainings.training)
    wanted = capture(trainings.larger, hardware=true)
    assert fitted.ideal_seconds == pytest.approx(wanted.ideal_seconds, rel=0.02)
    assert "with efficiencies 0.31 and 0.57 fitted" in fitted.created_by


def test_a_machine_that_is_faster_than_its_peak_gets_a_higher_peak() -> None:
    kernels = [
        Kernel(flops=1e12, dtype=torch.float32, touched_bytes=1),
        Kernel(flops=0.0, dtype=torch.float32, touched_bytes=10**9),
    ]
    assumed = MachineDescription.load("rtx4090")
    twice = calibrated(assumed, [(assumed.seconds(kernel) / 2, [kernel]) for kernel in kernels])
    assert twice.matmul_efficiency == 1.0 and twice.memory_efficiency == 1.0
    for kernel in kernels:
        assert twice.seconds(kernel) == pytest.approx(assumed.seconds(kernel) / 2, rel=0.01)


def test_a_trace_of_another_training_calibrates_nothing() -> None:
    other = planner.Trace.load(Path(__file__).parents[3] / "traces" / "hand" / "chain.json")
    with pytest.raises(teraio.OptionsError, match="has 6 stages of compiled graphs, and the training .* has 0 of them"):
        capture(trainings.training, calibrate=other)
    with pytest.raises(teraio.OptionsError, match="give that trace as calibrate"):
        capture(trainings.training, smaller=trainings.training)


def test_all_known_machines_are_whole() -> None:
    assert {"h100", "h200", "a100", "rtx4090", "rtx5090", "laptop"} <= set(known_machines())
    for name in known_machines():
        hardware = MachineDescription.load(name).hardware
        assert hardware.link("device", "host") and hardware.link("storage", "device"), name


def test_a_machine_without_a_peak_for_float32_is_refused(tmp_path: Path) -> None:
    content = MachineDescription.load("h100").model_dump(mode="json", by_alias=True)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**content, "flops_per_second": {"bfloat16": 1e15}}))
    with pytest.raises(planner.TraceError, match="flops_per_second has bfloat16, but lacks float32"):
        MachineDescription.load(path)


def test_a_step_that_reads_values_is_refused() -> None:
    with pytest.raises(teraio.UnsupportedError, match="depends on the values of tensors"):
        teraio.capture(reads_the_loss)


def test_a_step_that_compiles_nothing_is_refused() -> None:
    with pytest.raises(teraio.UnsupportedError, match='no trace yet: nothing was compiled with backend="teraio"'):
        teraio.capture(compiles_nothing)


def test_a_process_that_trains_is_refused(tmp_path: Path) -> None:
    training({"codegen": "eager"}, width=64)()
    with pytest.raises(teraio.UnsupportedError, match="teraio is training in this process"):
        teraio.capture(training)


@pytest.mark.parametrize(
    ("what", "given", "message"),
    [
        (nn.Linear(2, 2), {}, "a model was given without inputs"),
        (training, {"inputs": ()}, "inputs belong to a model"),
        (nn.Linear(2, 2), {"inputs": (torch.zeros(2, 2),)}, "neither a loss nor something with a loss"),
        (training, {"hardware": "abacus"}, "wanted one of a100, h100"),
        (training, {"name": "x" * 5000}, "a name of 5,000 characters; at most 4,096"),
        (lambda: "step", {}, "the function returns str, wanted a function that does one step"),
    ],
)
def test_wrong_arguments(what: object, given: dict[str, object], message: str) -> None:
    with pytest.raises(teraio.OptionsError, match=message):
        teraio.capture(what, **given)


def test_training_goes_on_as_before_after_a_capture() -> None:
    teraio.capture(training)
    step = training({"codegen": "eager"}, width=64)
    step()
    assert teraio.status()[0].phase == "profile"


def test_the_command_writes_a_trace_that_can_be_planned(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    target = "tests.teraio.capturing.trainings:training"
    done = CliRunner().invoke(app, ["capture", target, "--hardware", "rtx4090", "-o", str(path), "--json"])
    assert done.exit_code == 0, done.output
    trace = planner.Trace.load(path)
    assert json.loads(done.stdout)["name"] == trace.name == "training"
    budget = planner.floor(trace)[0] * 5 // 4
    assert planner.plan(trace, planner.Budgets(device_bytes=budget), policy="g10").moves


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nonsense", "wanted MODULE:FUNCTION"),
        ("no_such_module:training", "No module named"),
        ("tests.teraio.capturing.trainings:no_such", "has no function 'no_such'"),
    ],
)
def test_a_wrong_target(target: str, message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["capture", target, "-o", str(tmp_path / "trace.json")])
    assert isinstance(done.exception, teraio.OptionsError)
    assert message in str(done.exception)
