"""The registry: which models share a run, what runs share, and when runs end. No machine is opened."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner import StorageError
from teraio.machine import Shared
from teraio.options import Options
from teraio.ranks import RankGroup
from teraio.registry import Registry
from teraio.training_run import RunParts

CPU = torch.device("cpu")


class Run:
    """Stands for a training run."""

    def __init__(self, options: Options, device: torch.device, parts: RunParts, shared: Shared, ranks: RankGroup | None) -> None:
        self.options = options
        self.shared = shared
        self.unused = True
        self.plans = True
        self.managed: list[torch.optim.Optimizer] = []
        self.closed: list[bool] = []
        self.known: list[torch.Tensor] = []
        self.expected: list[torch.optim.Optimizer] = []

    def count_managed(self, tensors: Sequence[torch.Tensor]) -> int:
        return sum(any(tensor is known for known in self.known) for tensor in tensors)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.managed

    def expect(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.expected += optimizers

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(device_budget_bytes=1234)

    def manage_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.managed.append(optimizer)

    def wait_for_plan(self, timeout_seconds: float | None) -> bool:
        return self.plans

    def close(self, *, replaced: bool = False) -> None:
        self.closed.append(replaced)


@pytest.fixture
def registry() -> Registry:
    made: Any = Registry()
    made.new_run = Run
    return made


def test_equal_options_share_a_run_and_all_runs_share_what_was_measured(registry: Registry) -> None:
    first, second = registry.run_for(Options(), CPU), registry.run_for(Options(checksums=True), CPU)
    assert registry.run_for(Options(), CPU) is first is not second and registry.runs() == (first, second)
    runs: list[Any] = list(registry.runs())
    assert runs[0].shared is runs[1].shared is registry.shared
    other: Any = Registry()  # shares nothing
    other.new_run = Run
    assert registry.run_for(Options(), CPU) is not other.run_for(Options(), CPU)
    assert registry.shared is not other.shared and registry.shared.ownership is not other.shared.ownership


def test_runs_that_were_not_used_are_closed(registry: Registry) -> None:
    used: Any = registry.run_for(Options(), CPU)
    unused: Any = registry.run_for(Options(checksums=True), CPU)
    used.unused = False
    registry.forget_unused()
    assert registry.runs() == (used,) and (used.closed, unused.closed) == ([], [False])


def test_all_runs_that_are_taken_over_end_even_if_one_fails(registry: Registry) -> None:
    """Else its blocks would stay in lower tiers, and nobody would know of the run any more."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    runs: list[Any] = [registry.run_for(options, CPU) for options in (Options(), Options(checksums=True), Options(debug=True))]

    def broken(*, replaced: bool) -> None:
        raise StorageError("a drive is broken")

    for run in runs[:2]:
        run.known = [parameter]
    runs[0].close = broken
    with pytest.raises(StorageError):
        registry.run_for(Options(codegen="eager"), CPU, [parameter])
    assert [run.closed for run in runs[1:]] == [[True], []]


def test_waiting_is_over_when_no_run_is_planning(registry: Registry) -> None:
    assert registry.wait_for_plan(0.0)
    run: Any = registry.run_for(Options(), CPU)
    assert registry.wait_for_plan(0.0)
    run.plans = False
    assert not registry.wait_for_plan(0.0)


def test_after_a_reset_runs_are_made_again_from_what_is_measured_already(registry: Registry) -> None:
    before: Any = registry.run_for(Options(), CPU)
    registry.reset()
    registry.reset()
    assert before.closed == [False] and registry.runs() == ()
    after: Any = registry.run_for(Options(), CPU)
    assert after is not before and after.shared is before.shared
