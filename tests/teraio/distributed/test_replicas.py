"""Which updates several ranks must make alike, in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard

from runtime.paging import Pager
from teraio.distributed import is_sharded_over_all, rank_count
from teraio.following import IterationObserver
from teraio.optimizer import OptimizerFacts, OptimizerSteps


def test_alone_an_update_may_run_on_the_host() -> None:
    assert rank_count() == 1
    assert OptimizerFacts.of(torch.optim.SGD([torch.ones(1)], lr=0.1)).off_host_because is None


def test_several_ranks_do_not_update_on_the_host(group: None) -> None:
    assert rank_count() == 2
    reason = OptimizerFacts.of(torch.optim.SGD([torch.ones(1)], lr=0.1)).off_host_because
    assert reason is not None and "drift apart" in reason


@pytest.mark.parametrize(
    ("axes", "placements", "alone"),
    [
        ((2,), [Shard(0)], True),
        ((2,), [Replicate()], False),
        ((2, 1), [Shard(1), Replicate()], True),
        ((1, 2), [Shard(0), Replicate()], False),
        ((1,), [Shard(0)], False),
    ],
)
def test_shards_over_all_ranks_have_one_owner(group: None, axes: tuple[int, ...], placements: list[Any], alone: bool) -> None:
    """A mesh of fewer ranks may have its like on other ranks."""
    mesh = DeviceMesh("cpu", torch.arange(math.prod(axes)).reshape(axes))
    parameter = DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)
    assert is_sharded_over_all(parameter) == alone
    assert (OptimizerFacts.of(torch.optim.SGD([parameter], lr=0.1)).off_host_because is None) == alone


def test_the_optimizer_inside_may_update_on_the_host(group: None) -> None:
    """From its first step on, while teraio manages steps."""
    pager = Pager(mover=None, budget_bytes=None)
    steps = OptimizerSteps(pager, IterationObserver(pager), active=lambda: True, step_done=lambda optimizer: None)
    optimizer = ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW, lr=0.1)
    inside = optimizer.optim
    optimizer.step()
    optimizer.step()
    assert OptimizerFacts.of(inside).off_host_because is None
    assert len(inside._optimizer_step_pre_hooks) == 1
    steps.close()
    assert OptimizerFacts.of(inside).off_host_because is not None
