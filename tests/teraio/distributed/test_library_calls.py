"""Methods of other libraries as stages: put in place, taken away, recorded, and safe where they fail."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from planner.errors import BudgetError, StorageError
from runtime.paging import Block, Pager
from teraio.distributed import LibraryCalls
from teraio.following import IterationObserver

from ..virtual import TimedMover


class Library:
    """Stands for an object of PyTorch whose `work` others call."""

    def __init__(self) -> None:
        self.worked: list[str] = []

    def work(self, how: str = "plainly") -> None:
        self.worked.append(how)


class Ours:
    def work(self, owner: Library, how: str = "plainly") -> None:
        Library.work(owner, f"{how}, by us")


def calls_for(pager: Pager) -> tuple[LibraryCalls, IterationObserver]:
    recorder = IterationObserver(pager)
    return LibraryCalls(pager, recorder, active=lambda: True, explained=explained), recorder


def explained(error: BudgetError) -> BudgetError:
    return error.asking_for(error.smallest_bytes + 1000, not_counted="the optimizer's update")


def test_a_method_is_replaced_until_close() -> None:
    calls, library, ours = calls_for(Pager(mover=None, budget_bytes=None))[0], Library(), Ours()
    calls.replace(library, "work", ours.work)
    calls.replace(library, "work", ours.work)
    library.work("well")
    calls.close()
    library.work("well")
    assert library.worked == ["well, by us", "well"]


def test_the_method_of_the_class_runs_once_ours_is_gone() -> None:
    calls, library, ours = calls_for(Pager(mover=None, budget_bytes=None))[0], Library(), Ours()
    calls.replace(library, "work", ours.work)
    del ours
    gc.collect()
    library.work()
    assert library.worked == ["plainly"]


@pytest.mark.parametrize("budget_bytes", [8, None])
def test_a_call_that_fails_holds_nothing(budget_bytes: int | None) -> None:
    """It does not fit, and nothing can leave; or it fails by itself."""
    pager = Pager(mover=None, budget_bytes=budget_bytes)
    calls, recorder = calls_for(pager)
    held = torch.ones(4)
    read = pager.block_of(held, name="read", kind="parameter", user_visible=True)

    def fail() -> Sequence[Block]:
        raise RuntimeError("the other rank is gone")

    with pytest.raises(RuntimeError if budget_bytes is None else StorageError), calls.region("a call", 1):
        calls.stage("forward/gather", fail, read=[read])
    assert not read.pins and not recorder.iteration_ends().complete


def test_a_call_that_does_not_fit_tells_what_is_not_counted() -> None:
    calls, _ = calls_for(Pager(mover=TimedMover(), budget_bytes=8))
    with pytest.raises(BudgetError) as refused, calls.region("a call", 1):
        calls.stage("forward/gather", lambda: (), read=[], made_bytes=32)
    assert refused.value.smallest_bytes == 1032 and refused.value.not_counted == "the optimizer's update"
