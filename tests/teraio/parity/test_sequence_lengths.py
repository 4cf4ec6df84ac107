"""Sequences of varying length: sizes and strides of graphs are symbolic."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Batch, Case, check_parity
from .models import Transformer, tokens

LENGTHS = (128, 96, 112, 96)


def varying(steps: int) -> list[Batch]:
    return [tokens(1, time=length)[0] for length in LENGTHS[:steps]]


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_the_same_bits_for_each_length(tmp_path: Path, dynamic: bool | None) -> None:
    case = Case(
        make_model=lambda: Transformer(layers=1),
        make_batches=varying,
        steps=2 if dynamic else 3,
        compile_options={"dynamic": dynamic},
    )
    check_parity(case, tmp_path)


@pytest.mark.long
def test_the_same_bits_for_each_length_by_inductor(tmp_path: Path) -> None:
    case = Case(make_model=lambda: Transformer(layers=1), make_batches=varying, steps=4, compile_options={"dynamic": True})
    check_parity(case, tmp_path, codegen="inductor")
