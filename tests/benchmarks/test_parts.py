"""The benchmark: its command, and its parts at their smallest or with trainings that nobody runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import emulated, gpu_links
from benchmarks.__main__ import llama_parts, main
from benchmarks.alone import Missing
from benchmarks.emulated import Emulation
from benchmarks.idle_stages import IdleStages
from benchmarks.idle_training import IdleTraining
from benchmarks.layer_by_layer import layer_by_layer
from benchmarks.planner_cases import cases, outcomes_of
from benchmarks.planner_policies import samples_of
from benchmarks.planning import planned_apart
from benchmarks.rank_optimizer import BYTES_EACH
from benchmarks.rank_optimizer import POLICIES as RANK_POLICIES
from benchmarks.ranks import RANKS, Ranks
from benchmarks.results import Result, save, versions
from benchmarks.variants import budgets_for, with_errors, with_rates, with_times
from examples.gpt import GPTConfig
from examples.training import Setting
from planner import Budgets, plan, simulate
from planner.errors import TeraioError
from planner.policies import POLICIES
from tools.made_up_cuda.build import BuildError
from tools.made_up_cuda.emulated import build

from ..planner.traces import hand, hardware, staged, subgroup, trace, trained
from .made_up import GIB, MadeUp, by_name


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


# -- planner: variants of traces, arithmetic, processes, real plans of small cases

CHAIN = hand("chain")


def test_variants_have_other_rates_and_bounded_repeatable_errors() -> None:
    slow = with_rates(CHAIN, 0.5)
    assert slow.fingerprint != CHAIN.fingerprint and (slow.stages, slow.blocks) == (CHAIN.stages, CHAIN.blocks)
    # Four copies of 10 bytes that nothing hides (traces/README.md): 6 s + 4 x 2 s.
    assert simulate(slow, plan(slow, budgets_for(slow, 10))).iteration_seconds == pytest.approx(14.0)
    assert with_times(CHAIN, [2.0] * 6).ideal_seconds == 2 * CHAIN.ideal_seconds == 12.0
    first, second, again = (with_errors(CHAIN, seed=seed, largest=0.25) for seed in (0, 1, 0))
    assert first.fingerprint == again.fingerprint != second.fingerprint
    pairs = zip(CHAIN.stages, first.stages, strict=True)
    assert all(0.75 <= after.duration_seconds / before.duration_seconds <= 1.25 for before, after in pairs)


def test_a_plan_is_made_in_a_process_of_its_own(tmp_path: Path) -> None:
    planned = planned_apart(CHAIN, 20, tmp_path)
    assert planned.iteration_seconds == pytest.approx(6.0)
    assert planned.over_bound == pytest.approx(1.0)
    assert 0 <= planned.build_seconds + planned.solve_seconds < planned.plan_seconds
    assert planned.seconds > planned.plan_seconds
    assert 20 << 20 < planned.process_bytes < 1 << 30
    assert (tmp_path / "plan.json").exists()


def test_every_policy_is_measured_by_the_simulator_or_refuses() -> None:
    listed = list(cases({"chain": CHAIN}))
    assert len(listed) == 12 and len({case.name for case in listed}) == 12
    tight = next(case for case in listed if case.name == "chain | floor + 5 % | x2")
    found = outcomes_of(tight, tuple(POLICIES))
    assert [one.policy for one in found] == list(POLICIES)
    by_policy = {one.policy: one for one in found}
    assert by_policy["keep-all"].refusal == "BudgetError"
    # Four copies of half a second each: 8 s instead of 6.
    assert by_policy["ilp"].over_ideal == pytest.approx(8 / 6)
    assert all(one.over_bound >= 1 - 1e-9 for one in found)
    samples = samples_of(found)
    assert samples["chain | floor + 5 % | x2 | keep-all | BudgetError"] == []
    assert samples["chain | floor + 5 % | x2 | ilp"][0] == pytest.approx(8 / 6)


# -- Llamas: which trainings run, in what setting, and what becomes of them


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


# -- host_cost


@pytest.fixture(params=[IdleStages, IdleTraining])
def moving(request: pytest.FixtureRequest) -> Iterator[IdleStages | IdleTraining]:
    made = request.param(500)
    yield made
    made.close()


def test_an_iteration_without_arithmetic_moves_what_is_planned(moving: IdleStages | IdleTraining) -> None:
    pager = moving.pager
    moving.iterate()
    before, pager.account.peak_bytes = pager.account.evictions, 0
    moving.iterate()
    assert pager.account.evictions - before == len(moving.moves) >= 1900
    assert pager.account.budget_bytes is not None and 0 < pager.account.peak_bytes <= pager.account.budget_bytes
    assert pager.account.waited_seconds == 0


# -- several ranks, an emulated GPU


def test_ranks_take_their_steps_together(tmp_path: Path) -> None:
    assert {*RANK_POLICIES} <= {*POLICIES} and BYTES_EACH.keys() <= Setting.model_fields.keys()
    small = GPTConfig(layers=1, width=16, heads=1, context=8)
    with Ranks(Setting(model=small, batch=1, backend="eager", zero=True, text_bytes=1 << 12), tmp_path / "{rank}.log") as ranks:
        losses = [ranks.step().loss for _ in range(2)]
        reports = ranks.finish()
    assert len(reports) == RANKS and all(0 < loss < 10 for loss in losses)
    assert len(list(tmp_path.glob("*.log"))) == RANKS


def test_what_the_emulated_gpu_lacks_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed_torch() -> None:
        raise BuildError("this torch is built without CUDA")

    monkeypatch.setattr(build, "installed_torch", installed_torch)
    with pytest.raises(TeraioError, match="^no emulated GPU: this torch is built without CUDA$"):
        emulated.measure(Emulation(output=tmp_path))


# -- the optimizer's step, layer by layer


@pytest.mark.parametrize("device_bytes", [4, 9])
def test_layer_by_layer_no_copy_in_for_a_subgroup_starts_before_its_turn(device_bytes: int) -> None:
    """Four layers of a forward, a backward and an update; a weight, a gradient and a state of a byte, a byte a second."""
    blocks = [each for i in range(4) for each in trained((1, 1, 1), [i, 7 - i], 7 - i, 8 + i)]
    subgroups = [subgroup(8 + i, range(3 * i, 3 * i + 3), 4.0, None) for i in range(4)]
    given = trace(staged("ffffbbbboooo", 4.0), blocks, hardware(rate=1.0), subgroups=subgroups)
    made = layer_by_layer(given, Budgets(device_bytes=device_bytes))
    assert made.policy == "layer-by-layer" and made.trace_fingerprint == given.fingerprint
    for move in made.moves:
        assert move.prefetch is not None
        if move.before % 12 >= 8:
            assert move.prefetch.start == move.before, "nothing comes before the update begins"
        assert move.prefetch.start % 12 < 8 or move.prefetch.start == move.before, "nor for others meanwhile"
    replayed = simulate(given, made)
    assert replayed.peak_bytes["device"] <= device_bytes
    best = plan(given, Budgets(device_bytes=device_bytes)).predicted
    assert best is not None and replayed.iteration_seconds > best.iteration_seconds
