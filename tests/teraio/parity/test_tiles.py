"""Trainings whose head and loss run in tiles: by plans, at the smallest budget, with the same bits as without a budget."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import teraio

from ...thoroughness import every_other
from .harness import MIB, Batch, Case, Run, budgeted_options, check_budget, check_close, check_exact, check_parity, train

pytestmark = pytest.mark.usefixtures("fine_and_quick")

CLASSES, WIDTH = 4096, 64
ABOVE = 20 * MIB
"""What the head needs is more, and that of another layer less."""


class Predictor(nn.Module):
    """Predicts the next of [batch, words] words; tied: by the weight of the embedding. Returns the loss."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=not tied)
        self.layer = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.layer(x)
        x = (x + x.mean(1, keepdim=True)) / 2  # mixes rows
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def words(steps: int) -> list[Batch]:
    return [torch.randint(0, CLASSES, (3, 481)) for _ in range(steps)]


def words_of_any_number(steps: int, fewest: int) -> list[Batch]:
    """In the end more than in the first batch."""
    sizes = [(3, 481), (2, 250), (2, fewest)]
    return [torch.randint(0, CLASSES, size) for size in sizes + [(4, 481)] * (steps - len(sizes))]


def predict(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def case(*, tiles: int | str, tied: bool = False, planned: bool = False) -> Case:
    return Case(
        make_model=lambda: Predictor(tied=tied),
        make_batches=words,
        compute_loss=predict,
        options={"tiles": tiles},
        planned=planned,
    )


@pytest.mark.parametrize(("codegen", "tied"), every_other(("eager", True), ("inductor", False)))
def test_tiles_have_the_same_bits_with_and_without_a_budget(codegen: str, tied: bool, tmp_path: Path) -> None:
    """And are followed by a plan. The gradient of the head waits in lower tiers between two tiles that add to it."""
    check_parity(case(tiles=ABOVE, tied=tied, planned=True), tmp_path, codegen=codegen, fraction=0.02)


@pytest.mark.parametrize(("codegen", "fewest"), [("eager", 3), ("inductor", 40)])
def test_tiles_of_any_number_of_words_have_the_same_bits(codegen: str, fewest: int, tmp_path: Path) -> None:
    """By one graph, whose batches differ in both sizes, and a plan; by eager operators also where only the last tile has rows."""
    varying = replace(
        case(tiles=ABOVE, planned=True),
        make_batches=partial(words_of_any_number, fewest=fewest),
        compile_options={"dynamic": True},
        steps=10,
    )
    check_parity(varying, tmp_path, codegen=codegen, fraction=0.5)


def test_a_loss_that_is_too_large_for_the_budget_runs_in_tiles(tmp_path: Path) -> None:
    def refused(tiles: int | str) -> teraio.BudgetError:
        with pytest.raises(teraio.BudgetError) as raised:
            train(case(tiles=tiles), options=budgeted_options(case(tiles=tiles), tmp_path, budget=MIB))
        return raised.value

    whole, budget = refused("off"), refused("auto").smallest_bytes
    assert whole.in_pieces and "tiles" in str(whole)
    assert budget < whole.smallest_bytes / 2
    found = train(case(tiles="auto"), options=budgeted_options(case(tiles="auto"), tmp_path, budget=budget))
    check_budget(found, budget)
    check_exact(found, train(case(tiles=ABOVE), options={"codegen": "eager", "storage": str(tmp_path)}))
    check_close(found, train(case(tiles="off"), backend=None))
    # With room for all of it, nothing runs in tiles.
    roomy = train(case(tiles="auto"), options=budgeted_options(case(tiles="auto"), tmp_path, budget=6 * whole.smallest_bytes))
    check_exact(roomy, train(case(tiles="off"), options={"codegen": "eager", "storage": str(tmp_path)}))
    less = budgeted_options(case(tiles="auto"), tmp_path, budget=(found.status.floor_bytes or 0) - 1)
    with pytest.raises(teraio.BudgetError):
        train(case(tiles="auto"), options=less)


def test_a_backward_pass_in_tiles_can_run_twice(tmp_path: Path) -> None:
    """And gradients add up over microbatches."""

    def twice(run: Run, batch: Batch, index: int) -> None:
        run.optimizer.zero_grad()
        run.backward(batch, retain_graph=True)
        run.backward(batch.flip(0), scale=64.0)
        loss = run.loss(batch)
        loss.backward(retain_graph=True)
        loss.backward()
        run.record_gradients()
        run.optimizer.step()

    steps = Case(make_model=Predictor, make_batches=words, compute_loss=predict, step=twice, options={"tiles": ABOVE}, steps=2)
    check_parity(steps, tmp_path)
