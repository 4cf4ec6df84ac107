"""The optimizer step, interleaved and layer by layer: the baseline's plan and pager, and the arithmetic of the figures."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.layer_by_layer import SubgroupAfterSubgroup, layer_by_layer
from benchmarks.optimizer import (
    FREE,
    INDUCTOR,
    OVERLAPPED,
    PLANNED,
    SERIAL,
    LossesDiffer,
    Measured,
    figures,
    hidden,
    same_losses,
    traffic,
)
from benchmarks.variants import peak_bytes
from examples.llama import LlamaConfig
from examples.training import Report, Setting, Step, Training
from planner import Block, Budgets, Hardware, Link, Plan, Stage, Subgroup, Trace, plan, simulate
from runtime.paging import State
from teraio.registry import REGISTRY

LAYERS = 4
"""Each with a forward, a backward and an update; one weight, one gradient and one state of a byte, a byte a second."""


def made_up_trace() -> Trace:
    links = tuple(
        Link(from_tier=a, to_tier=b, bytes_per_second=1.0)  # type: ignore[arg-type]
        for a, b in (("device", "storage"), ("storage", "device"))
    )
    names = [f"{phase}/layer.{i}" for phase in ("forward", "backward", "optimizer") for i in range(LAYERS)]
    stages = tuple(
        Stage(id=i, name=name, phase=name.split("/")[0], duration_seconds=4.0)  # type: ignore[arg-type]
        for i, name in enumerate(names)
    )
    uses = {"parameter": lambda i: (i, 2 * LAYERS - 1 - i, 2 * LAYERS + i), "optimizer_state": lambda i: (2 * LAYERS + i,)}
    uses["gradient"] = lambda i: (2 * LAYERS - 1 - i, 2 * LAYERS + i)
    blocks = [
        Block(
            id=0,
            name=f"{kind}.{i}",
            kind=kind,
            size_bytes=1,
            persistent=kind != "gradient",  # type: ignore[arg-type]
            reads=uses[kind](i),
            writes=uses[kind](i)[-1:] if kind != "gradient" else uses[kind](i)[:1],
        )
        for kind in uses
        for i in range(LAYERS)
    ]
    blocks = [block.model_copy(update={"id": number}) for number, block in enumerate(blocks)]
    subgroups = tuple(
        Subgroup(id=i, stage=2 * LAYERS + i, blocks=(i, LAYERS + i, 2 * LAYERS + i), elements=1, device_seconds=4.0)
        for i in range(LAYERS)
    )
    hardware = Hardware(name="made up", device_memory_bytes=100, storage_bytes=100, links=links)
    return Trace(name="made up", hardware=hardware, stages=stages, blocks=tuple(blocks), subgroups=subgroups)


@pytest.mark.parametrize("device_bytes", [4, 6, 9])
def test_no_copy_in_for_a_subgroup_starts_before_its_turn(device_bytes: int) -> None:
    trace = made_up_trace()
    made = layer_by_layer(trace, Budgets(device_bytes=device_bytes))
    assert made.policy == "layer-by-layer" and made.trace_fingerprint == trace.fingerprint
    count, updates = len(trace.stages), range(2 * LAYERS, 3 * LAYERS)
    for move in made.moves:
        assert move.prefetch is not None
        if move.before % count in updates:
            assert move.prefetch.start == move.before, "nothing comes before the update begins"
        assert move.prefetch.start % count not in updates or move.prefetch.start == move.before, "nor for others meanwhile"
    states = {block.id: block.uses[0] for block in trace.blocks if block.kind == "optimizer_state"}
    alone = {move.block: (move.after, move.before) for move in made.moves if move.block in states}
    assert alone == {block: (stage, stage + count) for block, stage in states.items()}
    assert {place.block: place.tier for place in made.initial if place.block in states} == dict.fromkeys(states, "storage")
    replayed = simulate(trace, made)
    assert replayed.peak_bytes["device"] <= device_bytes
    best = plan(trace, Budgets(device_bytes=device_bytes)).predicted
    assert best is not None and replayed.iteration_seconds > best.iteration_seconds


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Setting]:
    """A training whose states alone are more than its budget; compiled eagerly, which takes next to no time."""
    threads = torch.get_num_threads()
    model = LlamaConfig(layers=2, width=512, heads=4, key_value_heads=4, feed_forward=1024, vocabulary=256, tied=True, context=16)
    options = {
        "memory_budget": "36MiB",
        "storage": str(tmp_path),
        "codegen": "eager",
        "profile_iterations": 1,
        "trace_out": str(tmp_path / "trace.json"),
        "plan_out": str(tmp_path / "followed.json"),
    }
    yield Setting(model=model, batch=1, text_bytes=100_000, deterministic=True, fused=True, options=options)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def train(setting: Setting, count: int = 6) -> tuple[list[Step], Report]:
    torch._dynamo.reset()
    training = Training(setting)
    steps = []
    for _ in range(count):
        steps.append(training.step())
        training.wait_for_plan()
    return steps, training.finish()


@pytest.mark.long
def test_layer_by_layer_the_copies_of_subgroups_do_not_overlap_and_the_losses_are_the_same(
    limited: Setting, tmp_path: Path
) -> None:
    interleaved, _ = train(limited)
    trace = Trace.load(tmp_path / "trace.json")
    assert peak_bytes(trace) > 2 * (36 << 20)
    *earlier, last = [block for block in trace.blocks if block.kind == "gradient" and block.movable]
    assert len(earlier) > 4 and {block.dies_after for block in earlier} >= {len(trace.stages) - 1}, "freed after the step"
    layer_by_layer(trace, Budgets(device_bytes=36 << 20)).save(tmp_path / "plan.json")
    in_flight: list[tuple[str, int]] = []

    class Watched(SubgroupAfterSubgroup):
        def acquire(self, blocks: Any, new_bytes: int, what: str, **others: Any) -> None:
            super().acquire(blocks, new_bytes, what, **others)
            moving = [block for block in self.blocks if block.state in (State.OFFLOADING, State.PREFETCHING)]
            in_flight.append((what, len(moving)))

    with patch.object(REGISTRY, "new_run", partial(REGISTRY.new_run, new_pager=Watched)):
        setting = limited.model_copy(update={"options": {**limited.options, "plan": str(tmp_path / "plan.json")}})
        steps, report = train(setting)
    assert [step.loss for step in steps] == [step.loss for step in interleaved]
    assert steps[-1].phase == "planned" and Plan.load(tmp_path / "followed.json").policy == "layer-by-layer"
    assert report.status is not None and report.status["device_peak_bytes"] <= 36 << 20
    planned = [(what, moving) for what, moving in in_flight if what.startswith("optimizer/")][-len(trace.subgroups) :]
    assert len(planned) > 2
    assert [moving for _, moving in planned] == [0] * len(planned), "an update runs while nothing is copied"
    before, after = steps[-2], steps[-1]
    moved = {link: after.moved_bytes[link] - before.moved_bytes[link] for link in after.moved_bytes}
    states = sum(b.size_bytes for b in trace.blocks if b.kind == "optimizer_state" and b.movable)
    assert all(size >= states for size in moved.values()), "every state goes and comes in every iteration"
    assert 0 < after.optimizer_seconds < after.seconds and 0 < after.late_seconds < after.seconds
    assert all(0 < after.exposed_seconds[link] <= after.busy_seconds[link] for link in moved)


# -- figures


def step(number: int, *, seconds: float = 2.0, optimizer_seconds: float = 0.5, loss: float = 1.0) -> Step:
    """The counters run on: in each iteration 10 MiB go out in 0.5 s and 20 MiB come in in 1 s, half of that exposed."""
    return Step(
        loss=loss,
        seconds=seconds,
        tokens=1,
        phase="planned",
        resident_bytes={},
        optimizer_seconds=optimizer_seconds,
        moved_bytes={"out": number * 10 << 20, "in": number * 20 << 20},
        busy_seconds={"out": 0.5 * number, "in": 1.0 * number},
        exposed_seconds={"in": 0.5 * number},
        late_seconds=0.3,
    )


def a_training(*, seconds: float, optimizer_seconds: float, loss: float = 1.0, peak: int = 80) -> Measured:
    counted = [step(n, seconds=seconds, optimizer_seconds=optimizer_seconds, loss=loss) for n in (12, 13, 15, 16)]
    status = {"device_peak_bytes": peak, "predicted_iteration_seconds": None if peak > 100 else 1.2}
    report = Report(peak_bytes=190, rest_bytes=100, parameters=1 << 20, status=status)
    return Measured(before=step(10), steps=counted, turns_steps=6, phase="planned", report=report)


def all_five(**changes: Measured) -> dict[str, Measured]:
    return {
        INDUCTOR: a_training(seconds=1.0, optimizer_seconds=0.2, loss=1.0 + 1e-6),
        FREE: a_training(seconds=1.0, optimizer_seconds=0.25),
        PLANNED: a_training(seconds=1.5, optimizer_seconds=0.5),
        OVERLAPPED: a_training(seconds=1.0, optimizer_seconds=0.1),
        SERIAL: a_training(seconds=2.0, optimizer_seconds=1.0, peak=101),
        **changes,
    }


def test_figures_compare_in_one_run() -> None:
    found = {figure.name: figure for figure in figures(all_five(), 100)}
    assert found[f"{PLANNED}: iteration"].value == 1.5 and found[f"{PLANNED}: iteration"].note == "planned; 4 iterations"
    assert found[f"{PLANNED} / {FREE}: iteration"].value == 1.5
    assert found[f"{SERIAL} / {FREE}: optimizer step"].value == 4.0
    assert found[f"{PLANNED} / {SERIAL}: optimizer step"].value == 0.5
    assert found[f"{PLANNED} / {SERIAL}: optimizer step"].met
    assert found[f"{OVERLAPPED} / {SERIAL}: iteration"].value == 0.5
    assert found[f"{FREE} / {INDUCTOR}: iteration"].value == 1.0
    assert found[f"{PLANNED}: predicted / measured"].value == pytest.approx(0.8)
    assert found[f"{SERIAL}: predicted / measured"].note == "no plan was followed"
    assert found[f"{PLANNED}: peak / budget"].value == 0.8 and found[f"{PLANNED}: peak / budget"].met
    assert found[f"{PLANNED}: peak / budget"].note.endswith(": 0.900")
    assert found[f"{SERIAL}: peak / budget"].met is False


def test_copying_is_hidden_unless_the_training_thread_waits() -> None:
    found = {figure.name: figure for figure in traffic("x", a_training(seconds=2.0, optimizer_seconds=0.5))}
    assert found["x: moved out"].value == 10 and found["x: moved in"].value == 20
    assert found["x: hidden out"].value == 1.0
    assert found["x: hidden in"].value == pytest.approx(0.5)
    assert found["x: hidden in all"].value == pytest.approx(1 - 0.5 / 1.5)
    assert found["x: hidden in all, or behind the other link"].value == pytest.approx(1 - 0.3 / 1.5)
    assert hidden("x", 0.0, 0.0).value is None


def test_losses_must_be_the_same_to_the_last_bit_but_for_another_compilers() -> None:
    same_losses(all_five())
    off = a_training(seconds=1.0, optimizer_seconds=0.1, loss=1.0 + 1e-6)
    with pytest.raises(LossesDiffer, match=f"counted iteration 1: {FREE} has loss 1.0, {SERIAL} 1.000001"):
        same_losses(all_five(**{SERIAL: off}))
    with pytest.raises(LossesDiffer, match=INDUCTOR):
        same_losses(all_five(**{INDUCTOR: a_training(seconds=1.0, optimizer_seconds=0.1, loss=1.1)}))
