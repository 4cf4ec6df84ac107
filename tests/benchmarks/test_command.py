"""The benchmark's command line: its parts and defaults, what it refuses, the file it writes."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import DEFAULT, llama_parts, llama_scale_for, main, parts, scale_for
from benchmarks.alone import Runner
from benchmarks.emulated import Emulation
from benchmarks.planner_cases import Selection
from benchmarks.results import Result, save, versions


def test_every_default_part_exists_and_a_gpu_trains_what_the_readme_says(tmp_path: Path) -> None:
    scale = llama_scale_for("cuda", tmp_path, 3, sizes=[], dtype=None, minutes=7.5, batch=None, context=None)
    chosen = Selection(output=tmp_path), Emulation(output=tmp_path)
    known = {*parts(scale_for("cpu", tmp_path, 1), *chosen), *llama_parts(Runner(scale))}
    assert {*DEFAULT["cpu"], *DEFAULT["cuda"]} <= known
    assert (scale.batch, scale.context, scale.dtype, scale.limit_seconds) == (4, 2048, "bfloat16", 450)


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})


def test_the_command_writes_a_file_also_when_the_time_is_over(tmp_path: Path) -> None:
    folders = ("--output", str(tmp_path / "out"), "--results", str(tmp_path / "results"))
    outcome = command("gpu_overhead", "gpu_budgets", "gpu_bubble", "--minutes", "0", "--size", "gpt2-124m", *folders)
    assert outcome.exit_code == 0, outcome.output
    (path,) = (tmp_path / "results").iterdir()
    content = json.loads(path.read_text())
    assert content["format"] == "teraio.benchmark" and content["machine"]["cores"] > 0
    assert content["versions"] == versions() and content["versions"]["torch"]
    results = [Result.model_validate(each) for each in content["results"]]
    assert [result.part for result in results] == ["gpu_overhead", "gpu_budgets", "gpu_bubble"]
    assert "not run: the 0 s are over" in {figure.note for result in results for figure in result.figures}
    assert results[0].settings["scale"]["sizes"] == "('gpt2-124m',)"


def test_a_file_from_a_gpu_names_it_and_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="GPU X", total_memory=80 << 30))
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.1\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = json.loads(save([], tmp_path, "cuda").read_text())["machine"]
    assert (machine["gpu"], machine["gpu_memory_bytes"], machine["driver"]) == ("GPU X", 80 << 30, "570.1")
    smi.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert json.loads(save([], tmp_path, "cuda").read_text())["machine"]["driver"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu_overhead", "--size", "huge"), "no size huge; there are tiny"),
        (("gpu_overhead", "--device", "tpu"), "no device tpu"),
        (("gpu_overhead", "--dtype", "int4"), "no dtype int4"),
        (("no_such_part",), "no part no_such_part; there are stage_overhead"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: tuple[str, ...], message: str) -> None:
    outcome = command(*arguments)
    assert outcome.exit_code == 2 and message in outcome.output
