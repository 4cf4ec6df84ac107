"""Kinds of models, and what users do in a loop: the same losses, gradients and parameters with a budget as without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from . import loops
from .harness import PLANNED_STEPS, Batch, Case, Result, Run, check_parity, compiled_input_needs_grad
from .models import (
    WITH_REENTRY,
    WITHOUT_REENTRY,
    Aliases,
    Chain,
    ConvNet,
    SparseEmbedding,
    Transformer,
    checkpointed,
    features,
    features_of_changing_size,
    images,
    nested,
    tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """parity: how to check it, see `check_parity`. check: of the budgeted run."""

    case: Case
    parity: dict[str, Any]
    check: Callable[[Result], bool]


def row(
    make_model: Callable[[], nn.Module],
    make_batches: Callable[[int], list[Batch]] = features,
    *,
    fraction: float = 0.3,
    codegen: str = "eager",
    debug: bool = False,
    check: Callable[[Result], bool] = lambda result: True,
    **case: Any,
) -> Row:
    parity = {"fraction": fraction, "codegen": codegen, "debug": debug}
    return Row(case=Case(make_model=make_model, make_batches=make_batches, **case), parity=parity, check=check)


# -- kinds of models


def adamw_in_two_groups(module: nn.Module) -> Optimizer:
    """Weight decay for matrices only; a large eps, or noise in tiny gradients would become whole updates."""
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def warm_up(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 4))


def loss_over_views(model: nn.Module, batch: Batch) -> Tensor:
    """Uses the three outputs that alias each other, one of them after it was written to in place."""
    inputs, targets = batch
    logits, hidden, every_other, transposed = model(inputs)
    doubled = hidden * 2
    doubled[:, 1::2] += 1
    return functional.cross_entropy(logits, targets) + 1e-2 * (doubled.mean() + every_other.square().mean() - transposed.std())


def frozen_chain() -> Chain:
    model = Chain(depth=3, dropout=0.2)
    for layer in (model.layers[0], model.layers[2].up):
        layer.requires_grad_(False)
    return model


def only_trained_have_gradients(result: Result) -> bool:
    names = result.gradients[0].keys()
    return "layers.2.down.weight" in names and not names & {"layers.0.up.weight", "layers.0.down.weight", "layers.2.up.weight"}


class Adversaries(nn.Module):
    """Two models that are compiled by themselves: a coder and its judge."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = Chain(outputs=64)
        self.judge = Chain()


def sparse_adam(module: nn.Module) -> Optimizer:
    """It updates sparse gradients only."""
    module.get_submodule("layers").requires_grad_(False)
    return torch.optim.SparseAdam(module.get_submodule("embed").parameters(), lr=0.01)


def sparse_step(run: Run, batch: Batch, index: int) -> None:
    run.optimizer.zero_grad()
    run.backward(batch)
    gradient = run.module.embed.weight.grad
    assert gradient.is_sparse
    run.record("gradient", gradient.to_dense())
    run.optimizer.step()


def varying(steps: int) -> list[Batch]:
    """Sequences of varying length: sizes and strides of graphs are symbolic."""
    return [tokens(1, time=length)[0] for length in (128, 96, 112, 96)[:steps]]


def broken_off(result: Result) -> bool:
    """Only the upper half had got its gradients."""
    names = result.gradients[loops.BROKEN_STEPS[0]].keys()
    return "upper.layers.0.up.weight" in names and "lower.layers.0.up.weight" not in names


def counted(result: Result) -> bool:
    batches, mean = (result.parameters[f"features.0.1.{name}"] for name in ("num_batches_tracked", "running_mean"))
    return int(batches) == len(result.losses) and bool(mean.any())


adamw = {"make_optimizer": adamw_in_two_groups, "make_scheduler": warm_up}
short = partial(Transformer, layers=1)
PLAIN, AS_FOR_USERS = "parameter groups and a schedule", pytest.mark.planning_process
ROWS = {
    PLAIN: row(short, tokens, **adamw, planned=True, fraction=0.5),
    "tied weights": row(
        lambda: Transformer(layers=1, tied=True, vocabulary=1024),
        tokens,
        planned=True,
        fraction=0.1,
        check=lambda result: "head.weight" not in result.parameters,
    ),
    "views and aliases": row(
        Aliases, compute_loss=loss_over_views, planned=True, check=lambda result: bool(result.parameters["memory"].any())
    ),
    "batch norm": row(ConvNet, images, planned=True, check=counted),
    "frozen layers and dropout": row(frozen_chain, planned=True, check=only_trained_have_gradients),
    "a layer frozen for two steps": row(
        Chain,
        step=loops.freeze_and_thaw,
        steps=4,
        check=lambda result: ["layers.1.up.weight" in g for g in result.gradients] == [True, False, False, True],
    ),
    "a graph break": row(lambda: Chain(break_at=1), planned=True),
    # The last layer is not compiled.
    "layers compiled one by one": row(Chain, compile_parts=("layers.0", "layers.1"), planned=True),
    "two models with an optimizer each": row(Adversaries, compile_parts=("coder", "judge"), step=loops.train_in_turns, steps=4),
    "checkpointed layers": row(lambda: checkpointed(WITHOUT_REENTRY, WITH_REENTRY, nested, dropout=0.2), tokens, steps=2),
    "sparse gradients": row(SparseEmbedding, tokens, step=sparse_step, make_optimizer=sparse_adam),
    "batches of changing size": row(Chain, features_of_changing_size, steps=6),
    "sequences of changing length": row(short, varying),
    "dropout by Inductor": row(lambda: Chain(dropout=0.3), codegen="inductor"),
    "accumulation, clipping, zeroed gradients": row(
        Chain,
        lambda count: features(count, batch=640),
        step=loops.accumulate,
        planned=True,
        check=lambda result: all(float(norm) > 0.05 for name, norm in result.observed if name == "norm"),
    ),
    "a loss that is kept": row(lambda: loops.WithLoss(outputs=1024), step=loops.keep_the_loss, planned=True),
    "references and writes": row(Chain, step=loops.hold_and_write, planned=True, debug=True),
    "passes that are not in the plan": row(Chain, step=loops.leave_the_plan, planned=True, steps=11),
    "something else in each step": row(lambda: Chain(dropout=0.1), step=loops.in_turns, steps=len(loops.TURNS) + 3, debug=True),
    "exceptions": row(  # what is kept of broken steps is in the peak
        loops.FusedChain,
        compile_parts=("lower", "upper"),
        step=loops.break_off,
        planned=True,
        steps=PLANNED_STEPS + 4,
        fraction=0.05,
        check=broken_off,
    ),
}


@pytest.mark.usefixtures("eager_dropout")
@pytest.mark.parametrize("name", [pytest.param(name, marks=AS_FOR_USERS if name == PLAIN else ()) for name in ROWS])
@compiled_input_needs_grad
def test_the_same_numbers(name: str, tmp_path: Path) -> None:
    """With updates inside the backward pass: `test_overlap.py`."""
    row = ROWS[name]
    torch._dynamo.utils.counters.clear()
    assert row.check(check_parity(row.case, tmp_path, **row.parity))
    assert "break" not in name or torch._dynamo.utils.counters["graph_break"], "the graph did not break"
