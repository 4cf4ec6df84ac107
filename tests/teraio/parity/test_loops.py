"""Parity over what users do between forward, backward and update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from .harness import PLANNED_STEPS, Batch, Case, Run, check_parity, plain_step
from .models import Chain, features, features_of_changing_size


def two_layers() -> Chain:
    """Enough where no plan is wanted."""
    return Chain(depth=2)


def accumulate(run: Run, batch: Batch, index: int) -> None:
    """Two forward and backward passes per update."""
    inputs, targets = batch
    run.optimizer.zero_grad()
    for part, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        loss = run.loss((part, wanted)) / 2
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()
    run.optimizer.step()


def test_gradient_accumulation(tmp_path: Path) -> None:
    case = Case(make_model=Chain, make_batches=lambda n: features(n, batch=640), step=accumulate, planned=True)
    check_parity(case, tmp_path)


def accumulate_unevenly(run: Run, batch: Batch, index: int) -> None:
    """One, two or three passes per update: iterations that do not repeat."""
    run.optimizer.zero_grad()
    for _ in range(1 + index % 3):
        loss = run.loss(batch)
        loss.backward()
        run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def test_a_changing_number_of_passes_after_the_plan(tmp_path: Path) -> None:
    """The plan's iteration does not come: paging falls back to on demand, and the result stays."""

    def step(run: Run, batch: Batch, index: int) -> None:
        (plain_step if index < PLANNED_STEPS else accumulate_unevenly)(run, batch, index)

    case = Case(make_model=Chain, make_batches=features, step=step, planned=True, steps=10)
    check_parity(case, tmp_path)


def evaluate_then_train(run: Run, batch: Batch, index: int) -> None:
    """A pass in evaluation mode without gradients before every step: dropout is off in it and on after it."""
    run.module.eval()
    with torch.no_grad():
        run.record("loss in evaluation", run.loss(batch))
        run.record("logits in evaluation", run.model(batch[0]))
    run.module.train()
    plain_step(run, batch, index)


def test_evaluation_between_steps(tmp_path: Path) -> None:
    with torch._inductor.config.patch(fallback_random=True):
        case = Case(
            make_model=lambda: Chain(depth=2, dropout=0.1),
            make_batches=features,
            step=evaluate_then_train,
        )
        check_parity(case, tmp_path, debug=True)


def evaluate_mid_step(run: Run, batch: Batch, index: int) -> None:
    """Once the plan runs: a pass between forward and backward, amid the saved activations."""
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    if index >= PLANNED_STEPS:
        with torch.no_grad():
            run.record("loss in between", run.loss(batch))
    loss.backward()
    run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def test_evaluation_between_forward_and_backward(tmp_path: Path) -> None:
    case = Case(
        make_model=Chain,
        make_batches=features,
        step=evaluate_mid_step,
        planned=True,
        steps=9,
    )
    check_parity(case, tmp_path)


@pytest.mark.parametrize("dynamic", [None, False], ids=["automatic-dynamic", "static"])
def test_changing_batch_size(tmp_path: Path, dynamic: bool | None) -> None:
    case = Case(
        make_model=two_layers,
        make_batches=features_of_changing_size,
        compile_options={"dynamic": dynamic},
        steps=6,
    )
    check_parity(case, tmp_path)


def backward_twice(run: Run, batch: Batch, index: int) -> None:
    """The second backward reads the activations that the first one kept, and adds to the gradients."""
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward(retain_graph=True)
    run.record_gradients()
    if index % 2 == 0:
        loss.backward()
        run.record_gradients()
    run.record_loss(loss)
    run.optimizer.step()


def test_retain_graph(tmp_path: Path) -> None:
    check_parity(Case(make_model=two_layers, make_batches=features, step=backward_twice), tmp_path, debug=True)


def two_losses_at_once(run: Run, batch: Batch, index: int) -> None:
    """Two forward passes, then both backwards, in the order of the passes and in the reverse one by turns."""
    inputs, targets = batch
    run.optimizer.zero_grad()
    losses = [run.loss((inputs, targets)), run.loss((inputs.flip(0), targets))]
    for loss in losses if index % 2 else reversed(losses):
        loss.backward()
        run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def test_interleaved_forward_and_backward_passes(tmp_path: Path) -> None:
    case = Case(make_model=two_layers, make_batches=features, step=two_losses_at_once)
    check_parity(case, tmp_path, debug=True)


def clip(run: Run, batch: Batch, index: int) -> None:
    """Clip the norm of all gradients between backward and update."""
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    run.record("norm", torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.05))
    run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def test_gradient_clipping(tmp_path: Path) -> None:
    result = check_parity(Case(make_model=Chain, make_batches=features, step=clip, planned=True), tmp_path)
    assert all(float(norm) > 0.05 for name, norm in result.observed if name == "norm"), "nothing was clipped"


def test_gradients_that_are_zeroed_and_kept(tmp_path: Path) -> None:
    """All other tests let go of them: `zero_grad()` sets them to None."""

    def step(run: Run, batch: Batch, index: int) -> None:
        run.optimizer.zero_grad(set_to_none=False)
        for parameter in run.module.parameters() if index else ():
            assert parameter.grad is not None and not bool(parameter.grad.any())
        loss = run.loss(batch)
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()
        run.optimizer.step()

    case = Case(make_model=Chain, make_batches=features, step=step, planned=True)
    check_parity(case, tmp_path)


def test_outputs_kept_over_steps(tmp_path: Path) -> None:
    """Logits that the user holds on to neither change nor vanish while later steps page."""

    def step(run: Run, batch: Batch, index: int) -> None:
        run.optimizer.zero_grad()
        logits = run.model(batch[0])
        loss = torch.nn.functional.cross_entropy(logits, batch[1])
        held: list[tuple[Tensor, Tensor]] = run.kept.setdefault("held", [])
        held.append((logits, logits.detach().clone()))
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()
        run.optimizer.step()
        for logits, copy in held:
            assert torch.equal(logits, copy)
            run.record("held logits", logits)

    check_parity(Case(make_model=two_layers, make_batches=features, step=step), tmp_path, debug=True)


class WithLoss(Chain):
    """Returns its loss."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.cross_entropy(super().forward(x), targets)


def test_a_loss_of_the_model_that_is_kept_until_the_next_one(tmp_path: Path) -> None:
    """As the variable `loss` is in an ordinary loop: the stage that makes the loss makes activations, too."""

    def step(run: Run, batch: Batch, index: int) -> None:
        loss = run.kept["loss"] = run.model(*batch)
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad()

    case = Case(make_model=lambda: WithLoss(outputs=1024, depth=2), make_batches=features, step=step, planned=True)
    check_parity(case, tmp_path)


def gradients_by_function(run: Run, batch: Batch, index: int) -> None:
    """`torch.autograd.grad` in place of `backward`: gradients that belong to the user alone."""
    parameters = list(run.module.parameters())
    loss = run.loss(batch)
    gradients = torch.autograd.grad(loss, parameters)
    run.record_loss(loss)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    del gradients
    run.record_gradients()
    run.optimizer.step()


def test_autograd_grad(tmp_path: Path) -> None:
    check_parity(Case(make_model=two_layers, make_batches=features, step=gradients_by_function), tmp_path)
