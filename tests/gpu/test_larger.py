"""A model whose weights exceed the GPU's budget is made there, and one that exceeds main memory's too is trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import teraio
from teraio.registry import REGISTRY

from ..teraio.in_process import InProcessJob
from ..training import MIB
from .training import needs_gpu

DEVICE = torch.device("cuda", 0)
WIDTH, LAYERS = 2048, 24
"""384 MiB of weights, 1.5 GiB with gradients and two states."""
pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def planning_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own imports for seconds."""
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=InProcessJob))


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    return nn.Sequential(*layers)


def losses_of(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    found = []
    for number in range(steps):
        rows = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)
        loss = (module(rows) - 0.1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        teraio.wait_for_plan(60)
    return found


@pytest.mark.timeout(900)
def test_a_model_beyond_the_device_and_main_memory_is_made_and_trains_as_eager_code_does(tmp_path: Path) -> None:
    options = {
        "memory_budget": 320 * MIB,
        "host_budget": 256 * MIB,
        "storage": tmp_path,
        "codegen": "eager",
        "host_updates": False,
        "profile_iterations": 1,
        "solver_time_limit": 5,
    }
    with torch.device(DEVICE):
        with teraio.under_budget(**options):
            made = model()
        assert torch.cuda.memory_reserved() <= 320 * MIB
        teraio.compile(made, **options)
        found = losses_of(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
        (status,) = teraio.status()
        assert status.device_peak_bytes <= 320 * MIB and (status.reserved_bytes or 0) <= 320 * MIB
        assert status.moved_bytes["device->host"] and status.moved_bytes["device->storage"]
        values = []
        for parameter in made.parameters():
            with teraio.on_device([parameter]):
                values.append(parameter.detach().cpu())
        del made
        teraio.reset()
        eager = model()
        assert found == losses_of(eager, torch.optim.AdamW(eager.parameters(), lr=1e-3))
    assert all(torch.equal(value, wanted.detach().cpu()) for value, wanted in zip(values, eager.parameters(), strict=True))
