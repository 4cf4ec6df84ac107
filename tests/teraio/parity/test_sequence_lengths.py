"""Sequences of varying length: sizes and strides of graphs are symbolic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import teraio

from ...thoroughness import every_other
from ...training import forget
from .harness import MIB, Batch, Case, check_parity
from .models import Transformer, tokens

LENGTHS = (128, 96, 112, 96)


def varying(steps: int) -> list[Batch]:
    return [tokens(1, time=length)[0] for length in LENGTHS[:steps]]


@pytest.mark.parametrize("dynamic", every_other(None, True))
def test_the_same_bits_for_each_length(tmp_path: Path, dynamic: bool | None) -> None:
    case = Case(
        make_model=lambda: Transformer(layers=1),
        make_batches=varying,
        steps=2 if dynamic else 3,
        compile_options={"dynamic": dynamic},
    )
    check_parity(case, tmp_path)


class Predictor(nn.Module):
    """Words [length] to a loss over a vocabulary: backward needs more than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2048, 64), nn.Linear(64, 2048, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(self.embed(words))
        return nn.functional.cross_entropy(logits, words)


def test_an_error_says_what_longer_sequences_need(tmp_path: Path) -> None:
    def refused(model: nn.Module, words: Tensor) -> teraio.BudgetError:
        with pytest.raises(teraio.BudgetError) as caught:
            model(words).backward()
        return caught.value

    def compiled(budget: int) -> nn.Module:
        forget()
        options = {"codegen": "eager", "storage": str(tmp_path), "memory_budget": budget}
        model: nn.Module = torch.compile(Predictor(), backend="teraio", dynamic=True, options=options)
        return model

    short, long = (torch.arange(length) for length in (256, 2048))
    first = refused(compiled(MIB), short)
    assert "(not counted, since not known yet: inputs that are larger than those of this call, graphs" in str(first)
    model = compiled(first.smallest_bytes)
    model(short).backward()
    second = refused(model, long)
    assert second.smallest_bytes > first.smallest_bytes
    model = compiled(second.smallest_bytes)
    for words in (short, long):
        model(words).backward()


@pytest.mark.long
def test_the_same_bits_for_each_length_by_inductor(tmp_path: Path) -> None:
    case = Case(make_model=lambda: Transformer(layers=1), make_batches=varying, steps=4, compile_options={"dynamic": True})
    check_parity(case, tmp_path, codegen="inductor")
