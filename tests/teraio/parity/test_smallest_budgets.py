"""The budget that a BudgetError names trains: a retry with exactly that number gets to the end, or to another part of a step."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import teraio

from ...training import compiled, forget
from .harness import MIB, Case, Result, budgeted_options, check_budget, check_exact, compiled_input_needs_grad, train
from .loops import with_closure
from .models import WIDTH, ConvNet, Predictor, images
from .optimizers import Layers, small

pytestmark = [pytest.mark.usefixtures("fine_and_quick"), compiled_input_needs_grad]

NOT_COUNTED = (
    "graphs that are compiled later, the optimizer's update, what operators take for themselves, and what your code keeps"
)


class Norms(nn.Module):
    """Many small parameters, whose gradients and states stay on the device."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(512) for _ in range(layers))
        self.inward, self.outward = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        y: Tensor = self.outward(x)
        return y


CASES = {
    "AdamW": small("AdamW", model=Norms, steps=3),
    "closure": small("AdamW", step=with_closure, steps=3),
    "tied": small("AdamW", model=functools.partial(Layers, tied=True), steps=3),
    "two graphs": small("AdamW", model=functools.partial(Layers, broken=True), steps=3),
}


@pytest.mark.parametrize("name", CASES)
def test_each_part_of_a_step_asks_once(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found, errors = first_that_trains(case, tmp_path)
    assert errors[0].not_counted == NOT_COUNTED and f"(not counted, since not known yet: {NOT_COUNTED})" in str(errors[0])
    parts = ["optimizer" if error.stage.startswith("optimizer/") else "graphs" for error in errors]
    count = parts.count("graphs")
    assert 1 <= count <= (2 if name == "two graphs" else 1), errors  # the second one is compiled after the first error
    assert parts[count:] == [], errors
    assert found.status.device_peak_bytes <= (found.status.device_budget_bytes or 0)
    check_exact(found, train(case, backend=None))


def first_that_trains(case: Case, folder: Path) -> tuple[Result, list[teraio.BudgetError]]:
    """Begin with 1 MiB, and go on with what each error asks for."""
    errors: list[teraio.BudgetError] = []
    while True:
        budget = errors[-1].smallest_bytes if errors else MIB
        try:
            return train(case, options=budgeted_options(case, folder, budget=budget)), errors
        except teraio.BudgetError as error:
            assert error.smallest_bytes > budget and len(errors) < 4, [*errors, error]
            errors.append(error)


@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_over_a_vocabulary_that_sets_the_budget_is_named(whole: bool, tmp_path: Path) -> None:
    """And another layer that needs more is not."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.wide = nn.Embedding(4096, 64), nn.Linear(64, 64 if whole else 16384)

        def forward(self, words: Tensor) -> Tensor:
            found = self.words(words)
            return nn.functional.cross_entropy(found @ self.words.weight.t(), words) + self.wide(found).tanh().cumsum(0).sum()

    with pytest.raises(teraio.BudgetError) as raised:
        compiled(Head(), {"memory_budget": MIB, "storage": str(tmp_path), "tiles": "off"})(torch.arange(2048))
    assert raised.value.in_pieces is whole and ("linear_cross_entropy" in str(raised.value)) is whole


def test_the_smallest_budget_works_and_less_is_refused(tmp_path: Path) -> None:
    """No states, and a small model: a stage of the graphs sets the floor, not the update."""
    case = Case(make_model=ConvNet, make_batches=images, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    with pytest.raises(teraio.BudgetError) as raised:
        train(case, options=budgeted_options(case, tmp_path, budget=MIB))
    error = raised.value
    assert error.smallest_bytes > MIB
    assert str(error.smallest_bytes) in str(error)
    assert "forward/" in str(error) or "backward/" in str(error), "names no stage"
    assert len(error.largest) == 3 and error.largest[0][0] == error.stage and error.largest[0][1] <= error.smallest_bytes
    assert [size for _, size in error.largest] == sorted((size for _, size in error.largest), reverse=True)
    assert all(repr(name) in str(error) for name, _ in error.largest)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.largest) == (str(error), error.largest) and not error.in_pieces
    options = budgeted_options(case, tmp_path, budget=error.smallest_bytes)
    budgeted = train(case, options=options)
    check_budget(budgeted, error.smallest_bytes)
    check_exact(budgeted, train(case, options={"storage": str(tmp_path)}))
    with pytest.raises(teraio.BudgetError):
        train(case, options=options | {"memory_budget": (budgeted.progress[0][0].floor_bytes or 0) - 1})


# -- losses and sequences


def test_an_error_says_what_longer_sequences_need(tmp_path: Path) -> None:
    def refused(model: nn.Module, words: Tensor) -> teraio.BudgetError:
        with pytest.raises(teraio.BudgetError) as caught:
            model(words).backward()
        return caught.value

    def made(budget: int) -> nn.Module:
        forget()
        options = {"storage": str(tmp_path), "memory_budget": budget, "tiles": "off"}
        model: nn.Module = compiled(Predictor(2048, 64), options, dynamic=True)
        return model

    short, long = (torch.arange(length) for length in (256, 2048))
    first = refused(made(MIB), short)
    assert "(not counted, since not known yet: inputs that are larger than those of this call, graphs" in str(first)
    model = made(first.smallest_bytes)
    model(short).backward()
    second = refused(model, long)
    assert second.smallest_bytes > first.smallest_bytes
    model = made(second.smallest_bytes)
    for words in (short, long):
        model(words).backward()
