"""Passes without an optimizer step between them: what is kept of them does not grow with their number."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from runtime.paging import Block
from teraio.profiling import StageRecord, recorder
from teraio.registry import REGISTRY
from teraio.stages import CutPolicy

from ..training import MIB, Training, mean_square_step, random_rows, weights_of_1_mib

WATCHED = (StorageWeakRef, Block, StageRecord)


@pytest.fixture(autouse=True)
def many_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage for each layer, however small."""
    policy = CutPolicy(shortest_seconds=1e-9)
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, cut_policy=policy))


def six_layers(tmp_path: Path, *, budget: int | None = 4 * MIB) -> Training:
    """Begin to train six weights of 1 MiB. Outputs of stages are under 1 MiB for up to 511 rows."""
    return weights_of_1_mib({"memory_budget": budget, "storage": str(tmp_path)}, count=6)


def evaluate(training: Training, *, passes: int, rows: int = 16) -> None:
    with torch.no_grad():
        for _ in range(passes):
            training.model(torch.ones(rows, 512))


def update_by_hand(training: Training) -> None:
    """A step that is none of torch.optim."""
    training.model(torch.ones(16, 512)).square().mean().backward()
    with torch.no_grad():
        for weight in training.module.parameters():
            weight.sub_(weight.grad, alpha=0.1)
            weight.grad = None


def kept() -> Counter[type]:
    """How many objects of each watched type are alive."""
    gc.collect()
    return Counter(type(thing) for thing in gc.get_objects() if type(thing) in WATCHED)


def test_evaluations_between_two_steps_keep_nothing(tmp_path: Path) -> None:
    training = six_layers(tmp_path)
    training.run(random_rows(1), functools.partial(mean_square_step, training))
    evaluate(training, passes=70)
    before = kept()
    evaluate(training, passes=40)
    assert not kept() - before, "what earlier tests have left may go"
    assert training.progress[-1][0].moved_bytes["storage->device"] > 0


def test_evaluations_without_any_step_keep_nothing(tmp_path: Path) -> None:
    """First passes are recorded, but no reference to a dead storage is kept of them; later ones are not."""
    training = six_layers(tmp_path)
    evaluate(training, passes=10)
    before = kept()
    evaluate(training, passes=20)
    assert kept()[StorageWeakRef] == before[StorageWeakRef] and kept()[StageRecord] > before[StageRecord]
    evaluate(training, passes=40)
    before = kept()
    evaluate(training, passes=40)
    assert not kept() - before, "what earlier tests have left may go"


def test_own_updates_keep_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MOST_STAGES", 100)
    training = six_layers(tmp_path, budget=8 * MIB)
    for _ in range(15):  # how often updates repeat is known after ten or so; records of fewer iterations are kept from then on
        update_by_hand(training)
    before = kept()
    for _ in range(20):
        update_by_hand(training)
    assert not kept() - before, "what earlier tests have left may go"
