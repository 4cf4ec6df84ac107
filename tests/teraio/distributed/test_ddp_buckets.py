"""What is known of the buckets of DistributedDataParallel, in one process."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from teraio.distributed import GradientBuckets


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
