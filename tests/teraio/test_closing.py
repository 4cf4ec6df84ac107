"""`teraio.reset`: what does not fit the budget stays where it is, as long as its tensors live, and the next run takes it over."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import teraio
from runtime.execution import StageRun
from runtime.paging import Block, State

from ..training import MIB, Training, compiled, pagers, random_rows, unequal, weights_of_1_mib

pytestmark = pytest.mark.usefixtures("finely_cut", "quick_links")

WEIGHTS = 8
"""Of 1 MiB each, and as much momentum."""
BUDGET = 6 * MIB
TIERS = {"on drives": {}, "in both tiers": {"host_budget": 4 * MIB}, "checked": {"checksums": True, "debug": True}}


def trained(folder: Path | None, how: str = "on drives", **more: object) -> Training:
    """After four steps under a budget that holds about a third of weights and momentum. folder: None trains without teraio."""
    torch.manual_seed(0)
    options = None if folder is None else {"memory_budget": BUDGET, "storage": folder, **TIERS[how], **more}
    training = weights_of_1_mib(options, count=WEIGHTS, momentum=0.9)
    training.run(random_rows(4))
    return training


def weights(training: Training) -> list[Tensor]:
    return list(training.module.parameters())


def files() -> dict[int, int]:
    """The bytes on drives and in memory files that open descriptors and mappings of spill files hold, by inode."""
    gc.collect()  # what earlier tests have left is closed now, not later, when a new file could get the number of its inode
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target, status = os.readlink(f"/proc/self/fd/{name}"), os.stat(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if ".spill" in target or "teraio-host" in target:
            found[status.st_ino] = 512 * status.st_blocks
    return found


def mapped() -> int:
    """Bytes of tensors that spill files are mapped over."""
    ranges = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".spill" in line)
    return sum(int(end, 16) - int(begin, 16) for begin, end in (each[0].split("-") for each in ranges))


@pytest.mark.parametrize("how", TIERS)
def test_what_does_not_fit_stays_readable_and_writable(tmp_path: Path, how: str) -> None:
    before = files().keys()
    training = trained(tmp_path, how)
    expected = [weight.detach().clone() for weight in weights(training)]
    states = training.optimizers[0].state
    momenta = [states[weight]["momentum_buffer"].clone() for weight in weights(training)]
    (pager,) = pagers()
    teraio.reset()
    assert pager.account.peak_bytes <= BUDGET and not pager.closing.away_bytes()
    assert not list(tmp_path.iterdir()), "nothing in the directory has a name"
    held = sum(size for file, size in files().items() if file not in before)
    assert 2 * WEIGHTS * MIB - BUDGET <= held <= 2 * WEIGHTS * MIB, "what is in no slot is free"
    assert not unequal(weights(training), expected)
    assert not unequal([states[weight]["momentum_buffer"] for weight in weights(training)], momenta)
    with torch.no_grad():
        for number, weight in enumerate(weights(training)):
            weight.fill_(number)
    assert [weight.unique().tolist() for weight in weights(training)] == [[number] for number in range(WEIGHTS)]


def test_space_is_freed_with_each_tensor_and_descriptors_with_the_last(tmp_path: Path) -> None:
    before, others = files().keys(), mapped()
    training = trained(tmp_path)
    teraio.reset()
    held = [sum(files().values())]
    parameters, optimizer = weights(training), training.optimizers.pop()
    for weight in parameters[:4]:
        del optimizer.state[weight]
    held.append(sum(files().values()))
    assert held[1] < held[0]
    del training, parameters, optimizer, weight
    torch._dynamo.reset()
    gc.collect()
    assert not files().keys() - before and mapped() == others


@pytest.mark.parametrize(
    ("how", "again"), [("on drives", "after reset"), ("in both tiers", "by other options"), ("checked", "after reset")]
)
def test_the_next_run_takes_over_under_the_same_budget(tmp_path: Path, how: str, again: str) -> None:
    before = files().keys()
    plain = trained(None)
    torch.manual_seed(5)
    plain.run(random_rows(4))
    expected = list(plain.finish().values())

    training = trained(tmp_path, how)
    if again == "after reset":
        teraio.reset()
        torch._dynamo.reset()
    options = {"memory_budget": BUDGET, "storage": tmp_path, **TIERS[how], "replan": again == "after reset"}
    training.model = compiled(training.module, options)
    torch.manual_seed(5)
    training.run(random_rows(4))
    (pager,) = pagers()
    assert pager.account.peak_bytes <= BUDGET
    moved = [block for block in pager.blocks if block.kind == "parameter"]
    assert len(moved) == WEIGHTS and all(block.span is not None for block in moved)
    assert any(block.state is State.OFFLOADED for block in moved)
    assert not unequal([weight.detach().clone() for weight in weights(training)], expected)
    assert len(files().keys() - before) <= 1 + ("host_budget" in TIERS[how]), "the earlier run's files are gone"


def test_a_tensor_that_no_run_takes_over_is_left_alone(tmp_path: Path) -> None:
    training = trained(tmp_path)
    teraio.reset()
    torch._dynamo.reset()
    kept = [weight.detach().clone() for weight in weights(training)]
    other = weights_of_1_mib({"memory_budget": BUDGET, "storage": tmp_path}, count=WEIGHTS // 2)
    other.run(random_rows(2))
    teraio.reset()
    assert not unequal(weights(training), kept)


# -- passes without an optimizer step between them: what is kept of them does not grow with their number

WATCHED = (StorageWeakRef, Block, StageRun)


def evaluate(training: Training, *, passes: int) -> None:
    with torch.no_grad():
        for _ in range(passes):
            training.model(torch.ones(16, 512))


def kept() -> Counter[type]:
    """How many objects of each watched type are alive."""
    gc.collect()
    return Counter(type(thing) for thing in gc.get_objects() if type(thing) in WATCHED)


def test_evaluations_between_two_steps_keep_nothing(tmp_path: Path) -> None:
    training = weights_of_1_mib({"memory_budget": 4 * MIB, "storage": tmp_path}, count=6)
    training.run(random_rows(1))
    evaluate(training, passes=70)
    before = kept()
    evaluate(training, passes=40)
    assert not kept() - before, "what earlier tests have left may go"
    assert training.progress[-1][0].moved_bytes["storage->device"] > 0
