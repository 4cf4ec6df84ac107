"""A model that is mostly an embedding, under a budget below parameter, gradient and states of it: the same bits as without."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio

from ...thoroughness import every_other
from ...training import begin, states_away, unequal

pytestmark = pytest.mark.usefixtures("fine_and_quick")

ROWS, WIDTH = 12288, 64
EMBEDDING = ROWS * WIDTH * 4
BUDGET = EMBEDDING * 79 // 20
"""Below parameter, gradient and states of the embedding; the stage of its gradient needs nearly as much."""
STATES = {f"optimizer/embed.weight.{name}" for name in ("exp_avg", "exp_avg_sq")}
STEPS, HALF = 26, 13


class Embedded(nn.Module):
    """Token indices [n] to scores [n, 64]; the embedding has 3 MiB, a little over 70 % of all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2304), nn.Linear(2304, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x + self.down(torch.tanh(self.up(x)))


@dataclass(frozen=True, slots=True)
class Result:
    """Parameters, states and losses, and what teraio says in the end."""

    values: list[Tensor]
    away: set[str]
    status: teraio.Status


def train(options: dict[str, Any], *, checkpoint: Path | None = None) -> Result:
    """checkpoint: save there after half of the steps, and go on with another model that has loaded it."""
    losses: list[Tensor] = []
    training = begin(Embedded, adamw, options)

    def step(number: int, index: int) -> None:
        tokens = torch.randint(0, ROWS, (64,), generator=torch.Generator().manual_seed(number))
        loss = training.model(tokens).square().mean()
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())

    training.run(range(HALF), step, planned=True)
    if checkpoint is not None:
        torch.save({"model": training.model.state_dict(), "optimizer": training.optimizers[0].state_dict()}, checkpoint)
        training = begin(Embedded, adamw, options)
        content = torch.load(checkpoint, weights_only=True)
        training.model.load_state_dict(content["model"])
        training.optimizers[0].load_state_dict(content["optimizer"])
        del content
    training.run(range(HALF, STEPS), step, planned=True)
    away = states_away()
    values = [p.detach().clone() for p in training.module.parameters()]
    for state in training.optimizers[0].state.values():
        values += [value.clone() for value in state.values()]
    return Result([*losses, *values], away, training.progress[-1][0])


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=0.01)]


def tiers(name: str, folder: Path) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = {
        "storage": {"storage": str(folder)},
        "host": {"host_budget": 5 * EMBEDDING, "host_updates": False},
        "both": {"host_budget": 2 * EMBEDDING, "host_updates": False, "storage": str(folder), "checksums": True, "debug": True},
    }
    return known[name]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """The same stages with all the memory they want, and the optimizer as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result = train({"optimizer": "off"})
    torch.set_num_threads(before)
    assert not any(result.status.moved_bytes.values())
    return result.values


@pytest.mark.parametrize("below", every_other("both", "storage", "host"))
def test_an_embedding_by_a_plan(below: str, expected: list[Tensor], tmp_path: Path) -> None:
    """Half of the steps before a checkpoint, half after it."""
    options = {"memory_budget": BUDGET, "profile_iterations": 2, **tiers(below, tmp_path)}
    found = train(options, checkpoint=tmp_path / "checkpoint")
    assert found.status.phase == "planned"
    assert 2 * EMBEDDING < found.status.device_peak_bytes <= BUDGET < 4 * EMBEDDING
    assert {name for name in found.away if "embed" in name} == STATES
    moved = sum(size for link, size in found.status.moved_bytes.items() if link.startswith("device->"))
    assert moved > 2 * EMBEDDING * (STEPS - HALF)
    assert not unequal(found.values, expected)


def test_an_embedding_whose_update_does_not_fit_into_the_backward_pass(
    expected: list[Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step updates it by slices, as ever; all others are updated inside."""
    options = {"memory_budget": BUDGET, "profile_iterations": 2, "overlap_step": True, **tiers("storage", tmp_path)}
    with caplog.at_level(logging.WARNING, logger="teraio"):
        found = train(options)
    assert found.status.phase == "planned" and found.status.device_peak_bytes <= BUDGET
    assert {name for name in found.away if "embed" in name} == STATES
    assert not unequal(found.values, expected)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "teraio"]
    assert "updates 'embed.weight', not the backward pass: activations leave too little room" in said
