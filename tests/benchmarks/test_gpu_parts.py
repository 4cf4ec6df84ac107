"""The parts that train Llamas: which trainings run, what becomes of them, and the arithmetic of every figure."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_links
from benchmarks.__main__ import llama_parts, llama_scale_for
from benchmarks.alone import TRAININGS, LlamaScale, Missing, Outcome, Run, Runner, speed
from benchmarks.gpu_bubble import idle
from benchmarks.gpu_budgets import budget_figures, options_for, plain_figures
from benchmarks.results import Figure
from examples.llama import SIZES
from examples.training import Report, Setting, Step
from planner import Budgets, Hardware, Link, Trace, plan
from planner.schema import Block, Stage

GIB = 2**30


def a_trace() -> Trace:
    links = (
        Link(from_tier="device", to_tier="storage", bytes_per_second=1e9, latency_seconds=0.0),
        Link(from_tier="storage", to_tier="device", bytes_per_second=2e9, latency_seconds=0.0),
    )
    hardware = Hardware(name="made up", device_memory_bytes=16 * GIB, storage_bytes=64 * GIB, links=links)
    stages = tuple(
        Stage(id=index, name=f"stage {index}", phase="forward", duration_seconds=0.5, workspace_bytes=0) for index in range(4)
    )
    blocks = tuple(
        Block(
            id=index,
            name=f"block {index}",
            kind="parameter",
            size_bytes=GIB,
            persistent=True,
            reads=(2 * index,),
            writes=(),
            movable=True,
        )
        for index in range(2)
    )
    return Trace(name="made up", created_by="test", hardware=hardware, stages=stages, blocks=blocks)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return a_trace()


def steps(*seconds: float) -> tuple[Step, ...]:
    return tuple(Step(loss=1.0, seconds=each, tokens=600, phase="planned", resident_bytes={}) for each in seconds)


def run(*seconds: float, peak: int = GIB, **changes: Any) -> Run:
    report = Report(peak_bytes=peak, rest_bytes=0, parameters=1, status=changes.pop("status", None))
    report = report.model_copy(update={"peak_reserved_bytes": changes.pop("reserved", None)})
    fields: dict[str, Any] = {"phase": "", "moved_bytes": {}, "busy_seconds": None, "report": report} | changes
    return Run(steps=steps(*seconds), **fields)


def by_name(figures: Iterator[Figure] | tuple[Figure, ...]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def tiny_scale(folder: Path, **changes: Any) -> LlamaScale:
    scale = llama_scale_for("cpu", folder, 2, sizes=[], dtype=None, minutes=10, batch=1, context=16)
    return replace(scale, **changes)


class MadeUp(Runner):
    """Runs nothing: outcomes by what the setting is."""

    def __init__(
        self, folder: Path, *, fails: tuple[str, ...] = (), clock: Callable[[], float] = lambda: 0.0, **changes: Any
    ) -> None:
        super().__init__(tiny_scale(folder, **changes), clock)
        self.settings: dict[str, Setting] = {}
        self.fails = fails

    def _measured(self, name: str, setting: Setting, program: str) -> Outcome:
        self.settings[name] = setting
        if any(word in name for word in self.fails):
            return Missing(reason=f"{name} failed")
        if setting.backend == "teraio":
            budget = setting.options.get("memory_budget")
            status = {"ideal_iteration_seconds": 1.0, "device_peak_bytes": budget}
            moved = {} if budget is None else {"device->storage": 1e9}
            peak = budget or 10 * GIB
            return run(2.0, peak=peak, status=status, phase="demand", moved_bytes=moved, busy_seconds=0.5, trace=a_trace())
        layers = setting.model.checkpointed_layers
        return run(1.6, peak=10 * GIB - layers * GIB, busy_seconds=0.4)


# -- trainings


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


def test_a_training_that_is_refused_is_missing_with_its_reason(tmp_path: Path) -> None:
    scale = tiny_scale(tmp_path)
    outcome = Runner(scale).run("refused", scale.setting("tiny", options={"no_such_option": 1}))
    assert isinstance(outcome, Missing) and "no_such_option" in outcome.reason
    assert speed("x", outcome).note == outcome.reason


def test_a_setting_has_the_scale_and_what_is_asked_for(tmp_path: Path) -> None:
    scale = tiny_scale(tmp_path, dtype="bfloat16")
    setting = scale.setting("llama-3-8b", "eager", checkpointed_layers=3, save_on_cpu=True)
    assert setting.model == replace(SIZES["llama-3-8b"], context=16, checkpointed_layers=3)
    assert (setting.batch, setting.dtype, setting.save_on_cpu, setting.backend) == (1, "bfloat16", True, "eager")
    assert Setting.model_validate_json(setting.model_dump_json()) == setting


# -- figures


def test_figures_of_a_budget(trace: Trace) -> None:
    base = run(0.5, 1.0, 1.5, peak=10 * GIB)
    made = plan(trace, Budgets(device_bytes=GIB))
    assert made.predicted is not None
    outcome = run(
        2.0,
        4.0,
        3.0,
        peak=3 * GIB,
        reserved=4 * GIB,
        phase="planned",
        trace=trace,
        plan=made,
        status={"ideal_iteration_seconds": 2.0, "device_peak_bytes": 2 * GIB},
        moved_bytes={"device->storage": 1.5e9, "host->device": 1e9},
    )
    figures = by_name(budget_figures("x", outcome, 2 * GIB, base))
    assert figures["x: tokens/s"].value == pytest.approx(200)
    assert figures["x: tokens/s"].note == "0.333 x Inductor; planned; 3 iterations from 2 to 4 s"
    assert figures["x: peak / budget"].value == pytest.approx(1.5) and figures["x: peak / budget"].met is False
    assert figures["x: peak / budget"].note == "3.000 of 2.000 GiB, 2.000 by teraio's own count"
    assert figures["x: reserved / budget"].value == pytest.approx(2.0)
    assert figures["x: stall"].value == pytest.approx(1.0)
    assert figures["x: bound / measured"].value == pytest.approx(made.predicted.lower_bound_seconds / 3)
    assert figures["x: use of device->storage"].value == pytest.approx(0.5)
    unknown = figures["x: use of host->device"]
    assert unknown.value is None and unknown.note == "0.931 GiB an iteration"


def test_the_host_tier_on_the_cpu_does_not_count_as_device_memory() -> None:
    """There, it is memory of the same process."""
    status = {"ideal_iteration_seconds": 1.0, "device_peak_bytes": GIB}
    moved = {"device->host": 1.0, "host->device": 1.0}
    outcome = run(1.0, peak=5 * GIB, status=status, moved_bytes=moved)
    peak = by_name(budget_figures("x", outcome, 2 * GIB, outcome))["x: peak / budget"]
    assert peak.value == 0.5 and peak.note == "1.000 of 2.000 GiB by teraio's own count; 5.000 with the host tier"
    outcome = run(1.0, peak=5 * GIB, reserved=5 * GIB, status=status, moved_bytes=moved)
    assert by_name(budget_figures("x", outcome, 2 * GIB, outcome))["x: peak / budget"].value == 2.5


def test_without_a_plan_nothing_is_compared_with_the_bound() -> None:
    outcome = run(1.0, phase="fits", status={"ideal_iteration_seconds": None, "device_peak_bytes": 1})
    figures = by_name(budget_figures("x", outcome, GIB, outcome))
    assert figures["x: bound / measured"].value is None and figures["x: bound / measured"].note.endswith("fits")
    assert figures["x: stall"].value is None
    assert "x: reserved / budget" not in figures


def test_figures_of_what_has_no_budget_and_of_what_is_missing() -> None:
    base = run(1.0)
    figures = by_name(plain_figures("x", run(2.0, peak=3 * GIB, reserved=4 * GIB), base))
    assert figures["x: peak"].value == 3 and figures["x: peak"].note == "reserved 4.000 GiB"
    (only,) = plain_figures("x", Missing(reason="no room"), base)
    assert only.value is None and only.note == "no room"


def test_idle_time_is_what_the_device_did_not_compute() -> None:
    assert idle("x", run(2.0, busy_seconds=1.5)).value == pytest.approx(0.5)
    assert idle("x", run(2.0, busy_seconds=1.5)).note == "25.0% of 2 s"
    assert idle("x", run(2.0)).note == "the profiler saw nothing on the device"
    assert idle("x", Missing(reason="no room")).note == "no room"


@pytest.mark.parametrize(
    ("tiers", "names"),
    [("host", {"host_budget"}), ("storage", {"storage"}), ("host and storage", {"host_budget", "storage"})],
)
def test_options_name_the_tiers(tiers: str, names: set[str], tmp_path: Path) -> None:
    options = options_for(500, 1000, tiers, tmp_path)
    assert options.pop("memory_budget") == 500
    assert set(options) == names
    assert options.get("host_budget", 1250 if tiers == "host" else 250) == (1250 if tiers == "host" else 250)


# -- parts


def test_overhead_compares_tokens_per_second(tmp_path: Path) -> None:
    figures = by_name(llama_parts(MadeUp(tmp_path))["gpu_overhead"]()[0])
    ratio = figures["tiny: teraio / Inductor"]
    assert ratio.value == pytest.approx(0.8) and ratio.met is False
    broken = by_name(llama_parts(MadeUp(tmp_path, fails=("inductor",)))["gpu_overhead"]()[0])
    assert broken["tiny: teraio / Inductor"].value is None
    assert broken["tiny, Inductor: tokens/s"].note == "tiny, inductor failed"


def test_the_headline_needs_three_trainings_which_later_parts_share(tmp_path: Path) -> None:
    runner = MadeUp(tmp_path)
    known = llama_parts(runner)
    figures = by_name(known["gpu_headline"]()[0])
    assert list(runner.settings) == ["tiny, inductor", "tiny, 50 %, host", "tiny, 30 %, host"]
    assert figures["tiny, 30 %, host: peak / budget"].value == 1
    assert "0.800 x Inductor" in figures["tiny, 50 %, host: tokens/s"].note
    known["gpu_budgets"]()
    assert list(runner.settings)[:3] == ["tiny, inductor", "tiny, 50 %, host", "tiny, 30 %, host"]
    assert len(runner.settings) == len(set(runner.settings)), "none ran twice"


def test_each_training_is_on_disk_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    runner = MadeUp(tmp_path, fails=("30 %",))
    lines = []

    def written() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / TRAININGS).read_text().splitlines()]

    plain = runner.plain
    runner.plain = lambda size, backend: (plain(size, backend), lines.append(len(written())))[0]  # type: ignore[method-assign]
    llama_parts(runner)["gpu_headline"]()
    assert lines[0] == 1, "before the next one began"
    first, second, third = written()
    assert (first["training"], first["tokens_per_second"]) == ("tiny, inductor", pytest.approx(375))
    assert second["steps"][0]["seconds"] == 2.0 and second["report"]["parameters"] == 1
    assert second["setting"]["options"]["memory_budget"] == 5 * GIB
    assert third["missing"] == "tiny, 30 %, host failed"


def test_groups_of_iterations_count_with_their_size() -> None:
    grouped = run(2.0)
    step = grouped.steps[0].model_copy(update={"iterations": 5})
    outcome = replace(grouped, steps=(step, step.model_copy(update={"seconds": 1.0})))
    assert outcome.spread == "10 iterations in 2 groups from 1 to 2 s" and outcome.seconds == 1.5


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


def test_where_inductor_does_not_fit_the_trace_tells_the_peak(tmp_path: Path) -> None:
    runner = MadeUp(tmp_path, fails=("inductor",))
    figures = by_name(llama_parts(runner)["gpu_budgets"]()[0])
    assert figures["tiny: unconstrained peak"].value == 2
    assert runner.settings["tiny, 50 %, storage"].options["memory_budget"] == GIB
    hopeless = by_name(llama_parts(MadeUp(tmp_path, fails=("tiny",)))["gpu_budgets"]()[0])
    assert hopeless["tiny: unconstrained peak"].note == (
        "Inductor: tiny, inductor failed; teraio: tiny, nearly all memory failed"
    )


def test_bubbles_share_the_budgets_trainings(tmp_path: Path) -> None:
    runner = MadeUp(tmp_path, fails=("host",))
    known = llama_parts(runner)
    known["gpu_overhead"]()
    known["gpu_budgets"]()
    count = len(runner.settings)
    figures = by_name(known["gpu_bubble"]()[0])
    assert len(runner.settings) == count
    assert figures["tiny, inductor: idle"].value == pytest.approx(1.2)
    assert figures["tiny, 50 %, storage: idle"].value == pytest.approx(1.5)
    assert figures["tiny, 50 %, host: idle"].note == "tiny, 50 %, host failed"


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
