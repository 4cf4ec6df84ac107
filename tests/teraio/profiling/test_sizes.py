"""Graphs with symbolic sizes: that small ones fit does not mean that larger ones do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import teraio

MIB = 1 << 20
BUDGET_BYTES = 28 * MIB


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    teraio.reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    teraio.reset()


def small_model() -> nn.Module:
    """Weights of 1 MiB each; the activations of 1024 rows take 2 MiB each."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh()) for _ in range(8)])


def step(model: nn.Module, rows: int) -> Tensor:
    loss: Tensor = model(torch.full((rows, 512), 0.5)).square().mean()
    loss.backward()
    return loss.detach()


def test_a_batch_that_is_larger_than_all_that_fitted_keeps_the_budget(tmp_path: Path) -> None:
    module = small_model()
    options = {"codegen": "eager", "memory_budget": BUDGET_BYTES, "storage": tmp_path, "profile_iterations": 1}
    model = torch.compile(module, backend="teraio", dynamic=True, options=options)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    phases, moved = [], []
    for rows in (64, 64, 64, 64, 32, 1024, 1024):
        step(model, rows)
        sgd.step()
        sgd.zero_grad()
        (status,) = teraio.status()
        phases.append(status.phase)
        moved.append(status.moved_bytes["device->storage"])
        assert 0 < status.device_peak_bytes <= BUDGET_BYTES
    assert phases[3:5] == ["fits", "fits"], "nothing larger ran"
    assert phases[5] != "fits"
    assert moved[4] == 0 < moved[5]


def test_after_a_reset_a_larger_batch_runs_without_a_budget(tmp_path: Path) -> None:
    module = small_model()
    options = {"codegen": "eager", "memory_budget": BUDGET_BYTES, "storage": tmp_path}
    model = torch.compile(module, backend="teraio", dynamic=True, options=options)
    step(model, 64)
    teraio.reset()
    assert torch.isfinite(step(model, 1024))
    assert teraio.status() == ()


@pytest.mark.parametrize("held", [0, 80 * MIB])
def test_more_passes_at_once_than_all_that_fitted_are_noticed(tmp_path: Path, held: int) -> None:
    """Also where something else was there when the first ones fitted, and went away meanwhile."""
    module = small_model()
    options = {"codegen": "eager", "memory_budget": BUDGET_BYTES, "storage": tmp_path, "profile_iterations": 1}
    model = torch.compile(module, backend="teraio", options=options)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)

    garbage: list[Tensor] = []

    def iteration(passes: int) -> str:
        inputs = torch.full((512, 512), 0.5)
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
