"""A head and its loss in tiles on a GPU: the same bits within a budget as without one; whole logits exceed that budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio

from ..training import forget
from .training import needs_triton

MIB = 1 << 20
VOCABULARY, WIDTH, ROWS, STEPS = 32768, 256, 1536, 8
LOGITS_BYTES = 4 * ROWS * VOCABULARY


class Words(nn.Module):
    """Token indices to the loss of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words[:-1])
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden), words[1:])


def trained(options: dict[str, Any] | None) -> tuple[list[Tensor], int]:
    """Return the losses and then the parameters, and the peak of the memory. options: None for eager code."""
    forget()
    torch.manual_seed(0)
    module = Words().cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = module if options is None else torch.compile(module, backend="teraio", options={"plan_cache": "off", **options})
    losses = []
    for _ in range(STEPS):
        loss = run(torch.randint(0, VOCABULARY, (ROWS + 1,), device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    values = [*losses, *(parameter.detach().cpu() for parameter in module.parameters())]
    peak = 0 if options is None else teraio.status()[0].device_peak_bytes
    if options is not None:
        teraio.reset()
    return values, peak


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=needs_triton)])
def test_a_loss_in_tiles(codegen: str) -> None:
    common = {"codegen": codegen, "tiles": LOGITS_BYTES // 4, "solver_time_limit": 5}
    wanted, _ = trained(common)
    eager, _ = trained(None)
    torch.testing.assert_close(wanted, eager, rtol=1e-4, atol=1e-5)
    budget = 416 * MIB
    limited = {"memory_budget": budget, "host_budget": 1024 * MIB, "solver_time_limit": 5, "codegen": codegen}
    found, peak = trained({**common, **limited})
    assert peak <= budget and all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    with pytest.raises(teraio.BudgetError, match="is too small"):
        trained({**limited, "tiles": "off"})
