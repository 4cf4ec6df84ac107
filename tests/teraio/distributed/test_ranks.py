"""What is known of ranks, buckets and inner optimizers, in one process."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.errors import UnsupportedError
from teraio.distributed import GradientBuckets, is_sharded_over_all, optimizer_inside, rank_count
from teraio.optimizer import reason_against_host
from teraio.optimizer.capabilities import OwnerHooks


@pytest.fixture
def group() -> Iterator[None]:
    """Two ranks, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_alone_an_update_may_run_on_the_host() -> None:
    assert rank_count() == 1
    assert reason_against_host(torch.optim.SGD([torch.ones(1)], lr=0.1)) is None


def test_several_ranks_do_not_update_on_the_host(group: None) -> None:
    assert rank_count() == 2
    reason = reason_against_host(torch.optim.SGD([torch.ones(1)], lr=0.1))
    assert reason is not None and "drift apart" in reason


@pytest.mark.parametrize("views", [False, True])
def test_buckets_count_as_much_as_all_gradients(group: None, views: bool) -> None:
    inside, outside = nn.Linear(8, 4), nn.Linear(8, 4)
    module = DistributedDataParallel(inside, gradient_as_bucket_view=views)
    buckets = GradientBuckets()
    buckets.look()
    assert buckets.have(inside.weight) and not buckets.have(outside.weight)
    assert buckets.hold(inside.weight) == views and not buckets.hold(outside.weight)
    assert buckets.size_bytes == sum(parameter.nbytes for parameter in module.parameters())


def test_modules_that_are_garbage_do_not_count(group: None) -> None:
    module = DistributedDataParallel(nn.Linear(8, 4))
    module.itself = [module]  # a cycle, as in real modules with hooks
    gc.disable()
    try:
        del module
        buckets = GradientBuckets()
        buckets.look()
        assert buckets.size_bytes == 0
    finally:
        gc.enable()


def test_without_a_group_there_are_no_buckets() -> None:
    buckets = GradientBuckets()
    buckets.look()
    assert not buckets.have(torch.ones(2)) and buckets.size_bytes == 0


def test_the_optimizer_inside_is_the_one_that_updates(group: None) -> None:
    outer = ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW)
    assert optimizer_inside(outer) is outer.optim
    assert optimizer_inside(outer.optim) is None


def test_updates_inside_the_communication_are_refused_though_nobody_calls_step(group: None) -> None:
    outer = ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    with pytest.raises(UnsupportedError, match="leave out overlap_with_ddp"):
        GradientBuckets().look()
    del outer
    GradientBuckets().look()


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
    assert (reason_against_host(torch.optim.SGD([parameter], lr=0.1)) is None) == alone


def test_the_optimizer_inside_may_update_on_the_host(group: None) -> None:
    inside = ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW, lr=0.1).optim
    hooks = OwnerHooks()
    hooks.mark(inside)
    hooks.mark(inside)
    assert reason_against_host(inside) is None
    assert len(inside._optimizer_step_pre_hooks) == 1
    hooks.close()
    assert reason_against_host(inside) is not None
