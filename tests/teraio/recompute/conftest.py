"""The same program at every budget, and links that are measured in a hurry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from runtime.transfer.engine import Engine

from .training import MIB


@pytest.fixture(autouse=True)
def same_program_at_every_budget(monkeypatch: pytest.MonkeyPatch, subgroups_of: Callable[[int], None]) -> None:
    """The size of subgroups follows from budget and rates; a plan is for one program. Links are measured in a hurry."""
    subgroups_of(MIB)
    monkeypatch.setattr(Engine, "measure", functools.partialmethod(Engine.measure, MIB))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Adding up the gradients of an embedding depends on threads otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
