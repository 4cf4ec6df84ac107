"""The size of subgroups: chosen once from measured figures, taken from a given plan, and how the fixed cost is measured."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import planner
from planner import Hardware, stations_of_step, subgroup_bytes
from planner.subgroup_size import UNMEASURED_BYTES
from runtime.device import Device
from runtime.paging import Pager
from teraio import training_run
from teraio.optimizer import OptimizerFacts
from teraio.optimizer.subgroups import MIN_SUBGROUP_BYTES, SubgroupSizes, subgroup_seconds

from .. import virtual
from ..parity.harness import MIB, check_exact, reference, share_of_peak, train
from ..parity.optimizers import small
from .plain_training import (
    OPTIMIZERS,
    Make,
    everything,
    same,
    set_gradients,
    square_parameters,
)

GIB = 1 << 30
SIZES = [64 * MIB] * 64

Measure = Callable[[OptimizerFacts, Pager], float]


def hardware(tiers: dict[str, float], host_bytes: int = 64 * GIB) -> Hardware:
    """With links to and from these tiers, of so many bytes per second."""
    rates = {link: rate for tier, rate in tiers.items() for link in (f"device->{tier}", f"{tier}->device")}
    return virtual.hardware(rates, latency=1e-4, host_memory_bytes=host_bytes, storage_bytes=GIB)


class Measured:
    """Updates that take so long, and how often that was measured."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0

    def __call__(self, facts: OptimizerFacts, pager: Pager) -> float:
        self.count += 1
        return self.seconds


def pager(device: Device | None = None) -> Pager:
    return Pager(mover=None, budget_bytes=None, device=device)


KEPT = torch.optim.AdamW(square_parameters(2))


def adam() -> OptimizerFacts:
    return OptimizerFacts.of(KEPT)


def best(machine: Hardware, tier: Any, seconds: float, room: int, total: int = sum(SIZES)) -> int:
    stations = stations_of_step(machine, tier, update_seconds=seconds)
    limits = {"smallest_bytes": MIN_SUBGROUP_BYTES, "largest_bytes": room // 8}
    return subgroup_bytes(stations, total_bytes=total, **limits)


def test_the_size_is_chosen_once_from_what_is_measured() -> None:
    machine, measure = hardware({"host": 1e10}), Measured(1e-3)
    sizes = SubgroupSizes(lambda: machine, measure=measure)
    assert sizes.used_bytes is None
    found = sizes.choose(adam(), SIZES, 4 * GIB, pager())
    assert found == sizes.used_bytes == best(machine, "host", 1e-3, 4 * GIB)
    assert MIN_SUBGROUP_BYTES < found < 4 * GIB // 8, "neither limit decided"
    for room in (GIB // 16, None):
        assert sizes.choose(adam(), SIZES[:3], room, pager()) == found
    assert measure.count == 1


def test_where_nothing_is_measured() -> None:
    measure = Measured(1e-3)
    assert SubgroupSizes(measure=measure).choose(adam(), SIZES, 16 * MIB, pager()) == MIN_SUBGROUP_BYTES
    assert SubgroupSizes(measure=measure).choose(adam(), SIZES, 400 * MIB, pager()) == 50 * MIB
    no_links = SubgroupSizes(lambda: hardware({}), measure=measure)
    assert no_links.choose(adam(), SIZES, 64 * GIB, pager()) == UNMEASURED_BYTES
    no_limit = SubgroupSizes(lambda: hardware({"host": 1e10}), measure=measure)
    assert no_limit.choose(adam(), SIZES, None, pager()) == UNMEASURED_BYTES
    for few in ([MIB, 2 * MIB], [GIB]):  # one subgroup, which must not decide for an optimizer that comes later
        sizes = SubgroupSizes(lambda: hardware({"host": 1e10}), measure=measure)
        assert sizes.choose(adam(), few, GIB, pager()) == MIN_SUBGROUP_BYTES and sizes.used_bytes is None
    assert measure.count == 0


# -- how the fixed cost of a subgroup is measured


def contents(optimizer: Optimizer) -> Any:
    return copy.deepcopy((optimizer.state_dict(), list(vars(optimizer))))


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW fused"], OPTIMIZERS["SGD"], torch.optim.Adafactor])
@pytest.mark.parametrize("steps", [0, 2])
def test_measuring_an_update_changes_nothing(make: Make, steps: int) -> None:
    measured, untouched = (square_parameters(6) for _ in range(2))
    optimizers = [make(parameters) for parameters in (measured, untouched)]
    for step in range(steps + 2):
        for optimizer, parameters in zip(optimizers, (measured, untouched), strict=True):
            set_gradients(parameters, step)
            if step == steps and parameters is measured:
                before = contents(optimizer)
                assert 0 < subgroup_seconds(OptimizerFacts.of(optimizer), pager()) < 1
                assert str(contents(optimizer)) == str(before)
            optimizer.step()
    assert same(everything(optimizers[0]), everything(optimizers[1]))


# -- in training


@pytest.fixture
def larger_subgroups(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], None]:
    """In training, subgroups are larger than a small room allows; `measure` gives their fixed cost."""

    def set_measure(measure: Measure) -> None:
        limits: dict[str, Any] = {"min_bytes": MIB, "max_bytes": lambda room: room // 2}
        monkeypatch.setattr(training_run, "SubgroupSizes", functools.partial(SubgroupSizes, measure=measure, **limits))

    return set_measure


def test_a_plan_brings_the_size_that_it_was_made_for(tmp_path: Path, larger_subgroups: Callable[[Measure], None]) -> None:
    """What is measured the next time does not matter then."""
    case = small("AdamW", layers=6, planned=True, steps=8)
    paths = {"trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"}
    options = share_of_peak(case, tmp_path, 0.5)
    larger_subgroups(Measured(10.0))
    found = train(case, options={**options, **paths})
    trace, plan = planner.Trace.load(paths["trace_out"]), planner.Plan.load(paths["plan_out"])
    assert found.status.phase == "planned" and plan.subgroup_bytes == trace.subgroup_bytes > 8 * MIB
    count = len(trace.subgroups)
    assert 2 <= count <= 6, "at least two of twelve parameters in each"
    larger_subgroups(Measured(0.0))
    for given in (paths["plan_out"], None):
        again = train(case, options={**options, "trace_out": tmp_path / "again.json", "plan": given})
        assert again.status.phase == "planned"
        assert (len(planner.Trace.load(tmp_path / "again.json").subgroups) == count) == (given is not None)
        for result in (found, again):
            check_exact(result, reference(case))
