"""`teraio.on_device`: tensors that wait elsewhere are brought in for user code, within the budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import teraio
from planner.errors import StorageIOError
from runtime.paging import Pager, State

from ..training import MIB, mean_square_step, pagers, random_rows, weights_of_1_mib


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[nn.Module, Pager]]:
    """24 weights of 1 MiB after two steps under a budget that holds about half of them."""
    training = weights_of_1_mib({"memory_budget": 16 * MIB, "storage": tmp_path})
    training.run(random_rows(2), functools.partial(mean_square_step, training))
    (pager,) = pagers()
    yield training.module, pager
    teraio.reset()


def test_tensors_are_there_and_what_is_written_to_them_stays(trained: tuple[nn.Module, Pager]) -> None:
    module, pager = trained
    for number, weight in enumerate(module.parameters()):
        expected = weight.detach().clone()
        with teraio.on_device([weight]):
            block = pager.known_block(weight)
            assert block is not None and block.state is State.ON_DEVICE and block.pins == 1
            assert pager.account.used_bytes <= 16 * MIB
            assert torch.equal(weight, expected)
            with torch.no_grad():
                weight.fill_(number)
        assert block.pins == 0
    assert any(block.state is State.OFFLOADED for block in pager.blocks)
    assert [weight.unique().tolist() for weight in module.parameters()] == [[number] for number in range(24)]


def test_more_than_the_budget_holds_is_refused_and_nothing_stays_held(trained: tuple[nn.Module, Pager]) -> None:
    module, pager = trained
    with pytest.raises(teraio.BudgetError, match="tensors that user code asked for"):
        with teraio.on_device(module.parameters()):
            pytest.fail("they do not fit")
    assert all(block.pins == 0 for block in pager.blocks)


def test_tensors_that_teraio_does_not_know_are_left_alone(trained: tuple[nn.Module, Pager]) -> None:
    with teraio.on_device([torch.zeros(3), torch.zeros(2, 2).to_sparse()]):
        pass


def test_a_failure_meanwhile_leaves_nothing_held(trained: tuple[nn.Module, Pager], monkeypatch: pytest.MonkeyPatch) -> None:
    module, pager = trained
    weight = next(iter(module.parameters()))

    def fail() -> None:
        monkeypatch.undo()
        pager.leave_region()
        raise StorageIOError(path="/nowhere", block="another one", errno=5)

    monkeypatch.setattr(pager, "leave_region", fail)
    with pytest.raises(StorageIOError):
        with teraio.on_device([weight]):
            pytest.fail("a copy was lost")
    assert all(block.pins == 0 for block in pager.blocks)


def test_a_tensor_that_got_other_memory_is_no_block_any_more(trained: tuple[nn.Module, Pager]) -> None:
    module, pager = trained
    (weight, *_) = [w for w in module.parameters() if (b := pager.known_block(w)) is not None and b.state is State.OFFLOADED]
    expected = weight.detach().clone()
    weight.share_memory_()
    with teraio.on_device([weight]):
        assert torch.equal(weight, expected)
    assert pager.account.used_bytes == sum(block.size_bytes for block in pager.blocks if block.state is State.ON_DEVICE)
