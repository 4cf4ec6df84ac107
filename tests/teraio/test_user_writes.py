"""Writes of user code: what user code has not written is not written to the drive again, and no write is missed."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio

from ..training import MIB, Training, known_blocks, random_rows, unequal, weights_of_1_mib

BUDGET = {"memory_budget": "11MiB"}
"""Of 14 weights of 1 MiB, 8 or more stay when a forward pass ends."""


def by_data(weight: nn.Parameter) -> None:
    weight.data[3].mul_(1.5)


def by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[511, 511] += 0.25


def by_pointer(weight: nn.Parameter) -> None:
    ctypes.c_float.from_address(weight.data_ptr() + 4 * 1000).value = 0.125


def by_view(weight: nn.Parameter) -> None:
    weight.data.view(-1)[7:9].zero_()


def by_copy(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(weight.detach() * 1.01)


def by_foreach(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.detach()], 0.99)


def by_loading(weight: nn.Parameter) -> None:
    holder = nn.Linear(512, 512, bias=False)
    holder.weight = weight
    holder.load_state_dict({"weight": weight.detach() + 0.001})


UNSEEN_BY_AUTOGRAD = (by_data, by_numpy, by_pointer, by_view)
SEEN_BY_AUTOGRAD = (by_copy, by_foreach, by_loading)

Write = Callable[[nn.Parameter], None]

WRITES = [
    *([kind] for kind in (*UNSEEN_BY_AUTOGRAD, *SEEN_BY_AUTOGRAD)),
    [],
    *(random.Random(seed).sample([*UNSEEN_BY_AUTOGRAD, *SEEN_BY_AUTOGRAD], 3) for seed in range(4)),
]
"""For each step the kinds of writes: each kind alone, none, and random ones."""


def train(options: Mapping[str, Any], writes: Sequence[Sequence[Write]]) -> dict[str, Tensor]:
    """Return the parameters after as many steps as `writes` has elements, each with evaluations and these writes in between.

    Each write changes a few weights, on the device and away: after an evaluation, and before the backward pass if autograd does
    not see it.
    """
    training = weights_of_1_mib(options, count=14)
    choose = random.Random(1)

    def write(kinds: Sequence[Write]) -> None:
        for kind in kinds:
            for weight in choose.sample(list(training.module.parameters()), 4):
                kind(weight)  # type: ignore[arg-type]

    def step(batch: Tensor, index: int) -> None:
        for _ in range(2):
            evaluate(training, batch)
            write(writes[index])
        loss = training.model(batch).square().mean()
        write([kind for kind in writes[index] if kind in UNSEEN_BY_AUTOGRAD])
        loss.backward()
        evaluate(training, batch)
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    training.run(random_rows(len(writes)), step)
    return training.finish()


def evaluate(training: Training, batch: Tensor) -> None:
    with torch.no_grad():
        training.model(batch)


def written_bytes(options: Mapping[str, Any]) -> int:
    """Return how many bytes 5 evaluations write to the drive, after some others."""
    training = weights_of_1_mib(options, count=14)
    found = []
    for batch in random_rows(13):
        evaluate(training, batch)
        (status,) = teraio.status()
        found.append(status.moved_bytes["device->storage"])
    training.finish()
    return found[-1] - found[7]


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """The parameters after training with all kinds of writes and without a budget."""
    return train({}, WRITES)


@pytest.mark.parametrize("further", [{}, {"debug": True, "checksums": True}])
def test_no_write_is_missed(further: Mapping[str, Any], expected: dict[str, Tensor], tmp_path: Path) -> None:
    found = train({**BUDGET, "storage": tmp_path, **further}, WRITES)
    assert not unequal(list(found.values()), list(expected.values()))


def test_evaluations_write_nothing_to_the_drive(tmp_path: Path) -> None:
    options = {**BUDGET, "storage": tmp_path}
    assert written_bytes(options) == 0


def test_what_was_written_is_written_to_the_drive(tmp_path: Path) -> None:
    training = weights_of_1_mib({**BUDGET, "storage": tmp_path}, count=14)
    batch = next(iter(random_rows(1)))
    for _ in range(8):
        evaluate(training, batch)
    resident = [w for w in training.module.parameters() for b in known_blocks([w]) if b.state.name == "ON_DEVICE"]
    before = teraio.status()[0].moved_bytes["device->storage"]
    for weight in resident:
        by_numpy(weight)  # type: ignore[arg-type]
    for _ in range(3):
        evaluate(training, batch)
    written = teraio.status()[0].moved_bytes["device->storage"] - before
    assert 0 < written <= len(resident) * MIB  # each once, if it leaves at all
    training.finish()
