"""The registry: which models share a run, what runs share, and when runs end. No machine is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from planner import StorageError, UnsupportedError
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

    def manage_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.managed.append(optimizer)

    def close(self, *, replaced: bool = False) -> None:
        self.closed.append(replaced)


@pytest.fixture
def registry() -> Registry:
    made: Any = Registry()
    made.new_run = Run
    return made


def test_optimizers_are_managed_by_later_runs_too(registry: Registry) -> None:
    early: Any = registry.run_for(Options(), CPU)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    registry.manage_optimizer(sgd)
    later: Any = registry.run_for(Options(checksums=True), CPU)
    assert early.managed == later.managed == [sgd]
    with pytest.raises(UnsupportedError, match="found list, wanted a torch.optim.Optimizer; give the optimizer inside"):
        registry.manage_optimizer([sgd])  # type: ignore[arg-type]


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


def test_after_a_reset_runs_are_made_again_from_what_is_measured_already(registry: Registry) -> None:
    before: Any = registry.run_for(Options(), CPU)
    registry.reset()
    registry.reset()
    assert before.closed == [False] and registry.runs() == ()
    after: Any = registry.run_for(Options(), CPU)
    assert after is not before and after.shared is before.shared
