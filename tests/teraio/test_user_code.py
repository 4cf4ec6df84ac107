"""Tensors in the hands of user code: what it was given stays, what it writes is kept, what it asks for is brought in."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import teraio
from planner.errors import StorageIOError
from runtime.paging import State

from ..training import MIB, Training, begin, blocks, forget, known_blocks, pagers, random_rows, unequal, weights_of_1_mib

pytestmark = pytest.mark.usefixtures("finely_cut", "quick_links")

# -- memory that was given away before the first compiled call stays where it is; nothing else does

SAID = "was given away before the first compiled call"


@pytest.fixture
def stack() -> nn.Sequential:
    """Eight weights of 1 MiB, the last of them frozen."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model[7].requires_grad_(False)
    return model


def compiled(model: nn.Module, folder: Path, budget: int) -> nn.Module:
    forget()
    return teraio.compile(model, memory_budget=budget, storage=folder, codegen="eager")


def train_stack(model: nn.Module, folder: Path) -> set[str]:
    """Return the names of the parameters that stay on the device."""
    optimizer = torch.optim.Adam(parameter for parameter in model.parameters() if parameter.requires_grad)
    compiled(model, folder, 14 * MIB)
    for _ in range(2):
        model(torch.randn(16, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert teraio.status()[0].moved_bytes["device->storage"] > 0
    return {block.name for block in blocks() if block.kind == "parameter" and block.size_bytes >= MIB and block.span is None}


def by_dlpack(weight: Tensor) -> Any:
    return np.from_dlpack(weight.detach())


def by_torch(weight: Tensor) -> Any:
    return torch.from_dlpack(weight.detach()).numpy()


@pytest.mark.parametrize("export", [by_dlpack, by_torch])
def test_what_was_given_away_shows_what_is_trained(
    export: Callable[[Tensor], Any], stack: nn.Sequential, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a reset it may move again. A frozen weight can be given away itself."""
    before = stack[2].weight.detach().clone()
    held, frozen = export(stack[2].weight), torch.from_dlpack(stack[7].weight)
    assert train_stack(stack, tmp_path) == {"2.weight", "7.weight"}
    assert np.array_equal(held, stack[2].weight.detach().numpy()) and not torch.equal(before, stack[2].weight)
    assert torch.equal(frozen, stack[7].weight) and frozen.data_ptr() == stack[7].weight.data_ptr()
    said = [record.message for record in caplog.records if SAID in record.message]
    assert len(said) == 2 and "2.weight" in said[0] and "7.weight" in said[1]
    del held, frozen
    teraio.reset()
    caplog.clear()
    train_stack(stack, tmp_path)
    assert SAID not in caplog.text


def test_the_budget_that_an_error_names_counts_what_was_given_away(stack: nn.Sequential, tmp_path: Path) -> None:
    held = [by_dlpack(layer.weight) for layer in stack]
    with pytest.raises(teraio.BudgetError) as caught:
        compiled(stack, tmp_path, MIB)(torch.randn(16, 512))
    assert caught.value.smallest_bytes >= len(held) * MIB
    compiled(stack, tmp_path, caught.value.smallest_bytes)(torch.randn(16, 512)).square().mean().backward()


# -- what user code has not written is not written to the drive again, and no write is missed

BUDGET = {"memory_budget": "7MiB", "solver_time_limit": 2}
"""Of 8 weights of 1 MiB, 4 or more stay when a forward pass ends."""


def by_data(weight: nn.Parameter) -> None:
    weight.data[3].mul_(1.5)


def by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[511, 511] += 0.25


def by_pointer(weight: nn.Parameter) -> None:
    ctypes.c_float.from_address(weight.data_ptr() + 4 * 1000).value = 0.125


def by_loading(weight: nn.Parameter) -> None:
    holder = nn.Linear(512, 512, bias=False)
    holder.weight = weight
    holder.load_state_dict({"weight": weight.detach() + 0.001})


Write = Callable[[nn.Parameter], None]
UNSEEN_BY_AUTOGRAD: tuple[Write, ...] = (by_data, by_numpy, by_pointer)
ALL_WRITES = (*UNSEEN_BY_AUTOGRAD, by_loading)
WRITES = [*([kind] for kind in ALL_WRITES), [], *(random.Random(seed).sample(ALL_WRITES, 3) for seed in range(2))]
"""For each step the kinds of writes: each kind alone, none, and random ones."""


def train_and_write(options: Mapping[str, Any]) -> list[Tensor]:
    """Return the parameters after a step for each of WRITES, each with evaluations and these writes in between.

    Each write changes a few weights, on the device and away: after an evaluation, and before the backward pass if autograd does
    not see it.
    """
    training = weights_of_1_mib(options, count=8)
    choose = random.Random(1)

    def write(kinds: Sequence[Write]) -> None:
        for kind in kinds:
            for weight in choose.sample(list(training.module.parameters()), 4):
                kind(weight)  # type: ignore[arg-type]

    def step(batch: Tensor, index: int) -> None:
        for _ in range(2):
            evaluate(training, batch)
            write(WRITES[index])
        loss = training.model(batch).square().mean()
        write([kind for kind in WRITES[index] if kind in UNSEEN_BY_AUTOGRAD])
        loss.backward()
        evaluate(training, batch)
        training.update()

    training.run(random_rows(len(WRITES)), step)
    return list(training.finish().values())


def evaluate(training: Training, batch: Tensor) -> None:
    with torch.no_grad():
        training.model(batch)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """The parameters after training with all kinds of writes and without a budget."""
    return train_and_write({})


@pytest.mark.parametrize("further", [{}, {"debug": True, "checksums": True}])
def test_no_write_is_missed(further: Mapping[str, Any], expected: list[Tensor], tmp_path: Path) -> None:
    assert not unequal(train_and_write({**BUDGET, "storage": tmp_path, **further}), expected)


def test_what_was_not_written_is_not_written_to_the_drive(tmp_path: Path) -> None:
    """Evaluations write nothing. What user code writes is written once, if it leaves at all."""
    training = weights_of_1_mib({**BUDGET, "storage": tmp_path}, count=8)

    def written_by(evaluations: int) -> int:
        before = teraio.status()[0].moved_bytes["device->storage"] if teraio.status() else 0
        for batch in random_rows(evaluations):
            evaluate(training, batch)
        return teraio.status()[0].moved_bytes["device->storage"] - before

    assert written_by(8) > 0 == written_by(5)
    resident = [w for w in training.module.parameters() for b in known_blocks([w]) if b.state is State.ON_DEVICE]
    for weight in resident:
        by_numpy(weight)  # type: ignore[arg-type]
    assert 0 < written_by(3) <= len(resident) * MIB
    training.finish()


class Cache(nn.Module):
    """Writes a slice of a buffer of 4 MiB in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("cache", torch.zeros(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.cache[:, :256] = hidden.detach()
        return (hidden * self.cache[:, 128:384]).sum()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_slice_of_a_buffer_that_a_stage_writes(codegen: str, tmp_path: Path) -> None:
    """Blocks that a stage writes in place are known as written, whatever the compiler makes of the stage."""
    plain, budgeted = (
        train_cache({"codegen": codegen, **further}) for further in ({}, {"memory_budget": "64MiB", "storage": str(tmp_path)})
    )
    assert not unequal(plain, budgeted)


def train_cache(options: dict[str, Any]) -> list[Tensor]:
    """Losses, and the buffer in the end."""
    training = begin(Cache, lambda module: [torch.optim.SGD(module.parameters(), lr=1e-6)], options)
    losses = []

    def step(index: int, _: int) -> None:
        loss = training.model(torch.full((1024, 256), float(index)))
        loss.backward()
        training.update()
        losses.append(loss.detach())

    training.run(range(3), step)
    assert training.progress[-1][0].stages > 0
    return [*losses, training.finish()["cache"]]


# -- `teraio.on_device` brings tensors in that wait elsewhere, within the budget


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[nn.Module]:
    """12 weights of 1 MiB after two steps under a budget that holds about half of them."""
    training = weights_of_1_mib({"memory_budget": 8 * MIB, "storage": tmp_path}, count=12)
    training.run(random_rows(2))
    yield training.module
    teraio.reset()


def test_tensors_are_there_and_what_is_written_to_them_stays(trained: nn.Module) -> None:
    (pager,) = pagers()
    for number, weight in enumerate(trained.parameters()):
        expected = weight.detach().clone()
        with teraio.on_device([weight, torch.zeros(3), torch.zeros(2, 2).to_sparse()]):  # the others are left alone
            (block,) = known_blocks([weight])
            assert block.state is State.ON_DEVICE and block.pins == 1
            assert pager.account.used_bytes <= 8 * MIB and torch.equal(weight, expected)
            with torch.no_grad():
                weight.fill_(number)
        assert block.pins == 0
    assert any(block.state is State.OFFLOADED for block in pager.blocks)
    assert [weight.unique().tolist() for weight in trained.parameters()] == [[number] for number in range(12)]


def test_what_cannot_be_brought_in_leaves_nothing_held(trained: nn.Module) -> None:
    """More than the budget holds, or a failure meanwhile. A tensor that got other memory is no block any more."""
    (pager,) = pagers()
    with pytest.raises(teraio.BudgetError, match="tensors that user code asked for"):
        with teraio.on_device(trained.parameters()):
            pytest.fail("they do not fit")
    assert all(block.pins == 0 for block in pager.blocks)

    def fail() -> None:
        failing.undo()
        pager.leave_region()
        raise StorageIOError(path="/nowhere", block="another one", errno=5)

    weight, other, *_ = [w for w in trained.parameters() for b in known_blocks([w]) if b.state is State.OFFLOADED]
    with pytest.MonkeyPatch.context() as failing:
        failing.setattr(pager, "leave_region", fail)
        with pytest.raises(StorageIOError), teraio.on_device([weight]):
            pytest.fail("a copy was lost")
    assert all(block.pins == 0 for block in pager.blocks)

    expected = other.detach().clone()
    other.share_memory_()
    with teraio.on_device([other]):
        assert torch.equal(other, expected)
    assert pager.account.used_bytes == sum(block.size_bytes for block in pager.blocks if block.state is State.ON_DEVICE)
