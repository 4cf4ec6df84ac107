"""Advice on small traces: what fits, what a change does, and the plan behind each line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import planner
from planner.problem import SolverSettings, live_bytes
from planner.schema import Budgets, Lengths, Polynomial, Work
from teraio.cli.advice import Advice, Adviser, Answer, with_batch, with_passes

from ...planner.traces import block, group, links, staged, subgroup, trace
from ...thoroughness import by_profile
from ..conftest import RunCommand

MIB = 1 << 20
STAGES = ("forward/layers.0", "forward/layers.1", "backward/layers.1", "backward/layers.0", "optimizer/all")


def training(*, host: bool = True) -> planner.Trace:
    """Two layers, each with a parameter, an activation, a gradient and a state; one update at the end."""
    rates = {"device->storage": 1e8, "storage->device": 1e8}
    rates |= {"device->host": 1e9, "host->device": 1e9} if host else {}
    machine = {**links(rates), "host_memory_bytes": 1 << 30 if host else 0, "storage_bytes": 1 << 34}
    stages = [{**stage, "name": name} for stage, name in zip(staged("ffbbo"), STAGES, strict=True)]
    blocks = [
        block(8 * MIB, [4], [0, 3, 4], "parameter"),
        block(8 * MIB, [4], [1, 2, 4], "parameter"),
        block(20 * MIB, [0], [3]),
        block(20 * MIB, [1], [2]),
        block(8 * MIB, [2], [4], "gradient"),
        block(8 * MIB, [3], [4], "gradient"),
        block(32 * MIB, [4], [4], "optimizer_state"),
    ]
    return trace(
        [{**stage, "workspace_bytes": MIB} for stage in stages],
        [{**each, "name": f"{each['kind']}{number}"} for number, each in enumerate(blocks)],
        machine,
        subgroups=[subgroup(4, [0, 1, 4, 5, 6], host=None, elements=4 * MIB)],
        recompute=[group(0, [2], [0], workspace=MIB), group(1, [3], [1], workspace=MIB)],
        name="training",
    )


ADVISER = Adviser(settings=SolverSettings(time_limit_seconds=10.0, gap=0.0, threads=1))
FLOOR = planner.floor(training())[0]
TIGHT = Budgets(device_bytes=FLOOR + 4 * MIB, host_bytes=16 * MIB)


def by_case(advice: Advice) -> dict[str, Answer]:
    return {answer.what: answer for answer in advice.answers}


def test_each_case_is_answered() -> None:
    answers = by_case(ADVISER.advise(training(), TIGHT))
    assert list(answers) == [
        "as asked",
        "25% more device memory",
        "one more drive",
        "twice the host memory",
        "without recomputation",
        "twice the batch",
        "twice the accumulation",
    ]
    asked = answers["as asked"]
    assert asked.fit == "yes" and asked.speed == 1.0 and asked.predicted is not None
    assert asked.floor_bytes == FLOOR and asked.ideal_seconds == 5.0
    adds = 2 * 3 * 8 / (2 * 2 * 8 + 2 * 8 + 2 * 32)  # beside what the update reads and writes in a second
    assert answers["twice the accumulation"].ideal_seconds == pytest.approx(9.0 + adds), "all but the update twice"


def test_more_is_never_slower() -> None:
    for size in range(FLOOR, FLOOR + 60 * MIB, by_profile(ci=20, long=7) * MIB):
        answers = by_case(ADVISER.advise(training(), TIGHT.model_copy(update={"device_bytes": size})))
        for more in ("25% more device memory", "twice the host memory"):
            speed = answers[more].speed
            assert speed is not None and speed >= 1.0


def test_what_holds_a_training_up() -> None:
    slow = by_case(ADVISER.advise(training(host=False), Budgets(device_bytes=FLOOR)))
    assert "storage" in slow["as asked"].holds_up
    faster = slow["one more drive"].speed
    assert faster is not None and faster > 1.0
    roomy = by_case(ADVISER.advise(training(), Budgets(device_bytes=1 << 30)))
    assert roomy["as asked"].holds_up == "" and roomy["as asked"].written_bytes_per_day == 0.0


def test_what_is_written_to_drives_in_a_day() -> None:
    asked = ADVISER.advise(training(host=False), Budgets(device_bytes=FLOOR)).answers[0]
    assert asked.predicted is not None
    iterations = 86_400 / asked.predicted.iteration_seconds
    written = iterations * asked.predicted.storage_written_bytes
    assert written > 0 and asked.written_bytes_per_day == pytest.approx(written)


def test_no_plan_exists_is_told_apart_from_none_was_found() -> None:
    below = ADVISER.advise(training(), Budgets(device_bytes=FLOOR - 1)).answers[0]
    assert below.fit == "no plan exists" and "too small" in below.reason
    nowhere = Budgets(device_bytes=FLOOR, host_bytes=MIB, storage_bytes=MIB)
    without_groups = training().model_copy(update={"recompute": ()})
    full = by_case(ADVISER.advise(without_groups, nowhere))["as asked"]
    assert full.fit == "none was found" and full.reason


def test_a_larger_batch_grows_what_depends_on_it() -> None:
    before, after = training(), with_batch(training(), 2)
    assert [s.duration_seconds for s in after.stages] == [2.0, 2.0, 2.0, 2.0, 1.0]
    sizes = {block.name: block.size_bytes // MIB for block in after.blocks}
    assert sizes["activation2"] == 40 and sizes["gradient4"] == 8 and sizes["optimizer_state6"] == 32
    assert max(live_bytes(after)) > max(live_bytes(before))


def test_the_command_keeps_the_plan_behind_each_line(run: RunCommand, tmp_path: Path) -> None:
    training().save(tmp_path / "trace.json")
    plans = tmp_path / "plans"
    plans.mkdir()
    budgets = ["--device", TIGHT.device_bytes, "--host", TIGHT.host_bytes]
    done = run("advise", tmp_path / "trace.json", *budgets, "--plans", plans, "--json")
    assert done.code == 0, done.err
    answers = json.loads(done.out)["answers"]
    assert len(list(plans.iterdir())) == 2 * len(answers)
    traced = planner.Trace.load(plans / "twice-the-batch.trace.json")
    plan = planner.Plan.load(plans / "twice-the-batch.plan.json")
    (batch,) = (answer for answer in answers if answer["what"] == "twice the batch")
    assert planner.simulate(traced, plan).iteration_seconds == pytest.approx(batch["predicted"]["iteration_seconds"])


def test_the_table_and_the_exit_code(run: RunCommand, tmp_path: Path) -> None:
    training().save(tmp_path / "trace.json")
    fits = run("advise", tmp_path / "trace.json", "--device", "1GiB")
    assert fits.code == 0 and "what holds it up" in fits.out and "one more drive" in fits.out
    too_small = run("advise", tmp_path / "trace.json", "--device", "1MiB")
    assert too_small.code == 1 and "no plan exists" in too_small.out


def of_sizes() -> planner.Trace:
    """The same training with 8 x 1,000 tokens, known from 2 x 1,000 on: activations and times grow with the rows."""
    sizes = tuple(Polynomial(id=number, coefficients=(0.0, 20 * MIB / 8)) for number in (2, 3))
    seconds = tuple(Polynomial(id=number, coefficients=(0.0, 1 / 8)) for number in range(4))
    return training().rebuilt(
        work=Work(tokens=8000, samples=8, flops=8e12, peak_flops_per_second=1e13),
        lengths=Lengths(lowest=(2,), highest=(8,), block_bytes=sizes, stage_seconds=seconds),
    )


def test_a_step_is_divided_by_one_trace_of_many_sizes_and_by_several_traces() -> None:
    geometry = [
        (each.geometry.microbatch, each.geometry.passes, each.geometry.order)
        for each in ADVISER.divide([of_sizes()], TIGHT, step=8000).answers
        if each.geometry is not None
    ]
    both = ("pass by pass", "layer by layer")
    assert {*geometry} == {(size * 1000, 8 // size, order) for size in (4, 2) for order in both} | {(8000, 1, both[0])}
    one = training().rebuilt(work=Work(samples=1), name="one")
    found = ADVISER.divide([of_sizes(), one], TIGHT, step=11, unit="samples")
    assert found.trace_name == "training, one"
    assert {each.what for each in found.answers} == {"11 x 1 samples, pass by pass", "11 x 1 samples, layer by layer"}
    with pytest.raises(planner.OptionsError, match=r"a step of 8,500 tokens is no multiple .* 8,000 \(training\), 4,000 \(one\)"):
        ADVISER.divide([of_sizes(), one.rebuilt(work=Work(tokens=4000))], TIGHT, step=8500)
    with pytest.raises(planner.OptionsError, match="trace one does not say how many tokens an iteration processes"):
        ADVISER.divide([one], TIGHT, step=8500)


def test_the_command_finds_the_geometry(run: RunCommand, tmp_path: Path) -> None:
    of_sizes().save(tmp_path / "sizes.json")
    training().rebuilt(work=Work(tokens=1000), name="one").save(tmp_path / "one.json")
    plans = tmp_path / "plans"
    plans.mkdir()
    files, budget = (tmp_path / "sizes.json", tmp_path / "one.json"), ("--device", TIGHT.device_bytes)
    shown = run("advise", *files, *budget, "--tokens-per-step", 8000, "--plans", plans)
    assert shown.code == 0, shown.err
    assert re.search(r"^8 x 1,000 tokens, layer by layer  +yes ", shown.out, re.MULTILINE)
    assert re.search(r"^passes x microbatch .* TFLOP/s +MFU +smallest ", shown.out, re.MULTILINE)
    assert "the training loop must do that; predicted only" in " ".join(shown.out.split())
    name = "4-x-2000-tokens-layer-by-layer"
    planner.simulate(planner.Trace.load(plans / f"{name}.trace.json"), planner.Plan.load(plans / f"{name}.plan.json"))
    alone = run("advise", files[0], *budget, "--samples-per-step", 8, "--json")
    geometry = [each["geometry"] for each in json.loads(alone.out)["answers"]]
    assert {"trace_name": "training", "microbatch": 8, "passes": 1, "order": "pass by pass"} in geometry
    for wrong, told in (
        (files, "found 2 traces, wanted one"),
        ((files[0], "--tokens-per-step", 1, "--samples-per-step", 1), "give one of them"),
    ):
        refused = run("advise", *wrong, *budget)
        assert refused.code == 2 and told in refused.err


def test_a_search_that_ended_at_the_limit_is_told(run: RunCommand, tmp_path: Path) -> None:
    of_sizes().save(tmp_path / "trace.json")
    budget = ("--device", TIGHT.device_bytes, "--time-limit", 0.001)
    shown = run("advise", tmp_path / "trace.json", *budget, "--tokens-per-step", 16_000)
    assert re.search("^2 x 8,000 tokens, layer by layer  +yes, best within --time-limit  ", shown.out, re.MULTILINE)


# -- traces of steps in several passes, made from that of one pass

FORWARD, BACKWARD = STAGES[:2], STAGES[2:4]


def test_passes_follow_one_another_and_add_their_gradients_up() -> None:
    traced = with_passes(training(), 3)
    assert [stage.name for stage in traced.stages] == [*(*FORWARD, *BACKWARD) * 3, STAGES[4]]
    assert sorted(group.stage for group in traced.recompute) == [0, 1, 4, 5, 8, 9]
    gradient = next(block for block in traced.blocks if block.name == "gradient4")
    assert gradient.writes == (2, 6, 10) and gradient.reads == (6, 10, 12)
    assert [(b.writes, b.reads) for b in traced.blocks if b.name == "activation2"] == [((0,), (3,)), ((4,), (7,)), ((8,), (11,))]
    assert traced.subgroups[0].stage == 12
    adds = 3 * 8 / (2 * 2 * 8 + 2 * 8 + 2 * 32)  # of what the update reads and writes in its second
    assert [s.duration_seconds for s in traced.stages[:8]] == pytest.approx([1, 1, 1, 1, 1, 1, 1 + adds, 1 + adds])
    budgets = Budgets(device_bytes=planner.floor(traced)[0])
    made = planner.plan(traced, budgets, policy="belady")
    assert planner.simulate(traced, made).iteration_seconds >= traced.ideal_seconds


def test_layer_by_layer_all_passes_use_a_parameter_one_after_the_other() -> None:
    plain, layered = with_passes(training(), 4), with_passes(training(), 4, "layer by layer")
    assert [stage.name for stage in layered.stages] == [name for name in STAGES[:4] for _ in range(4)] + [STAGES[4]]
    assert layered.ideal_seconds == pytest.approx(plain.ideal_seconds)
    assert max(live_bytes(layered)) > max(live_bytes(plain)), "what all passes keep is there at once"
    parameter = next(block for block in layered.blocks if block.name == "parameter0")
    assert parameter.reads == (0, 1, 2, 3, 12, 13, 14, 15, 16)
    gradient = next(block for block in layered.blocks if block.name == "gradient5")
    assert gradient.writes == (12, 13, 14, 15) and gradient.reads == (13, 14, 15, 16)


def test_what_cannot_be_divided_is_refused() -> None:
    rooted = staged(["forward/root", "backward/root", "optimizer/0"])
    mixed, whole = (trace(each, [block(8, [0], [1])]).rebuilt(work=Work(tokens=1)) for each in (staged("fbobo"), rooted))
    with pytest.raises(planner.UnsupportedError, match="updated between the stages of a pass"):
        ADVISER.divide([mixed], TIGHT, step=2)
    with pytest.raises(planner.UnsupportedError, match="do not tell layers apart"):
        with_passes(whole, 2, "layer by layer")
    assert [each.what for each in ADVISER.divide([whole], TIGHT, step=2).answers] == ["2 x 1 tokens, pass by pass"]
