"""Activation checkpointing: the backward graph recomputes layers with the random state that the forward graph saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .harness import Case, check_parity, train
from .models import Transformer, tokens

Checkpoint = Callable[[nn.Module, Tensor], Tensor]
WITHOUT_REENTRY = functools.partial(checkpoint, use_reentrant=False)
WITH_REENTRY = functools.partial(checkpoint, use_reentrant=True)


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    """A checkpoint in a checkpoint."""

    def inner(hidden: Tensor) -> Tensor:
        return WITHOUT_REENTRY(layer, hidden).sin()

    return WITHOUT_REENTRY(inner, x)


class Checkpointed(nn.Module):
    """A layer, recomputed in the backward pass."""

    def __init__(self, layer: nn.Module, how: Checkpoint) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer, x)


def checkpointed(how: Checkpoint, *, layers: int = 2, dropout: float = 0.0, width: int = 256) -> nn.Module:
    model = Transformer(layers=layers, dropout=dropout, width=width)
    model.layers = nn.ModuleList(Checkpointed(layer, how) for layer in model.layers)
    return model


@pytest.mark.usefixtures("eager_dropout")
@pytest.mark.parametrize("how", [WITHOUT_REENTRY, WITH_REENTRY, nested], ids=["without_reentry", "with_reentry", "nested"])
def test_attention_and_dropout_are_recomputed_alike(tmp_path: Path, how: Checkpoint) -> None:
    check_parity(Case(make_model=lambda: checkpointed(how, layers=1, dropout=0.2), make_batches=tokens, steps=2), tmp_path)


@pytest.mark.long
def test_a_plan_for_checkpointed_layers(tmp_path: Path) -> None:
    case = Case(make_model=lambda: checkpointed(WITHOUT_REENTRY), make_batches=tokens, planned=True)
    check_parity(case, tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("eager_dropout")
def test_checkpointed_layers_compiled_by_inductor(tmp_path: Path) -> None:
    case = Case(make_model=lambda: checkpointed(WITHOUT_REENTRY, layers=1, dropout=0.2), make_batches=tokens, steps=2)
    check_parity(case, tmp_path, codegen="inductor")


def test_the_smallest_budget_is_not_larger_than_without_checkpoints(tmp_path: Path) -> None:
    floors = []
    for make in (lambda: Transformer(layers=1, width=256), lambda: checkpointed(WITHOUT_REENTRY, layers=1, width=256)):
        result = train(Case(make_model=make, make_batches=tokens, steps=1), backend="teraio", options={"storage": str(tmp_path)})
        floors.append(max(status.floor_bytes or 0 for status in result.progress[-1]))
    assert floors[1] <= 1.2 * floors[0], floors
