"""Blocks that a stage writes in place are known as written, whatever the compiler makes of the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..training import begin


class Cache(torch.nn.Module):
    """Writes a slice of a buffer of 4 MiB in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)
        self.register_buffer("cache", torch.zeros(1024, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        self.cache[:, :256] = hidden.detach()
        return (hidden * self.cache[:, 128:384]).sum()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_slice_of_a_buffer_is_written(codegen: str, tmp_path: Path) -> None:
    plain, budgeted = (
        train({"codegen": codegen, **further}) for further in ({}, {"memory_budget": "64MiB", "storage": str(tmp_path)})
    )
    assert plain[0] == budgeted[0]
    assert torch.equal(plain[1], budgeted[1])


def train(options: dict[str, Any]) -> tuple[list[float], torch.Tensor]:
    """Losses, and the buffer in the end."""
    training = begin(Cache, lambda module: [torch.optim.SGD(module.parameters(), lr=1e-6)], options)
    losses = []

    def step(index: int, _: int) -> None:
        loss = training.model(torch.full((1024, 256), float(index)))
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    training.run(range(3), step)
    assert training.progress[-1][0].stages > 0
    return losses, training.finish()["cache"]


def test_writes_through_views_are_seen_before_compilation() -> None:
    from teraio.stages.split import _is_written

    graph = torch.fx.Graph()
    buffer, value = graph.placeholder("buffer"), graph.placeholder("value")
    view = graph.call_function(torch.ops.aten.slice.Tensor, (buffer, 1, 0, 4))
    graph.call_function(torch.ops.aten.copy_.default, (view, value))
    assert _is_written(buffer) and not _is_written(value)
