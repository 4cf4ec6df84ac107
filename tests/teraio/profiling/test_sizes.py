"""Graphs with symbolic sizes: that small ones fit does not mean that larger ones do."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio

from ...training import MIB, Training, begin, mean_square_step

BUDGET_BYTES = 28 * MIB


def begin_small(options: dict[str, Any], **further: Any) -> Training:
    """Weights of 1 MiB each; the activations of 1024 rows take 2 MiB each."""
    return begin(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh()) for _ in range(8)]),
        lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)],
        {"memory_budget": BUDGET_BYTES, **options},
        **further,
    )


def rows_of(count: int) -> Tensor:
    return torch.full((count, 512), 0.5)


def test_a_batch_that_is_larger_than_all_that_fitted_keeps_the_budget(tmp_path: Path) -> None:
    training = begin_small({"storage": tmp_path, "profile_iterations": 1}, dynamic=True)
    training.run(map(rows_of, (64, 64, 64, 64, 32, 1024, 1024)), functools.partial(mean_square_step, training))
    statuses = [status for (status,) in training.progress]
    assert all(0 < status.device_peak_bytes <= BUDGET_BYTES for status in statuses)
    phases = [status.phase for status in statuses]
    moved = [status.moved_bytes["device->storage"] for status in statuses]
    assert phases[3:5] == ["fits", "fits"], "nothing larger ran"
    assert phases[5] != "fits"
    assert moved[4] == 0 < moved[5]


def test_after_a_reset_a_larger_batch_runs_without_a_budget(tmp_path: Path) -> None:
    model = begin_small({"storage": tmp_path}, dynamic=True).model
    model(rows_of(64)).square().mean().backward()
    teraio.reset()
    loss = model(rows_of(1024)).square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert teraio.status() == ()


@pytest.mark.parametrize("held", [0, 80 * MIB])
def test_more_passes_at_once_than_all_that_fitted_are_noticed(tmp_path: Path, held: int) -> None:
    """Also where something else was there when the first ones fitted, and went away meanwhile."""
    training = begin_small({"storage": tmp_path, "profile_iterations": 1})
    model, (sgd,) = training.model, training.optimizers
    garbage: list[Tensor] = []

    def iteration(passes: int) -> str:
        inputs = rows_of(512)
        sum(model(inputs).square().mean() for _ in range(passes)).backward()  # type: ignore[union-attr]
        sgd.step()
        sgd.zero_grad()
        return teraio.status()[0].phase

    iteration(1)
    garbage.append(torch.empty(held, dtype=torch.uint8))
    assert [iteration(1) for _ in range(4)][-1] == "fits"
    garbage.clear()
    assert iteration(4) == "profile"
    for _ in range(3):
        iteration(4)
    status = teraio.status()[0]
    assert status.phase != "fits" and BUDGET_BYTES // 2 < status.device_peak_bytes <= BUDGET_BYTES
    assert status.moved_bytes["device->storage"] > 0
