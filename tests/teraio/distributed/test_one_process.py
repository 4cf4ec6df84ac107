"""Parallel libraries in one process: buckets, which updates ranks must make alike, and the private names that are used."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import teraio
from planner.errors import BudgetError, StorageError, UnsupportedError
from runtime.paging import Block, Pager
from teraio.distributed import GradientBuckets, LibraryCalls, is_sharded_over_all, private_names, rank_count
from teraio.distributed.private_names import DDP, FSDP_GROUP, FSDP_PARAMETER, FSDP_STATE, ZERO, PrivateNames, fsdp_states
from teraio.following import IterationObserver
from teraio.optimizer import OptimizerFacts, OptimizerSteps

from ...training import MIB, Chain, compiled, forget


def test_a_checkpoint_is_loaded_before_the_model_is_sharded(group: None, tmp_path: Path) -> None:
    model = Chain()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with teraio.under_budget(memory_budget=8 * MIB, storage=tmp_path, local_ranks=1) as tiers:
        with pytest.raises(UnsupportedError, match=r"layers.0.weight, .* and 3 more tensors are no plain tensors"):
            tiers.load(model, tmp_path)


# -- buckets of DistributedDataParallel


@pytest.mark.parametrize("views", [False, True])
def test_buckets_count_as_much_as_all_gradients(group: None, views: bool) -> None:
    inside, outside = nn.Linear(8, 4), nn.Linear(8, 4)
    module = DistributedDataParallel(inside, gradient_as_bucket_view=views)
    buckets = GradientBuckets()
    buckets.look()
    assert buckets.have(inside.weight) and not buckets.have(outside.weight)
    assert buckets.hold(inside.weight) == views and not buckets.hold(outside.weight)
    assert buckets.size_bytes == sum(parameter.nbytes for parameter in module.parameters())


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


@pytest.mark.parametrize("wrap", [nn.Sequential, DistributedDataParallel])
def test_a_model_that_was_refused_is_let_go(group: None, unfrozen: None, tmp_path: Path, wrap: type[nn.Module]) -> None:
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


# -- which updates ranks must make alike


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
    calls, _ = calls_for(Pager(mover=None, budget_bytes=None))
    steps = OptimizerSteps(calls, step_done=lambda optimizer: None)
    optimizer = ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW, lr=0.1)
    inside = optimizer.optim
    optimizer.step()
    optimizer.step()
    assert OptimizerFacts.of(inside).off_host_because is None
    assert len(inside._optimizer_step_pre_hooks) == 1
    steps.close()
    assert OptimizerFacts.of(inside).off_host_because is not None


# -- the optimizer inside ZeroRedundancyOptimizer


def test_updates_inside_the_communication_are_refused_though_nobody_calls_step(group: None) -> None:
    outer = ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    with pytest.raises(UnsupportedError, match="leave out overlap_with_ddp"):
        GradientBuckets().look()
    del outer
    GradientBuckets().look()


# -- private names: this torch has them, code uses no others, and one that is gone is an error

ALL = (FSDP_STATE, FSDP_GROUP, FSDP_PARAMETER, ZERO, DDP)


@pytest.fixture
def sharded(group: None) -> nn.Module:
    return fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))


def test_this_torch_has_all_names(sharded: nn.Module) -> None:
    state = sharded._get_fsdp_state()  # type: ignore[operator]
    assert state in fsdp_states()
    FSDP_STATE.require(state)
    FSDP_GROUP.require(state._fsdp_param_group)
    (parameter, *_) = state._fsdp_param_group.fsdp_params
    FSDP_PARAMETER.require(parameter)  # nothing was gathered yet
    ZERO.require(ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW))
    DDP.require(DistributedDataParallel(nn.Linear(8, 4)))


@pytest.mark.parametrize(("names", "missing"), [(names, name) for names in ALL for name in names.names.split()])
def test_a_name_that_is_gone_is_an_error_that_says_which_torch(names: PrivateNames, missing: str) -> None:
    there = SimpleNamespace(**{name: None for name in names.names.split()})
    names.require(there)
    delattr(there, missing)
    with pytest.raises(UnsupportedError, match=rf"{names.library} of torch {torch.__version__[:4]}.*has no {missing},"):
        names.require(there)


@pytest.mark.parametrize("hidden", ["_STATES", "_FSDP"])
def test_fsdp_that_hides_its_states_is_refused_if_it_is_used(group: None, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setattr(private_names, hidden, "torch.renamed")
    GradientBuckets().look()
    module = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UnsupportedError, match="fully_shard of torch .* torch.renamed"):
        GradientBuckets().look()
    del module


# -- methods of other libraries as stages: put in place, taken away, recorded, and safe where they fail


class Library:
    """Stands for an object of PyTorch whose `work` others call."""

    def __init__(self) -> None:
        self.worked: list[str] = []

    def work(self, how: str = "plainly") -> None:
        self.worked.append(how)


def work_by_us(calls: LibraryCalls, owner: Library, how: str = "plainly") -> None:
    Library.work(owner, f"{how}, by us")


def calls_for(pager: Pager) -> tuple[LibraryCalls, IterationObserver]:
    observer = IterationObserver(pager)
    return LibraryCalls(pager, observer, active=lambda: True, explained=explained), observer


def explained(error: BudgetError) -> BudgetError:
    return error.asking_for(error.smallest_bytes + 1000, not_counted="the optimizer's update")


def test_a_method_is_replaced_until_close() -> None:
    calls, library = calls_for(Pager(mover=None, budget_bytes=None))[0], Library()
    calls.replace(library, "work", work_by_us)
    calls.replace(library, "work", work_by_us)
    library.work("well")
    calls.close()
    library.work("well")
    assert library.worked == ["well, by us", "well"]


@pytest.mark.parametrize("budget_bytes", [8, None])
def test_a_call_that_fails_holds_nothing(budget_bytes: int | None) -> None:
    """It does not fit, and nothing can leave; or it fails by itself."""
    pager = Pager(mover=None, budget_bytes=budget_bytes)
    calls, observer = calls_for(pager)
    held = torch.ones(4)
    read = pager.block_of(held, name="read", kind="parameter", user_visible=True)

    def fail() -> Sequence[Block]:
        raise RuntimeError("the other rank is gone")

    with pytest.raises(RuntimeError if budget_bytes is None else StorageError), calls.region("a call", 1):
        calls.observer.run_stage("forward/gather", fail, phase="forward", read=[read], collective=True)
    assert not read.pins and not observer.iteration_ends().complete
