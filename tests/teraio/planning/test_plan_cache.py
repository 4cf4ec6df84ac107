"""Kept plans: what is found in their folder, what is refused and why; and that a second start follows the plan of the first."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import planner
import teraio
from planner import Budgets, Link, Plan, Trace
from runtime.execution import Program, Stage
from runtime.system import frozen
from teraio.options import Options
from teraio.planning import PlanCache, plan_cache, save
from teraio.planning.plan_cache import refit
from teraio.registry import REGISTRY

from ...training import MIB, Training, random_rows, unequal, weights_of_1_mib
from ..in_process import InstantJob
from ..traces import CHAIN

PLAN = planner.plan(CHAIN, Budgets(device_bytes=20), policy="belady", lower_bound=False)
CPU = torch.device("cpu")


def nothing(values: list[Any]) -> Sequence[Any]:
    return ()


def program(**changed: Any) -> Program:
    stage = Stage(
        name="forward/0",
        phase="forward",
        run=nothing,
        inputs=(0,),
        outputs=(1,),
        frees=(),
        next_uses=(-1, -1),
        input_bytes=10,
        output_bytes=10,
        workspace_bytes=0,
    )
    whole = Program(
        identity=0,
        name="forward",
        phase="forward",
        stages=(replace(stage, **changed),),
        input_count=1,
        slot_names=("weight", "output"),
        slot_kinds=("parameter", "activation"),
        results=(1,),
        user_results=(0,),
        kept_bytes=10,
        small_bytes=0,
    )
    return whole


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanCache]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda **options: PlanCache(Options(**options), CPU)


def keep(cache: PlanCache, kept: Program, plan: Plan = PLAN) -> None:
    cache.keep(kept, CHAIN.hardware, CHAIN, plan)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "teraio" / "plans").glob("*"))


def test_what_is_kept_is_found_by_another_process_of_the_same_training(cache: Callable[..., PlanCache]) -> None:
    """Its graphs have other identities and functions there."""
    assert cache().find(program()) is None
    keep(cache(), program())
    found = cache().find(replace(program(run=lambda values: ()), identity=7))
    assert found is not None and (found.trace, found.plan, found.hardware) == (CHAIN, PLAN, CHAIN.hardware)
    assert found.made_for["torch"] == torch.__version__ and found.made_for["memory_budget"] == "None"


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (program(name="forward/1"), {}),
        (program(mutates=(0,)), {}),
        (program(), {"memory_budget": 1 << 20}),
        (program(), {"solver_time_limit": 60.0}),
    ],
)
def test_other_trainings_and_planners_have_other_plans(
    cache: Callable[..., PlanCache], other: Program, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache(), program())
    assert cache(**options).find(other) is None
    assert cache(plan_out=Path("elsewhere"), replan=False).find(program()) is not None, "no plan depends on these"
    monkeypatch.setattr(plan_cache, "planner_digest", lambda: "another planner")
    assert cache().find(program()) is None


def test_reading_only_and_off(cache: Callable[..., PlanCache], tmp_path: Path) -> None:
    keep(cache(plan_cache="read"), program())
    keep(cache(plan_cache="off"), program())
    assert not files(tmp_path)
    keep(cache(), program())
    assert cache(plan_cache="read").find(program()) is not None and cache(plan_cache="off").find(program()) is None


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    content = json.loads(gzip.decompress(path.read_bytes()))
    change(content)
    return gzip.compress(json.dumps(content).encode())


def test_files_that_are_no_plan_for_this_training_are_ignored_and_replaced(
    cache: Callable[..., PlanCache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(cache(), program(name="forward/1"))
    (foreign,) = files(tmp_path)
    keep(cache(), program())
    (path,) = set(files(tmp_path)) - {foreign}
    good = path.read_bytes()
    cases = {
        good[: len(good) // 2]: "not a whole gzip file",
        b"": "malformed JSON",
        foreign.read_bytes(): "it was made for another training, machine or version",
        changed(path, lambda content: content["trace"]["stages"][0].update(duration_seconds=9.0)): "made for another trace",
        changed(path, lambda content: content.update(version=2)): "version 2 is not known",
    }
    for content, message in cases.items():
        caplog.clear()
        path.write_bytes(content)
        damaged = cache()
        assert damaged.find(program()) is None and damaged.find(program()) is None
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith(f"a kept plan is ignored, and replaced by the next plan: {path}: ") and message in warning
        keep(damaged, program())
        assert cache().find(program()) is not None


def test_a_folder_that_cannot_be_written_is_warned_of_once(
    cache: Callable[..., PlanCache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "teraio").write_text("a file in its place")
    without = cache()
    assert without.find(program()) is None
    keep(without, program())
    keep(without, program())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"the plan could not be kept in {tmp_path / 'teraio' / 'plans'}: ")


def test_the_oldest_files_go(cache: Callable[..., PlanCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MOST_FILES", 2)
    for number in range(4):
        keep(cache(), program(name=f"forward/{number}"))
        newest = max(files(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    found = [cache().find(program(name=f"forward/{number}")) is not None for number in range(4)]
    assert found == [False, False, True, True]


def test_writers_at_the_same_time_leave_a_whole_file(cache: Callable[..., PlanCache], tmp_path: Path) -> None:
    """Each has a cache of its own, as in two processes. Whoever reads meanwhile finds the plan of one of them."""

    def keep_often(seconds: float) -> None:
        plan = PLAN.model_copy(update={"solver": PLAN.solver.model_copy(update={"build_seconds": seconds})})
        for _ in range(20):
            keep(cache(), program(), plan)

    keep(cache(), program())
    with ThreadPoolExecutor() as writers:
        writing = [writers.submit(keep_often, seconds) for seconds in (1.0, 2.0)]
        while not all(each.done() for each in writing):
            assert cache().find(program()) is not None
    assert [each.result() for each in writing] == [None, None]
    found = cache().find(program())
    assert found is not None and found.plan.solver.build_seconds in (1.0, 2.0) and len(files(tmp_path)) == 1


# -- whether a plan fits this start


KEPT = plan_cache.KeptPlan(key="", made_for={}, hardware=CHAIN.hardware, trace=CHAIN, plan=PLAN)


def scaled(factor: float) -> planner.Hardware:
    links = tuple(link.model_copy(update={"bytes_per_second": factor * link.bytes_per_second}) for link in CHAIN.hardware.links)
    return CHAIN.hardware.model_copy(update={"links": links})


def test_rates_may_vary_from_start_to_start() -> None:
    for factor in (1.0, 0.3, 3.0):
        found = refit(KEPT, scaled(factor), PLAN.budgets)
        assert isinstance(found, Plan) and found.moves == PLAN.moves
    for factor in (0.1, 10.0):
        assert " GB/s when it was made" in str(refit(KEPT, scaled(factor), PLAN.budgets))
    other = Link(from_tier="device", to_tier="host", bytes_per_second=1.0)
    assert "it is for the links" in str(refit(KEPT, scaled(1.0).model_copy(update={"links": (other,)}), PLAN.budgets))


def test_budgets_may_be_a_little_different() -> None:
    found = refit(KEPT, CHAIN.hardware, Budgets(device_bytes=21))
    assert isinstance(found, Plan) and found.budgets.device_bytes == 21
    assert refit(KEPT, CHAIN.hardware, Budgets(device_bytes=40)) == "it is for 20 bytes on the device, and there are 40 now"
    assert isinstance(refit(KEPT, CHAIN.hardware, Budgets(device_bytes=5)), str)


# -- a second start: nothing is profiled or solved, and no bit changes


def start(options: dict[str, Any] | None) -> tuple[list[str], list[torch.Tensor], Training]:
    """Train from the beginning. Returns the phase after each step, and the weights at the end."""
    training = weights_of_1_mib(options, count=4, kind=torch.optim.AdamW, lr=0.01)
    torch.manual_seed(1)
    training.run(random_rows(4), planned=True)
    phases = [status.phase for (status,) in training.progress] if options is not None else []
    return phases, list(training.finish().values()), training


def test_a_second_start_follows_its_plan_from_the_second_iteration_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_links: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its optimizer makes its states in the first one. A plan that fits no more is made again."""
    made, folder = list[Trace](), tmp_path / "cache" / "teraio" / "plans"

    def start_job(trace: Trace, budgets: Budgets, **others: Any) -> InstantJob:
        made.append(trace)
        return InstantJob(trace, planner.plan(trace, budgets, policy="belady", lower_bound=False))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=start_job))
    options = {"memory_budget": 10 * MIB, "storage": tmp_path, "profile_iterations": 1, "replan": False}
    options |= {"plan_cache": "read-write"}
    wanted = start(None)[1]

    phases, cold, _ = start(options)
    assert phases == ["profile", "profile", "planning", "planned"] and len(made) == 1 and len(list(folder.iterdir())) == 1

    caplog.clear()  # the training without teraio may have been told that it is not managed
    with caplog.at_level(logging.INFO, logger="teraio"):
        phases, warm, training = start({**options, "trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"})
    assert phases == ["planned"] * 4 and len(made) == 1
    assert not unequal(cold, wanted) and not unequal(warm, wanted)
    (status,) = training.progress[-1]
    assert status.deviations == 0 and status.floor_bytes and status.moved_bytes["device->storage"] > 0
    assert Plan.load(tmp_path / "plan.json").trace_fingerprint == Trace.load(tmp_path / "trace.json").fingerprint
    messages = [record.getMessage() for record in caplog.records if record.name == "teraio"]
    assert messages[0] == "the plan of an earlier start fits: nothing is profiled and nothing is solved"
    assert not any(message.startswith("optimizers are updated in subgroups") for message in messages), "the plan has their size"

    assert start({**options, "memory_budget": 11 * MIB})[0][0] == "profile" and len(made) == 2
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(plan_cache, "_RATES_DIFFER", 0.5)  # no rate is near enough
    with caplog.at_level(logging.INFO, logger="teraio"):
        assert start(options)[0][0] == "profile" and len(made) == 3
    assert "the plan of an earlier start is not used: device->storage carries" in caplog.text


# -- what is written of a trace and a plan: files, which cannot end a training


def test_the_path_is_given_only_if_the_file_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    assert save(CHAIN, path) == path and Trace.load(path).stages == CHAIN.stages
    assert save(CHAIN, None) is None
    assert save(CHAIN, tmp_path / "gone" / "trace.json") is None
    (record,) = caplog.records
    assert "the trace could not be written to" in record.message and "training goes on without" in record.message


def test_as_long_as_a_plan_is_followed_the_collector_passes_over_what_training_holds(unfrozen: None, tmp_path: Path) -> None:
    options = {"memory_budget": 10 * MIB, "storage": tmp_path, "profile_iterations": 1}
    training = weights_of_1_mib(options, count=12)
    held: dict[str, list[bool]] = {}

    def step(batch: Tensor, index: int) -> None:
        training.mean_square_step(batch)
        held.setdefault(teraio.status()[-1].phase, []).append(frozen())

    training.run(random_rows(8), step, planned=True)
    assert not any(held["profile"]) and held["planned"] and all(held["planned"])
    training.finish()
    assert not frozen()
