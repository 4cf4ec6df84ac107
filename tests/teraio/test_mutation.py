"""Blocks that a stage writes in place are known as written, whatever the compiler makes of the stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import teraio


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
    results = []
    for options in ({"codegen": codegen}, {"codegen": codegen, "memory_budget": "64MiB", "storage": str(tmp_path)}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Cache()
        compiled = torch.compile(module, backend="teraio", options=options)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        losses = []
        for step in range(3):
            loss = compiled(torch.full((1024, 256), float(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, module.cache.clone()))
        programs = teraio.status()[0].stages
        assert programs > 0
        teraio.reset()
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_writes_through_views_are_seen_before_compilation() -> None:
    from teraio.stages.split import _is_written

    graph = torch.fx.Graph()
    buffer, value = graph.placeholder("buffer"), graph.placeholder("value")
    view = graph.call_function(torch.ops.aten.slice.Tensor, (buffer, 1, 0, 4))
    graph.call_function(torch.ops.aten.copy_.default, (view, value))
    assert _is_written(buffer) and not _is_written(value)
