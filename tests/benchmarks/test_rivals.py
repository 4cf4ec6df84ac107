"""Other ways to save memory: what each of them does at a tiny size, and why some cannot run here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import alone
from benchmarks.alone import Run, Runner
from benchmarks.rival_training import CannotRun, RivalSetting, RivalTraining, begin
from benchmarks.rivals import PROGRAM
from examples.llama import SIZES
from examples.training import Setting, Training

from .made_up import tiny_scale

LLAMA = replace(SIZES["tiny"], layers=2, width=64, feed_forward=96, context=16)


def setting(way: str, **changes: Any) -> RivalSetting:
    fields = {"way": way, "backend": "eager", "model": LLAMA, "batch": 2, "text_bytes": 1 << 16}
    return RivalSetting.model_validate({**fields, **changes})


def losses(training: Training) -> list[float]:
    return [training.step().loss for _ in range(3)]


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    """Losses of the plain training."""
    return losses(
        Training(Setting.model_validate(setting("plain").model_dump(exclude={"way", "budget_bytes", "folder", "collectives"})))
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"save_on_cpu": True}, id="save_on_cpu"),
        pytest.param({"model": replace(LLAMA, checkpointed_layers=2)}, id="checkpointing"),
    ],
)
def test_ways_of_pytorch_itself_train_as_the_plain_one(changes: dict[str, Any], wanted: list[float]) -> None:
    assert losses(RivalTraining(setting("plain", **changes))) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("torchao", r"torchao cannot be imported \(ModuleNotFoundError|copies from a GPU only"),
        ("zero_infinity", r"deepspeed cannot be imported \(ModuleNotFoundError|offloads from a GPU"),
        ("compiler_offloading", "offloads activations of a GPU only|has no torch._functorch.config"),
    ],
)
def test_what_cannot_run_here_says_why(way: str, reason: str) -> None:
    with pytest.raises(CannotRun, match=reason):
        begin(setting(way).model_dump_json())


def test_a_rival_trains_in_a_process_of_its_own(tmp_path: Path, wanted: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 needs a process group, which must not stay in this process."""
    monkeypatch.setattr(alone, "COUNTED_SECONDS", 0.0)
    runner = Runner(tiny_scale(tmp_path, rounds=1, training_seconds=200.0))
    outcome = runner.run("fsdp2", setting("fsdp2", folder=str(tmp_path)), PROGRAM)
    assert isinstance(outcome, Run), outcome.reason
    assert outcome.phase == "" and outcome.seconds > 0 and outcome.report.status is None
    assert outcome.steps[0].loss < wanted[0], "it learns"
