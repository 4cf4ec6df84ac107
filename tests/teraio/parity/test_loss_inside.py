"""A loss over a vocabulary that is much larger than the width, in the compiled region: it does not set the smallest budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from .harness import MIB, Batch, Case, budgeted_options, check_budget, check_exact, train
from .models import Transformer

VOCABULARY, ROWS = 8192, 128
LOGITS_BYTES = VOCABULARY * ROWS * 4


class WithLoss(nn.Module):
    """A language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(layers=1, width=64, vocabulary=VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def words(steps: int) -> list[Batch]:
    tokens = [Tensor(range(step, step + ROWS)).long().view(2, ROWS // 2) for step in range(steps)]
    return [(batch, batch + 1) for batch in tokens]


@pytest.mark.usefixtures("fine_and_quick")
def test_it_trains_with_the_memory_of_its_largest_operators(tmp_path: Path) -> None:
    """Which need three tensors of the size of the logits. In one stage, the backward of the loss needs five."""
    case = Case(make_model=WithLoss, make_batches=words, compute_loss=lambda model, batch: model(*batch))
    budget = 4 * LOGITS_BYTES + 2 * MIB
    unbudgeted = train(case, backend="teraio", options={"codegen": "eager", "storage": str(tmp_path)})
    budgeted = train(case, backend="teraio", options=budgeted_options(case, tmp_path, budget=budget, codegen="eager"))
    check_exact(budgeted, unbudgeted)
    check_budget(budgeted, budget)
