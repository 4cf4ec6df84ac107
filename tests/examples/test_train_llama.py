"""The command that trains a Llama: what it prints, what it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from examples import train_llama
from examples.llama import SIZES
from examples.training import Report, covered

SHALLOW = replace(SIZES["tiny"], layers=2, context=64)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(train_llama, "SIZES", {"tiny": SHALLOW})
    yield
    torch._dynamo.reset()


def call(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(train_llama.main)
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "300"})


def test_a_plain_run_prints_losses_speed_and_peak() -> None:
    outcome = call("--backend", "eager", "--steps", "3", "--batch", "2", "--context", "32")
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.output.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["1", "2", "3"]
    assert all("loss" in line and "tokens/s" in line for line in lines[:3])
    assert "million parameters" in outcome.output and "peak resident set" in outcome.output
    assert "teraio" not in outcome.output


def test_a_budget_moves_tensors(tmp_path: Path) -> None:
    tiers = ("--memory-budget", "84MiB", "--storage", str(tmp_path), "--codegen", "eager")
    outcome = call("--steps", "6", "--batch", "4", *tiers)
    assert outcome.exit_code == 0, outcome.output
    assert "profile" in outcome.output and "budget 84 MiB" in outcome.output
    for link in ("device->storage", "storage->device"):
        moved = next(line for line in outcome.output.splitlines() if link in line)
        assert not moved.endswith(" 0 MiB")


def test_what_teraio_refuses_is_one_line() -> None:
    outcome = call("--memory-budget", "1MiB", "--storage", "/no/such/folder")
    assert outcome.exit_code == 1
    (line,) = outcome.output.splitlines()
    assert line.startswith("OptionsError: ") and "/no/such/folder is not a directory" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "huge"), "no size 'huge'; there are tiny"),
        (("--dtype", "int4"), "dtype: Input should be 'float32' or 'bfloat16'"),
        (("--backend", "eager", "--memory-budget", "1GiB"), "memory_budget: only the backend teraio"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: tuple[str, ...], message: str) -> None:
    outcome = call(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.output


def test_the_summary_of_a_gpu_tells_allocated_from_reserved() -> None:
    report = Report(peak_bytes=3 << 20, peak_reserved_bytes=5 << 20, rest_bytes=0, parameters=10**6, status=None)
    assert "allocated device memory 3 MiB, of reserved 5 MiB" in train_llama.summary(report)


def test_spans_that_overlap_count_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.7)]) == 4.0
    assert covered([]) == 0.0
