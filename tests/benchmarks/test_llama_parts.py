"""The parts that train Llamas: which trainings run, in what setting, and what becomes of them."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_links
from benchmarks.__main__ import llama_parts
from benchmarks.alone import Missing
from benchmarks.results import Result, save

from .made_up import GIB, MadeUp, by_name


def test_equal_settings_run_once_and_none_starts_after_the_limit(tmp_path: Path) -> None:
    now = [50.0]
    runner = MadeUp(tmp_path, limit_seconds=100.0, clock=lambda: now[0])
    now[0] += 99
    first = runner.plain("tiny", "inductor")
    assert runner.run("by another name", runner.scale.setting("tiny", "inductor")) is first
    assert list(runner.settings) == ["tiny, inductor"] and runner.samples == {"tiny, inductor": [1.6]}
    now[0] += 1
    assert runner.plain("tiny", "inductor") is first
    assert runner.plain("tiny", "teraio") == Missing(reason="not run: the 100 s are over")


def test_every_part_has_its_figures_from_trainings_that_run_once(tmp_path: Path) -> None:
    runner = MadeUp(tmp_path, fails=("host",))
    known = llama_parts(runner)
    results = [Result(part=name, seconds=1.0, figures=known[name]()[0]) for name in ("gpu_overhead", "gpu_budgets")]
    count = len(runner.settings)
    results.append(Result(part="gpu_bubble", seconds=1.0, figures=known["gpu_bubble"]()[0]))
    assert len(runner.settings) == count == len(set(runner.settings)), "bubbles share the trainings of budgets"
    written = json.loads(save(results, tmp_path / "results", "cpu").read_text())
    assert [Result.model_validate(each) for each in written["results"]] == results
    overhead, budgets, bubble = (by_name(result.figures) for result in results)
    ratio = overhead["tiny: teraio / Inductor"]
    assert ratio.value == pytest.approx(0.8) and ratio.met is False
    assert budgets["tiny, 50 %, storage: tokens/s"].note.startswith("0.800 x Inductor")
    assert bubble["tiny, inductor: idle"].value == pytest.approx(1.2)
    assert bubble["tiny, 50 %, storage: idle"].value == pytest.approx(1.5)
    assert bubble["tiny, 50 %, host: idle"].note == "tiny, 50 %, host failed"


def test_budgets_are_shares_of_the_unconstrained_peak_with_every_choice_of_tiers(tmp_path: Path) -> None:
    runner = MadeUp(tmp_path)
    figures = by_name(llama_parts(runner)["gpu_budgets"]()[0])
    assert figures["tiny: unconstrained peak"].value == 10
    for percent in (100, 70, 50, 30):
        for tiers in ("host", "storage", "host and storage"):
            name = f"tiny, {percent} %, {tiers}"
            assert runner.settings[name].options["memory_budget"] == GIB * percent // 10
            assert figures[f"{name}: peak / budget"].value == 1 and figures[f"{name}: stall"].value == 1
    layers = [name for name in runner.settings if "checkpointing" in name]
    assert layers == ["tiny, checkpointing 4", "tiny, checkpointing 3"]  # 50 and 30 % take all four
    assert figures["tiny, 70 %, checkpointing 3 of 4 layers: peak / budget"].value == pytest.approx(1.0)
    assert figures["tiny, 30 %, checkpointing 4 of 4 layers: peak / budget"].value == pytest.approx(2.0)
    assert runner.settings["tiny, eager, save_on_cpu"].save_on_cpu
    assert figures["tiny, eager: tokens/s"].value == pytest.approx(375)


@pytest.mark.parametrize("part", ["gpu_links", "gpu_optimizer"])
def test_the_other_parts_have_figures_too(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one without a value for what has failed."""
    monkeypatch.setattr(gpu_links, "SLOTS", 2)
    monkeypatch.setattr("benchmarks.engine.SLOTS", 2)
    monkeypatch.setitem(gpu_links.COPY_BYTES, "cpu", 1 << 20)
    figures = by_name(llama_parts(MadeUp(tmp_path))[part]()[0])
    assert any(figure.value for figure in figures.values())
    figures = by_name(llama_parts(MadeUp(tmp_path, fails=("host",)))[part]()[0])
    assert any(figure.value is None and figure.note.endswith("failed") for figure in figures.values())
