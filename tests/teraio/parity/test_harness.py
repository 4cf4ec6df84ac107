"""The harness itself: that it sees a difference of one bit, a broken budget and a run that moved nothing."""

from __future__ import annotations

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


@pytest.fixture
def result() -> Result:
    case = Case(make_model=lambda: Chain(depth=1), make_batches=lambda steps: features(steps, batch=8), steps=2)
    return train(case, backend=None)


def altered(result: Result, name: str, value: torch.Tensor) -> Result:
    return replace(result, parameters=result.parameters | {name: value})


def test_a_run_equals_itself_and_repeats_exactly(result: Result) -> None:
    check_exact(result, result)
    case = Case(make_model=lambda: Chain(depth=1), make_batches=lambda steps: features(steps, batch=8), steps=2)
    check_exact(train(case, backend=None), result)


def test_one_bit_is_seen_and_is_within_the_tolerance(result: Result) -> None:
    value = result.parameters["last.weight"].clone()
    value[0, 0] = torch.nextafter(value[0, 0], torch.tensor(torch.inf))
    with pytest.raises(AssertionError, match=r"1 of \d+ tensors are not equal bit for bit:\s+final last.weight"):
        check_exact(altered(result, "last.weight", value), result)
    check_close(altered(result, "last.weight", value), result)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 0.5])
def test_wrong_values_are_outside_the_tolerance(result: Result, wrong: float) -> None:
    value = result.parameters["last.weight"].clone()
    value[3, 3] = wrong
    with pytest.raises(AssertionError, match="final last"):
        check_close(altered(result, "last.weight", value), result)


def test_a_missing_gradient_is_seen(result: Result) -> None:
    fewer = {name: value for name, value in result.gradients[1].items() if name != "layers.0.up.bias"}
    with pytest.raises(AssertionError, match="gradient 1 of layers"):
        check_exact(replace(result, gradients=(result.gradients[0], fewer)), result)


def test_gradients_and_losses_are_recorded_at_every_step(result: Result) -> None:
    assert len(result.losses) == len(result.gradients) == 2
    assert result.gradients[0].keys() == dict(Chain(depth=1).named_parameters()).keys()
    assert not torch.equal(result.gradients[0]["layers.0.up.weight"], result.gradients[1]["layers.0.up.weight"])


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (Reported(device_peak_bytes=101), "device peak 101 against a budget of 100"),
        (Reported(device_peak_bytes=0), "device peak 0"),
        (Reported(device_budget_bytes=200), "budget 200, not 100"),
        (Reported(moved_bytes={"device->storage": 0, "storage->device": 1}), "nothing moved device->storage"),
        (Reported(moved_bytes={"device->storage": 1, "storage->device": 0}), "nothing moved storage->device"),
    ],
)
def test_a_broken_budget_is_seen(result: Result, status: Reported, message: str) -> None:
    check_budget(replace(result, progress=((Reported(),),)), 100)
    with pytest.raises(AssertionError, match=message):
        check_budget(replace(result, progress=((status,),)), 100)


def test_a_run_without_runtimes_is_seen(result: Result) -> None:
    with pytest.raises(AssertionError, match="no runtime"):
        check_budget(replace(result, progress=((),)), 100)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (Reported(phase="demand"), "no plan took over; phases after each step: .*demand"),
        (Reported(predicted_iteration_seconds=None), "predicts no duration"),
        (Reported(), "nothing came back by the plan"),
    ],
)
def test_a_run_without_a_plan_is_seen(result: Result, status: Reported, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_planned(replace(result, progress=((Reported(),), (status,))))


def test_the_budget_lies_between_floor_and_peak(result: Result) -> None:
    def reports(floor_bytes: int | None, peak_bytes: int) -> Result:
        status = Reported(floor_bytes=floor_bytes, device_peak_bytes=peak_bytes)
        return replace(result, progress=((status,),))

    update = 4 * sum(value.nbytes for value in result.parameters.values()) + 4 * MIB
    assert budget_between(reports(100 * MIB, 300 * MIB), 0.25) == 150 * MIB
    assert budget_between(reports(None, 300 * MIB), 0.5) == (update + 300 * MIB) // 2
    with pytest.raises(AssertionError, match="no room between"):
        budget_between(reports(100 * MIB, 100 * MIB), 0.5)
