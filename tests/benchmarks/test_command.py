"""The benchmark's command line: what it refuses, the file it writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.results import Result, versions


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu_overhead", "--size", "huge"), "no size huge; there are tiny"),
        (("no_such_part",), "no part no_such_part; there are stage_overhead"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: tuple[str, ...], message: str) -> None:
    outcome = command(*arguments)
    assert outcome.exit_code == 2 and message in outcome.output
