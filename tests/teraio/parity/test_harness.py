"""The harness itself: that it sees a difference of one bit, a broken budget and a run that moved nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from .harness import Case, Result, check_budget, check_close, check_exact, check_planned, train
from .models import Chain, features

OUT, IN = "device->storage", "storage->device"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """The fields of a status that the harness reads."""

    phase: str = "planned"
    device_budget_bytes: int = 100
    device_peak_bytes: int = 90
    predicted_iteration_seconds: float | None = 0.5
    moved_bytes: dict[str, int] = field(default_factory=lambda: {OUT: 1, IN: 1})


CASE = Case(make_model=lambda: Chain(depth=1), make_batches=lambda steps: features(steps, batch=8), steps=2)


def altered(result: Result, value: float | torch.Tensor) -> Result:
    weight = result.parameters["last.weight"].clone()
    weight[3, 3] = value
    return replace(result, parameters=result.parameters | {"last.weight": weight})


def test_what_differs_is_seen() -> None:
    result = train(CASE, backend=None)
    check_exact(train(CASE, backend=None), result)
    other = altered(result, torch.nextafter(result.parameters["last.weight"][3, 3], torch.tensor(torch.inf)))
    check_close(other, result)
    fewer = {name: value for name, value in result.gradients[1].items() if name != "layers.0.up.bias"}
    states = result.states | {"momentum_buffer of 0": torch.zeros(1)}
    for wrong, message in (
        (other, r"1 of \d+ tensors are not equal bit for bit:\s+final last.weight"),
        (replace(result, gradients=(result.gradients[0], fewer)), "gradient 1 of layers"),
        (replace(result, states=states), "state momentum_buffer of 0"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_exact(wrong, result)
    for value in (torch.nan, torch.inf, 0.5):
        with pytest.raises(AssertionError, match="final last"):
            check_close(altered(result, value), result)


def within(result: Result) -> None:
    check_budget(result, 100)


@pytest.mark.parametrize(
    ("check", "status", "message"),
    [
        (within, Reported(device_peak_bytes=101), "device peak 101 against a budget of 100"),
        (within, Reported(moved_bytes={OUT: 0, IN: 1}), f"nothing moved {OUT}"),
        (check_planned, Reported(phase="demand"), "no plan took over; phases after each step: .*demand"),
        (check_planned, Reported(), "nothing came back by the plan"),
    ],
)
def test_a_broken_budget_and_a_run_without_a_plan_are_seen(
    check: Callable[[Result], None], status: Reported, message: str
) -> None:
    before = Result((), (), (), {}, ((Reported(),),))
    within(before)
    with pytest.raises(AssertionError, match=message):
        check(replace(before, progress=((Reported(),), (status,))))
