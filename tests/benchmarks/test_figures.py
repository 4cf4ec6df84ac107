"""The benchmark's arithmetic and its file: aims, rounds, how many layers to checkpoint, what is written."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.budgets import layers_to_checkpoint
from benchmarks.results import Figure, Result, save, table
from benchmarks.turns import ratios, spread


@pytest.mark.parametrize(
    ("value", "aim", "met"),
    [(1.03, "<= 1.03", True), (1.04, "<= 1.03", False), (0.9, ">= 0.90", True), (0.8, ">= 0.90", False)],
)
def test_an_aim_is_met_or_not(value: float, aim: str, met: bool) -> None:
    assert Figure(name="", value=value, unit="", aim=aim).met is met


def test_without_a_value_or_an_aim_nothing_is_met() -> None:
    assert Figure(name="", value=None, unit="", aim=">= 1").met is None
    assert Figure(name="", value=1.0, unit="").met is None


def test_ratios_compare_within_a_round() -> None:
    slow_second_round = ratios([2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 10.0, 10.0], turn=3)
    assert slow_second_round == [2.0, 2.0]
    assert spread([0.5, 2.0]) == "rounds from 0.50 to 2.00"


@pytest.mark.parametrize(
    ("budget_bytes", "layers"),
    [(1000, 0), (999, 1), (900, 1), (899, 2), (400, 6), (100, 6)],
)
def test_as_few_layers_are_checkpointed_as_fit(budget_bytes: int, layers: int) -> None:
    assert layers_to_checkpoint(1000, 400, budget_bytes, 6) == layers


def test_checkpointing_that_saves_nothing_takes_all_layers() -> None:
    assert layers_to_checkpoint(1000, 1000, 500, 6) == 6


def test_a_file_says_how_it_came_about(tmp_path: Path) -> None:
    figure = Figure(name="engine / raw", value=0.95, unit="", aim=">= 0.90")
    result = Result(part="engine", seconds=1.0, figures=(figure,), samples={"raw": [1.0]})
    content = json.loads(save([result], tmp_path, "cpu").read_text())
    assert content["format"] == "teraio.benchmark"
    assert content["versions"]["torch"] and content["machine"]["cores"] > 0
    assert Result.model_validate(content["results"][0]) == result
    assert table([result]).row_count == 1


def test_an_unknown_part_is_refused() -> None:
    import typer

    from benchmarks.__main__ import main

    app = typer.Typer()
    app.command()(main)
    outcome = CliRunner().invoke(app, ["no_such_part"])
    assert outcome.exit_code == 2
    assert "no_such_part" in outcome.output and "stage_overhead" in outcome.output
