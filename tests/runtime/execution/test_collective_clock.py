"""Only operators of torch.distributed count, and they compute what they compute without the clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.execution import collective_clock
from runtime.execution.collective_clock import CollectiveClock


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Two ranks, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_launch_and_a_wait_count_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it a second later."""
    seconds = count()
    monkeypatch.setattr(collective_clock, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    with CollectiveClock() as clock:
        x = torch.ones(4).mul(2)
        assert clock.seconds == 0.0
        begun = torch.ops._c10d_functional.all_reduce.default(x, "sum", dist.group.WORLD.group_name)
        torch.ops.aten.add.Tensor(x, x)
        assert clock.seconds == 1.0
        result = torch.ops._c10d_functional.wait_tensor.default(begun)
        assert clock.seconds == 2.0
    torch.ops._c10d_functional.wait_tensor.default(x)
    assert clock.seconds == 2.0 and torch.equal(result, x)


def test_a_collective_that_fails_counts_as_well() -> None:
    with CollectiveClock() as clock, pytest.raises(RuntimeError):
        torch.ops._c10d_functional.all_reduce.default(torch.ones(1), "sum", "no such group")
    assert clock.seconds > 0.0
