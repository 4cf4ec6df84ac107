"""Masters of subgroups that update on the host's processor, over memory that lies in the host tier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from runtime.paging import Block
from teraio.optimizer import HostRates, OptimizerFacts, owned_parameters
from teraio.optimizer.host import HostUpdates

from .managed_training import Start, Training
from .plain_training import (
    HALF,
    MASTER_OPTIMIZERS,
    Textbook,
    differences,
    half_parameters,
    keeping,
    set_most_gradients,
)


class Lending:
    """Stands in for a pager whose blocks wait in the host tier. `lent`: names of all that was."""

    def __init__(self, training: Training) -> None:
        self.device = training.pager.device
        self.known_block = training.pager.known_block
        self.account, self.lending = training.pager.account, self
        self.lent: set[str] = set()

    def reserve_for_host(self, blocks: Sequence[Block]) -> bool:
        return True

    def lend_memory(self, blocks: Sequence[Block]) -> list[int]:
        self.lent |= {block.name for block in blocks}
        return [block.address for block in blocks]

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Nothing is counted here."""


def on_host(host: HostUpdates, optimizer: Optimizer, count: int) -> frozenset[int] | None:
    update = host.begin(OptimizerFacts.of(optimizer), owned_parameters(optimizer)[:count])
    return None if update is None or update.seconds() is None else update.members


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["AdamW fused amsgrad", "SGD fused"])
def test_the_same_bits_as_on_the_device(started: Start, name: str, dtype: torch.dtype) -> None:
    """By the same implementation, on the CPU; also where user code has written to a parameter."""
    training = started(budget_bytes=None, parameters=half_parameters(dtype))
    optimizer, expected = (
        keeping(MASTER_OPTIMIZERS[name](training.parameters)),
        Textbook(half_parameters(dtype), MASTER_OPTIMIZERS[name]),
    )
    pager = Lending(training)
    host = HostUpdates(pager)  # type: ignore[arg-type]
    for step in range(8):
        set_most_gradients(training.parameters, step)
        if step == 5:
            training.parameters[1].data[3] = 1000
            expected.masters[1][3] = 1000
        expected.train(1, step)
        if step < 2:
            optimizer.step()
            continue
        for parameter in training.parameters[:-1]:
            assert parameter.grad is not None
            training.pager.block_of(parameter.grad, name="gradient", kind="gradient", user_visible=True)
        members = on_host(host, optimizer, len(training.parameters))
        assert members == frozenset(range(6)), "all but what is small, and what has no gradient"
    host.close()
    assert {f"optimizer/layer.{n}.master_param" for n in range(5)} <= pager.lent
    wrong = differences(optimizer, expected)
    assert [name for name in wrong if not name.endswith(" 6")] == []


def test_the_first_update_of_a_parameter_is_the_device_s(started: Start) -> None:
    """It makes the master, where blocks are made; also where that is the only state."""
    training = started(budget_bytes=None, parameters=half_parameters(torch.bfloat16, 1)[:1])
    training.parameters.append(half_parameters(torch.bfloat16)[-1])
    optimizer = keeping(torch.optim.SGD(training.parameters, lr=0.1))
    host = HostUpdates(Lending(training))  # type: ignore[arg-type]
    set_most_gradients(training.parameters, 0)
    assert training.parameters[0].grad is not None
    training.pager.block_of(training.parameters[0].grad, name="gradient", kind="gradient", user_visible=True)
    assert on_host(host, optimizer, 1) is None
    optimizer.step()
    assert on_host(host, optimizer, 1) == {0}
    host.close()


def test_the_rate_is_that_of_an_update_over_masters() -> None:
    """In bf16 it reads and writes three fp32 states for AdamW, and is measured apart from one without masters."""
    asked: list[int] = []

    @contextmanager
    def scratch(size_bytes: int) -> Any:
        asked.append(size_bytes)
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        yield memory.data_ptr()

    rates = HostRates(scratch, shared=False)
    plain = torch.optim.AdamW(half_parameters(torch.bfloat16))
    keeper = keeping(torch.optim.AdamW(half_parameters(torch.bfloat16)))
    for optimizer in (plain, keeper, plain, keeper):
        seconds = rates.seconds(OptimizerFacts.of(optimizer), torch.bfloat16, 1000)
        assert seconds is not None and seconds > 0
    elements = 4 << 20
    assert asked == [4 * 2 * elements, 5 * 4 * elements]
