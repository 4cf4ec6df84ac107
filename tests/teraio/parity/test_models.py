"""Parity over kinds of models: the same losses, gradients and parameters with a budget as without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from .harness import Batch, Case, Run, check_parity, compiled_input_needs_grad, plain_step, sgd
from .models import Aliases, Chain, ConvNet, Transformer, features, images, tokens


def adamw_in_two_groups(module: nn.Module) -> Optimizer:
    """Weight decay for matrices only; a large eps, or noise in tiny gradients would become whole updates."""
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def warm_up(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 4))


@pytest.mark.planning_process
def test_transformer_with_parameter_groups_and_schedule(tmp_path: Path) -> None:
    """The plan is made as it is for users: by a process of its own."""
    case = Case(
        make_model=Transformer,
        make_batches=tokens,
        make_optimizer=adamw_in_two_groups,
        make_scheduler=warm_up,
        planned=True,
    )
    check_parity(case, tmp_path, fraction=0.5)


@pytest.mark.long  # compiles kernels for half a minute; the README's example runs by Inductor as well
def test_transformer_compiled_by_inductor(tmp_path: Path) -> None:
    check_parity(
        Case(make_model=Transformer, make_batches=tokens, planned=True),
        tmp_path,
        codegen="inductor",
        fraction=0.4,
    )


def test_tied_weights(tmp_path: Path) -> None:
    case = Case(make_model=lambda: Transformer(layers=1, tied=True, vocabulary=1024), make_batches=tokens, planned=True)
    result = check_parity(case, tmp_path, fraction=0.1)
    assert "head.weight" not in result.parameters, "one tensor, so one name"


@pytest.mark.long  # beside the next test, which has dropout in addition
def test_chain_compiled_by_inductor(tmp_path: Path) -> None:
    check_parity(Case(make_model=Chain, make_batches=features), tmp_path, codegen="inductor")


@pytest.mark.usefixtures("eager_dropout")
def test_dropout_compiled_by_inductor(tmp_path: Path) -> None:
    check_parity(Case(make_model=lambda: Chain(depth=2, dropout=0.3), make_batches=features), tmp_path, codegen="inductor")


def loss_over_views(model: nn.Module, batch: Batch) -> Tensor:
    """Uses the three outputs that alias each other, one of them after it was written to in place."""
    inputs, targets = batch
    logits, hidden, every_other, transposed = model(inputs)
    doubled = hidden * 2
    doubled[:, 1::2] += 1
    return functional.cross_entropy(logits, targets) + 1e-2 * (doubled.mean() + every_other.square().mean() - transposed.std())


def test_views_and_aliases(tmp_path: Path) -> None:
    case = Case(make_model=Aliases, make_batches=features, compute_loss=loss_over_views, planned=True)
    result = check_parity(case, tmp_path)
    assert bool(result.parameters["memory"].any()), "the buffer that the forward pass writes stayed zero"


def test_batch_norm_buffers(tmp_path: Path) -> None:
    result = check_parity(Case(make_model=ConvNet, make_batches=images, planned=True), tmp_path)
    assert int(result.parameters["features.0.1.num_batches_tracked"]) == len(result.losses)
    assert bool(result.parameters["features.0.1.running_mean"].any())


def frozen_chain() -> Chain:
    model = Chain(depth=4, dropout=0.2)
    for layer in (model.layers[0], model.layers[2].up):
        layer.requires_grad_(False)
    return model


@pytest.mark.usefixtures("eager_dropout")
def test_frozen_layers_and_dropout_of_the_same_masks(tmp_path: Path) -> None:
    result = check_parity(Case(make_model=frozen_chain, make_batches=features, planned=True), tmp_path)
    names = result.gradients[0].keys()
    assert "layers.2.down.weight" in names
    assert not names & {"layers.0.up.weight", "layers.0.down.weight", "layers.2.up.weight"}


def freeze_and_thaw(run: Run, batch: Batch, index: int) -> None:
    """Layer 1 trains in the first and the last step only."""
    layer = run.module.get_submodule("layers.1")
    layer.requires_grad_(index in (0, 3))
    plain_step(run, batch, index)


def test_a_layer_frozen_for_two_steps(tmp_path: Path) -> None:
    result = check_parity(Case(make_model=Chain, make_batches=features, step=freeze_and_thaw, steps=4), tmp_path)
    assert ["layers.1.up.weight" in g for g in result.gradients] == [True, False, False, True]


@compiled_input_needs_grad
def test_a_graph_break(tmp_path: Path) -> None:
    torch._dynamo.utils.counters.clear()
    case = Case(make_model=lambda: Chain(break_at=1), make_batches=features, planned=True)
    check_parity(case, tmp_path)
    assert torch._dynamo.utils.counters["graph_break"], "the graph did not break"


class Adversaries(nn.Module):
    """Two models that are compiled by themselves: a coder and its judge."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = Chain(outputs=64)
        self.judge = Chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.coder(x))


def train_in_turns(run: Run, batch: Batch, index: int) -> None:
    """An iteration of one model, then one of the other, each with its own optimizer.

    In every other step nothing is shared: one model trains while the other one's blocks wait.
    """
    inputs, targets = batch
    optimizers = run.kept.setdefault("optimizers", [sgd(child) for child in run.module.children()])
    coder, judge = run.module.get_submodule("coder"), run.module.get_submodule("judge")
    together: list[Callable[[], Tensor]] = [
        lambda: functional.cross_entropy(judge(coder(inputs)), targets),
        lambda: functional.cross_entropy(judge(coder(inputs).detach()), targets.flip(0)),
    ]
    apart: list[Callable[[], Tensor]] = [
        lambda: functional.cross_entropy(coder(inputs), targets % 64),
        lambda: functional.cross_entropy(judge(inputs.flip(0)), targets % 64),
    ]
    for optimizer, objective in zip(optimizers, apart if index % 2 else together, strict=True):
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()
        optimizer.step()


@compiled_input_needs_grad
def test_two_compiled_models_with_an_optimizer_each(tmp_path: Path) -> None:
    case = Case(make_model=Adversaries, make_batches=features, compile_parts=("coder", "judge"), step=train_in_turns, steps=4)
    check_parity(case, tmp_path)
