"""A model that is mostly an embedding, under a budget below parameter, gradient and states of it: updated by slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...thoroughness import every_other
from .harness import Case, check_exact, one_update, start, train
from .models import WIDTH

pytestmark = pytest.mark.usefixtures("fine_and_quick")

ROWS = 12288
EMBEDDING = ROWS * WIDTH * 4
BUDGET = EMBEDDING * 79 // 20
"""Below parameter, gradient and states of the embedding; the stage of its gradient needs nearly as much."""
STATES = {f"optimizer/embed.weight.{name}" for name in ("exp_avg", "exp_avg_sq")}
STEPS, HALF = 16, 8


class Embedded(nn.Module):
    """Token indices [n] to scores [n, 64]; the embedding has 3 MiB, a little over 70 % of all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2304), nn.Linear(2304, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x + self.down(torch.tanh(self.up(x)))


def some_tokens(steps: int) -> list[Tensor]:
    return [torch.randint(0, ROWS, (64,), generator=torch.Generator().manual_seed(number)) for number in range(steps)]


def squares(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens).square().mean()
    return loss


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


CASE = Case(
    make_model=Embedded,
    make_batches=some_tokens,
    compute_loss=squares,
    make_optimizer=adamw,
    step=one_update,
    steps=STEPS,
    planned=True,
)
TIERS: dict[str, dict[str, Any]] = {
    "both": {"host_budget": 2 * EMBEDDING, "host_updates": False, "checksums": True, "debug": True},
    "storage": {},
    "host": {"host_budget": 5 * EMBEDDING, "host_updates": False},
}


def options(below: str, folder: Path) -> dict[str, Any]:
    storage = {} if below == "host" else {"storage": str(folder)}
    return {"memory_budget": BUDGET, "profile_iterations": 2, **TIERS[below], **storage}


@pytest.mark.parametrize("below", every_other(*TIERS))
def test_by_a_plan(below: str, tmp_path: Path) -> None:
    """Half of the steps before a checkpoint, half after it, by another model that has loaded it."""
    batches = some_tokens(STEPS)
    run = start(CASE, options=options(below, tmp_path))
    run.go(batches[:HALF])
    torch.save((run.module.state_dict(), run.optimizer.state_dict()), tmp_path / "checkpoint")
    losses = run.losses
    run = start(CASE, options=options(below, tmp_path))
    model, optimizer = torch.load(tmp_path / "checkpoint", weights_only=True)
    run.module.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    del model, optimizer
    run.losses = losses
    run.go(batches[HALF:])
    found = run.result()
    check_exact(found, train(CASE, backend=None))
    assert found.status.phase == "planned"
    assert 2 * EMBEDDING < found.status.device_peak_bytes <= BUDGET < 4 * EMBEDDING
    assert {name for name in found.moved_states if "embed" in name} == STATES
    moved = sum(size for link, size in found.status.moved_bytes.items() if link.startswith("device->"))
    assert moved > 2 * EMBEDDING * (STEPS - HALF)


def test_its_update_does_not_fit_into_the_backward_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The step updates it by slices, as ever; all others are updated inside."""
    found = train(CASE, options=options("storage", tmp_path) | {"overlap_step": True})
    check_exact(found, train(CASE, backend=None))
    assert found.status.phase == "planned" and found.status.device_peak_bytes <= BUDGET
    assert {name for name in found.moved_states if "embed" in name} == STATES
    assert found.left[-1] == {"embed.weight"}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "teraio"]
    assert "updates 'embed.weight', not the backward pass: activations leave too little room" in said
