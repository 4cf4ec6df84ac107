"""What is known of the buckets of DistributedDataParallel, in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from planner.errors import BudgetError
from teraio.distributed import GradientBuckets

from ...training import MIB, Chain, compiled, forget


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


def test_the_first_budget_that_an_error_names_has_room_for_the_buckets(group: None, tmp_path: Path) -> None:
    """They are there before anything is compiled: 6 MiB, beside what the model needs by itself."""
    named = []
    for wrap in (lambda module: module, DistributedDataParallel):
        model = compiled(wrap(Chain()), {"memory_budget": MIB, "storage": str(tmp_path)})
        with torch._dynamo.config.patch(optimize_ddp=False), pytest.raises(BudgetError) as refused:
            model(torch.ones(4, 512))
        named.append(refused.value.smallest_bytes)
        forget()
    alone, with_buckets = named
    assert with_buckets >= alone + 6 * MIB


def test_a_budget_is_refused_by_its_own_error_where_graphs_are_split_by_buckets(group: None, tmp_path: Path) -> None:
    """Dynamo runs what it has compiled for one bucket on fake tensors, to learn what the graph of the next one gets."""
    model = compiled(DistributedDataParallel(Chain(), bucket_cap_mb=2), {"memory_budget": MIB, "storage": str(tmp_path)})
    with pytest.raises(BudgetError, match="give a memory_budget of at least"):
        model(torch.ones(4, 512))
    forget()


@pytest.mark.parametrize("wrap", [nn.Sequential, DistributedDataParallel])
def test_a_model_that_was_refused_is_let_go(group: None, tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Else its parameters would stay for ever, and its buckets would count when the next budget is tried."""

    def refused() -> weakref.ref[nn.Module]:
        module = Chain()
        with pytest.raises(BudgetError):
            compiled(wrap(module), {"memory_budget": MIB, "storage": str(tmp_path)})(torch.ones(4, 512))
        return weakref.ref(module)

    module = refused()
    forget()
    gc.collect()
    assert module() is None
