"""A model that is compiled again with other options: the new run takes over, and training goes on with the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio
from teraio.registry import REGISTRY

from ..thoroughness import every_other
from ..training import MIB

STEPS = 3
PLANNED = 5
"""So many steps are enough to come to the phase planned."""


def stack() -> nn.Sequential:
    """Eight weights of 1 MiB: with gradients and Adam's states 32 MiB. The biases are too small to move."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def train(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, first: int = 0, steps: int = STEPS
) -> list[Tensor]:
    losses = []
    for step in range(first, first + steps):
        loss = model(torch.randn(16, 512, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert teraio.wait_for_plan(60)
        losses.append(loss.detach())
    return losses


def options(folder: Path, mib: int) -> dict[str, Any]:
    return {"memory_budget": mib * MIB, "storage": str(folder), "codegen": "eager"}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def in_place(model: nn.Module, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return teraio.compile(model, **given)


def as_another_object(model: nn.Module, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="teraio", options=given)


@pytest.mark.parametrize(
    ("compiled", "before", "after", "steps"),
    every_other(
        (in_place, 20, 12, PLANNED),
        (in_place, 100, 12, STEPS),
        (as_another_object, 12, 100, STEPS),
        (as_another_object, 12, 20, STEPS),
    ),
)
def test_the_new_budget_holds_and_the_bits_are_the_same(
    compiled: Callable[..., Any], before: int, after: int, steps: int, tmp_path: Path
) -> None:
    plain = stack()
    plain_optimizer = adam(plain)
    expected = train(plain, plain_optimizer, 0, 2 * steps)

    model = stack()
    optimizer = adam(model)
    found = train(compiled(model, options(tmp_path, before)), optimizer, 0, steps)
    (old,) = teraio.status()
    found += train(compiled(model, options(tmp_path, after)), optimizer, steps, steps)

    (new,) = teraio.status()
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert new.device_budget_bytes == after * MIB >= new.device_peak_bytes
    assert (new.moved_bytes["device->storage"] > 0) is (after < 32)
    assert not any(Path(folder).exists() for folder in old.spill_directories)


def test_states_are_under_the_new_budget_before_the_next_step(tmp_path: Path) -> None:
    model = stack()
    optimizer = adam(model)
    train(teraio.compile(model, **options(tmp_path, 20)), optimizer)
    teraio.compile(model, **options(tmp_path, 12))
    for _ in range(2):
        model(torch.randn(16, 512)).square().mean().backward()
    (new,) = teraio.status()
    assert new.moved_bytes["device->storage"] > 0
    assert sum(t.numel() * 4 for state in optimizer.state.values() for t in state.values() if t.numel() > 1) > 12 * MIB


def test_a_backward_pass_that_is_due_still_runs(tmp_path: Path) -> None:
    model, rows = stack(), torch.randn(16, 512)
    model(rows).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    due = as_another_object(model, options(tmp_path, 20))(rows).sum()
    with torch.no_grad():
        as_another_object(model, options(tmp_path, 12))(rows)
    due.backward()
    assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), expected, strict=True) if b is not None)  # type: ignore[arg-type]


def test_what_was_compiled_before_is_refused(tmp_path: Path) -> None:
    """Also if Dynamo still knows it: the third call of torch.compile here makes nothing new."""
    model, rows = stack(), torch.randn(16, 512)
    for mib in (20, 12):
        as_another_object(model, options(tmp_path, mib))(rows)
    third = as_another_object(model, options(tmp_path, 20))
    with pytest.raises(teraio.UnsupportedError, match=r"compiled again .* torch\._dynamo\.reset\(\)"):
        third(rows)
    in_place(model, options(tmp_path, 20))(rows)
    (status,) = teraio.status()
    assert status.device_budget_bytes == 20 * MIB


def test_two_budgets_on_two_models(tmp_path: Path) -> None:
    models, plain = [stack(), stack()], stack()
    expected = train(plain, adam(plain))
    for model, mib in zip(models, (12, 16), strict=True):
        teraio.compile(model, **options(tmp_path, mib))
    optimizers = [adam(model) for model in models]
    assert [train(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)] == [expected, expected]
    assert [status.device_budget_bytes for status in teraio.status()] == [12 * MIB, 16 * MIB]


def test_models_that_share_a_parameter_go_on_with_two_budgets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = stack(), stack()
    second[0].weight = first[0].weight
    for model, mib in ((first, 12), (second, 16)):
        teraio.compile(model, **options(tmp_path, mib))(torch.randn(16, 512))
    assert [status.device_budget_bytes for status in teraio.status()] == [12 * MIB, 16 * MIB]
    assert "1 of 16 parameters of this graph are managed under the budget of 12,582,912 bytes" in caplog.text
    assert "teraio.reset()" in caplog.text


def test_nothing_is_kept_of_the_run_before(tmp_path: Path) -> None:
    model, rows = stack(), torch.randn(16, 512)
    runs = []
    for mib in (20, 12, 16):
        in_place(model, options(tmp_path, mib))(rows).sum().backward()
        runs += [weakref.ref(run) for run in REGISTRY.runs()]
    gc.collect()
    assert [run() is not None for run in runs] == [False, False, True]


def test_dynamo_s_limit_of_recompilations_is_not_used_up(tmp_path: Path) -> None:
    model, rows = stack(), torch.randn(16, 512)
    with torch._dynamo.config.patch(recompile_limit=1):
        for mib in (20, 12, 20):
            in_place(model, options(tmp_path, mib))(rows)
            (status,) = teraio.status()
            assert status.device_budget_bytes == mib * MIB
