"""The parts that train Llamas: which trainings run, in what setting, and what becomes of them."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_links, gpu_optimizer
from benchmarks.__main__ import llama_parts
from benchmarks.alone import Missing
from benchmarks.results import Result, save
from planner import Plan

from .made_up import GIB, MadeUp, a_trace, by_name


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


def test_links_are_compared_with_raw_copies_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_links, "SLOTS", 2)
    monkeypatch.setattr("benchmarks.engine.SLOTS", 2)
    monkeypatch.setitem(gpu_links.COPY_BYTES, "cpu", 1 << 20)
    measured, samples = llama_parts(MadeUp(tmp_path, fails=("host",)))["gpu_links"]()
    figures = by_name(measured)
    assert set(samples) == {"device->host", "host->device", "device->storage", "storage->device"}
    raw = figures["raw, storage->device"].value
    assert raw is not None and figures["engine / raw, storage->device"].value == pytest.approx(2 / raw)
    assert figures["engine / raw, host->device"].value is None
    assert figures["tiny, 50 %, host and storage: tokens/s"].note == "tiny, 50 %, host and storage failed"
    assert "tiny, 100 %, storage: tokens/s" not in figures  # half of the peak had told


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
        assert figures[f"tiny, {policy}: tokens/s"].note.startswith("0.800 x Inductor")
    refused = figures["tiny, no-such-policy: tokens/s"]
    assert refused.value is None and refused.note.startswith("no plan: OptionsError: policy 'no-such-policy' is not known")
    assert "tiny, no-such-policy" not in runner.settings
    (only,) = llama_parts(MadeUp(tmp_path, fails=("host",)))["gpu_optimizer"]()[0]
    assert (only.value, only.note) == (None, "tiny, 30 %, host failed")
