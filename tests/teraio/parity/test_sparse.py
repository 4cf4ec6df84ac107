"""Sparse gradients: they have no storage, so they are left where they are while everything else moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .harness import Batch, Case, Run, check_parity
from .models import tokens


class SparseEmbedding(nn.Module):
    """Tokens [batch, time] to logits [batch, time, 256]; the weights are 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 256, sparse=True)
        self.layers = nn.ModuleList([nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)])

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def sparse_adam(module: nn.Module) -> Optimizer:
    """It updates sparse gradients only."""
    module.get_submodule("layers").requires_grad_(False)
    return torch.optim.SparseAdam(module.get_submodule("embed").parameters(), lr=0.01)


def step(run: Run, batch: Batch, index: int) -> None:
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    run.record_loss(loss)
    gradient = run.module.get_parameter("embed.weight").grad
    assert gradient is not None and gradient.is_sparse
    run.record("gradient", gradient.to_dense())
    run.optimizer.step()


@pytest.mark.parametrize("make_optimizer", [sgd, sparse_adam])
def test_an_embedding_with_sparse_gradients(tmp_path: Path, make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
    check_parity(
        Case(make_model=SparseEmbedding, make_batches=tokens, make_optimizer=make_optimizer, step=step),
        tmp_path,
    )
