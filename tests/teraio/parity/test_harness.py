"""The harness itself: that it sees a difference of one bit, a broken budget and a run that moved nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from .harness import MIB, Case, Result, budget_between, check_budget, check_close, check_exact, check_planned, train
from .models import Chain, features


@dataclass(frozen=True, kw_only=True)
class Reported:
    """The fields of a status that the harness reads."""

    phase: str = "planned"
    device_budget_bytes: int = 100
    device_peak_bytes: int = 90
    floor_bytes: int | None = 20
    predicted_iteration_seconds: float | None = 0.5
    moved_bytes: dict[str, int] = field(default_factory=lambda: {"device->storage": 1, "storage->device": 1})


CASE = Case(make_model=lambda: Chain(depth=1), make_batches=lambda steps: features(steps, batch=8), steps=2)


@pytest.fixture
def result() -> Result:
    return train(CASE, backend=None)


def altered(result: Result, value: float | torch.Tensor) -> Result:
    weight = result.parameters["last.weight"].clone()
    weight[3, 3] = value
    return replace(result, parameters=result.parameters | {"last.weight": weight})


def test_a_run_repeats_exactly_and_everything_is_recorded_at_every_step(result: Result) -> None:
    check_exact(train(CASE, backend=None), result)
    assert len(result.losses) == len(result.gradients) == 2
    assert result.gradients[0].keys() == dict(Chain(depth=1).named_parameters()).keys()
    assert not torch.equal(result.gradients[0]["layers.0.up.weight"], result.gradients[1]["layers.0.up.weight"])
    assert "momentum_buffer of 0" in result.states


def test_one_bit_is_seen_and_is_within_the_tolerance(result: Result) -> None:
    other = altered(result, torch.nextafter(result.parameters["last.weight"][3, 3], torch.tensor(torch.inf)))
    with pytest.raises(AssertionError, match=r"1 of \d+ tensors are not equal bit for bit:\s+final last.weight"):
        check_exact(other, result)
    check_close(other, result)
    for wrong in (torch.nan, torch.inf, 0.5):
        with pytest.raises(AssertionError, match="final last"):
            check_close(altered(result, wrong), result)


def test_a_missing_gradient_and_another_state_are_seen(result: Result) -> None:
    fewer = {name: value for name, value in result.gradients[1].items() if name != "layers.0.up.bias"}
    with pytest.raises(AssertionError, match="gradient 1 of layers"):
        check_exact(replace(result, gradients=(result.gradients[0], fewer)), result)
    with pytest.raises(AssertionError, match="state momentum_buffer of 0"):
        check_exact(replace(result, states=result.states | {"momentum_buffer of 0": torch.zeros(1)}), result)


OUT, IN = "device->storage", "storage->device"
WRONG: list[tuple[Callable[[Result], None], Reported | None, str]] = [
    *(
        (lambda result: check_budget(result, 100), status, message)
        for status, message in (
            (Reported(device_peak_bytes=101), "device peak 101 against a budget of 100"),
            (Reported(device_peak_bytes=0), "device peak 0"),
            (Reported(device_budget_bytes=200), "budget 200, not 100"),
            (Reported(moved_bytes={OUT: 0, IN: 1}), f"nothing moved {OUT}"),
            (Reported(moved_bytes={OUT: 1, IN: 0}), f"nothing moved {IN}"),
            (None, "no runtime"),
        )
    ),
    (check_planned, Reported(phase="demand"), "no plan took over; phases after each step: .*demand"),
    (check_planned, Reported(predicted_iteration_seconds=None), "predicts no duration"),
    (check_planned, Reported(), "nothing came back by the plan"),
]


@pytest.mark.parametrize(("check", "status", "message"), WRONG)
def test_a_broken_budget_and_a_run_without_a_plan_are_seen(
    result: Result, check: Callable[[Result], None], status: Reported | None, message: str
) -> None:
    check_budget(replace(result, progress=((Reported(),),)), 100)
    with pytest.raises(AssertionError, match=message):
        check(replace(result, progress=((Reported(),), () if status is None else (status,))))


def test_the_budget_lies_between_floor_and_peak(result: Result) -> None:
    def reports(floor_bytes: int | None, peak_bytes: int) -> Result:
        return replace(result, progress=((Reported(floor_bytes=floor_bytes, device_peak_bytes=peak_bytes),),))

    update = 4 * sum(value.nbytes for value in result.parameters.values()) + 4 * MIB
    assert budget_between(reports(100 * MIB, 300 * MIB), 0.25) == 150 * MIB
    assert budget_between(reports(None, 300 * MIB), 0.5) == (update + 300 * MIB) // 2
    with pytest.raises(AssertionError, match="no room between"):
        budget_between(reports(100 * MIB, 100 * MIB), 0.5)
