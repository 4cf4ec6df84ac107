"""Advice on small traces: what fits, what a change does, and the plan behind each line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import planner
from planner.problem import SolverSettings, live_bytes
from planner.schema import Budgets, Link
from teraio.advice import Advice, Answer, advise, with_accumulation, with_batch, with_state_bytes, with_storage_rate
from teraio.cli.commands import app

MIB = 1 << 20


def training(*, storage_rate: float = 1e8, host: bool = True) -> planner.Trace:
    """Two layers, each with a parameter, an activation, a gradient and a state; one update at the end."""
    stages = [
        planner.Stage(id=number, name=name, phase=phase, duration_seconds=1.0, workspace_bytes=MIB)
        for number, (name, phase) in enumerate(
            [("f0", "forward"), ("f1", "forward"), ("b1", "backward"), ("b0", "backward"), ("o", "optimizer")]
        )
    ]

    def block(number: int, kind: str, size: int, reads: tuple[int, ...], writes: tuple[int, ...], persistent: bool = False):
        return planner.Block(
            id=number, name=f"{kind}{number}", kind=kind, size_bytes=size * MIB, persistent=persistent, reads=reads, writes=writes
        )

    blocks = [
        block(0, "parameter", 8, (0, 3, 4), (4,), True),
        block(1, "parameter", 8, (1, 2, 4), (4,), True),
        block(2, "activation", 20, (3,), (0,)),
        block(3, "activation", 20, (2,), (1,)),
        block(4, "gradient", 8, (4,), (2,)),
        block(5, "gradient", 8, (4,), (3,)),
        block(6, "optimizer_state", 32, (4,), (4,), True),
    ]
    links = [("device", "storage", storage_rate), ("storage", "device", storage_rate)]
    if host:
        links += [("device", "host", 1e9), ("host", "device", 1e9)]
    return planner.Trace.build(
        name="training",
        hardware=planner.Hardware(
            name="machine",
            device_memory_bytes=1 << 30,
            host_memory_bytes=1 << 30 if host else 0,
            storage_bytes=1 << 34,
            links=tuple(Link.model_validate({"from": a, "to": b, "bytes_per_second": rate}) for a, b, rate in links),
        ),
        stages=tuple(stages),
        blocks=tuple(blocks),
        subgroups=(planner.Subgroup(id=0, stage=4, blocks=(0, 1, 4, 5, 6), elements=4 * MIB, device_seconds=1.0),),
        recompute=(
            planner.RecomputeGroup(id=0, stage=0, blocks=(2,), reads=(0,), duration_seconds=1.0, workspace_bytes=MIB),
            planner.RecomputeGroup(id=1, stage=1, blocks=(3,), reads=(1,), duration_seconds=1.0, workspace_bytes=MIB),
        ),
    )


SETTINGS = SolverSettings(time_limit_seconds=10.0, gap=0.0, threads=1)
FLOOR = planner.floor(training())[0]
TIGHT = Budgets(device_bytes=FLOOR + 4 * MIB, host_bytes=16 * MIB)


def by_case(advice: Advice) -> dict[str, Answer]:
    return {answer.what: answer for answer in advice.answers}


def test_each_case_is_answered() -> None:
    answers = by_case(advise(training(), TIGHT, settings=SETTINGS))
    assert list(answers) == [
        "as asked",
        "25% more device memory",
        "one more drive",
        "twice the host memory",
        "without recomputation",
        "twice the batch",
        "twice the accumulation",
        "optimizer states in bf16",
    ]
    asked = answers["as asked"]
    assert asked.fit == "yes" and asked.speed == 1.0 and asked.predicted is not None
    assert asked.floor_bytes == FLOOR and asked.ideal_seconds == 5.0
    assert answers["twice the accumulation"].ideal_seconds == 9.0, "all but the update twice"


def test_more_is_never_slower() -> None:
    for size in range(FLOOR, FLOOR + 60 * MIB, 7 * MIB):
        answers = by_case(advise(training(), TIGHT.model_copy(update={"device_bytes": size}), settings=SETTINGS))
        for more in ("25% more device memory", "twice the host memory"):
            speed = answers[more].speed
            assert speed is not None and speed >= 1.0


def test_what_holds_a_training_up() -> None:
    slow = by_case(advise(training(host=False), Budgets(device_bytes=FLOOR), settings=SETTINGS))
    assert "storage" in slow["as asked"].holds_up
    faster = slow["one more drive"].speed
    assert faster is not None and faster > 1.0
    roomy = by_case(advise(training(), Budgets(device_bytes=1 << 30), settings=SETTINGS))
    assert roomy["as asked"].holds_up == "" and roomy["as asked"].written_bytes_per_day == 0.0


def test_no_plan_exists_is_told_apart_from_none_was_found() -> None:
    below = advise(training(), Budgets(device_bytes=FLOOR - 1), settings=SETTINGS).answers[0]
    assert below.fit == "no plan exists" and "too small" in below.reason
    nowhere = Budgets(device_bytes=FLOOR, host_bytes=MIB, storage_bytes=MIB)
    full = by_case(advise(rebuilt_without_groups(training()), nowhere, settings=SETTINGS))["as asked"]
    assert full.fit == "none was found" and full.reason


def rebuilt_without_groups(trace: planner.Trace) -> planner.Trace:
    return trace.model_copy(update={"recompute": ()})


def test_how_long_drives_last() -> None:
    trace = training(host=False)
    once, twice = (
        advise(trace, Budgets(device_bytes=FLOOR), settings=SETTINGS, drives=drives, rated_bytes=10**12).answers[0]
        for drives in (1, 2)
    )
    assert once.predicted is not None and once.lifetime_days is not None and twice.lifetime_days is not None
    iterations = 10**12 / once.predicted.storage_written_bytes
    assert once.lifetime_days == pytest.approx(iterations * once.predicted.iteration_seconds / 86_400)
    assert twice.lifetime_days == pytest.approx(2 * once.lifetime_days)


def test_a_larger_batch_grows_what_depends_on_it() -> None:
    before, after = training(), with_batch(training(), 2)
    assert [s.duration_seconds for s in after.stages] == [2.0, 2.0, 2.0, 2.0, 1.0]
    sizes = {block.name: block.size_bytes // MIB for block in after.blocks}
    assert sizes["activation2"] == 40 and sizes["gradient4"] == 8 and sizes["optimizer_state6"] == 32
    assert max(live_bytes(after)) > max(live_bytes(before))


def test_accumulation_runs_the_passes_twice() -> None:
    trace = with_accumulation(training())
    assert [stage.name for stage in trace.stages] == ["f0", "f1", "b1", "b0", "f0", "f1", "b1", "b0", "o"]
    assert [group.stage for group in trace.recompute] == [0, 1, 4, 5]
    gradient = next(block for block in trace.blocks if block.name == "gradient4")
    assert gradient.writes == (2, 6) and gradient.reads == (6, 8)
    assert sum(block.name == "activation2" for block in trace.blocks) == 2
    assert trace.subgroups[0].stage == 8
    budgets = Budgets(device_bytes=planner.floor(trace)[0])
    made = planner.plan(trace, budgets, policy="belady")
    assert planner.simulate(trace, made).iteration_seconds >= trace.ideal_seconds


def test_smaller_states_and_faster_drives() -> None:
    assert [b.size_bytes for b in with_state_bytes(training(), 0.5).blocks if b.kind == "optimizer_state"] == [16 * MIB]
    faster = with_storage_rate(training(), 2).hardware
    assert [link.bytes_per_second for link in faster.links] == [2e8, 2e8, 1e9, 1e9]


def test_the_command_keeps_the_plan_behind_each_line(tmp_path: Path) -> None:
    training().save(tmp_path / "trace.json")
    plans = tmp_path / "plans"
    plans.mkdir()
    budgets = ["--device", str(TIGHT.device_bytes), "--host", str(TIGHT.host_bytes)]
    command = ["advise", str(tmp_path / "trace.json"), *budgets, "--plans", str(plans), "--tbw", "600TB", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    answers = json.loads(done.stdout)["answers"]
    found = sorted(path.name for path in plans.iterdir())
    assert len(found) == 2 * len(answers)
    trace = planner.Trace.load(plans / "twice-the-batch.trace.json")
    plan = planner.Plan.load(plans / "twice-the-batch.plan.json")
    (batch,) = (answer for answer in answers if answer["what"] == "twice the batch")
    assert planner.simulate(trace, plan).iteration_seconds == pytest.approx(batch["predicted"]["iteration_seconds"])


def test_the_table_and_the_exit_code(tmp_path: Path) -> None:
    training().save(tmp_path / "trace.json")
    fits = CliRunner().invoke(app, ["advise", str(tmp_path / "trace.json"), "--device", "1GiB"])
    assert fits.exit_code == 0 and "what holds it up" in fits.stdout and "one more drive" in fits.stdout
    too_small = CliRunner().invoke(app, ["advise", str(tmp_path / "trace.json"), "--device", "1MiB"])
    assert too_small.exit_code == 1 and "no plan exists" in too_small.stdout
