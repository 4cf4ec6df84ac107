"""Updates inside the backward pass over kinds of models: the same losses and parameters as in PyTorch's order."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from ...thoroughness import every_other
from .harness import (
    Batch,
    Case,
    Run,
    budget_between,
    budgeted_options,
    check_budget,
    check_exact,
    check_planned,
    compiled_input_needs_grad,
    train,
)
from .models import Aliases, Chain, ConvNet, Transformer, features, features_of_changing_size, images, tokens
from .test_models import loss_over_views


def step(left: list[int], run: Run, batch: Batch, index: int) -> None:
    """left: gets how many parameters have a gradient after backward."""
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    run.record_loss(loss)
    left.append(sum(p.grad is not None for p in run.module.parameters()))
    run.optimizer.step()


CASES = {
    "transformer, tied": Case(make_model=lambda: Transformer(tied=True, vocabulary=1024), make_batches=tokens, planned=True),
    "convolutions with batch norm": Case(make_model=ConvNet, make_batches=images, planned=True),
    "two parameters in one storage": Case(make_model=Aliases, make_batches=features, compute_loss=loss_over_views, planned=True),
    "changing sizes": Case(make_model=Chain, make_batches=features_of_changing_size),
    "layers compiled one by one": Case(
        make_model=lambda: Chain(depth=2), make_batches=features, compile_parts=("layers.0", "layers.1"), planned=True
    ),
}


@pytest.mark.usefixtures("fine_and_quick")
@pytest.mark.parametrize("name", every_other(*CASES))
@compiled_input_needs_grad
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    left: list[int] = []
    case = replace(CASES[name], step=functools.partial(step, left), steps=10)
    unbudgeted = train(case, backend="teraio", options={"codegen": "eager", "storage": str(tmp_path)})
    budget = budget_between(unbudgeted, 0.3)
    options = budgeted_options(case, tmp_path, budget=budget, codegen="eager") | {"debug": True, "overlap_step": True}
    left.clear()
    budgeted = train(case, backend="teraio", options=options)
    check_exact(budgeted, unbudgeted)
    check_budget(budgeted, budget)
    outside = 2 if case.compile_parts else 0  # the last layer is not compiled
    assert left[0] > outside and set(left[-3:]) == {outside}
    if case.planned:
        check_planned(budgeted)
