"""Private names of PyTorch's parallel libraries: this torch has them, code uses no others, and one that is gone is an error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from planner.errors import UnsupportedError
from runtime.paging import Pager
from teraio.distributed import GradientBuckets, ShardedParameters, fsdp, private_names, refuse_overlapping
from teraio.distributed.private_names import DDP, FSDP_GROUP, FSDP_PARAMETER, FSDP_STATE, ZERO, PrivateNames, fsdp_states

ALL = (FSDP_STATE, FSDP_GROUP, FSDP_PARAMETER, ZERO, DDP)
ROOM = Path(private_names.__file__).parent


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


@pytest.mark.parametrize(("names", "missing"), [(names, name) for names in ALL for name in names.names])
def test_a_name_that_is_gone_is_an_error_that_says_which_torch(names: PrivateNames, missing: str) -> None:
    there = SimpleNamespace(**{name: None for name in names.names})
    names.require(there)
    delattr(there, missing)
    with pytest.raises(UnsupportedError, match=rf"{names.library} of torch {torch.__version__[:4]}.*has no {missing},"):
        names.require(there)


def test_code_uses_no_private_name_that_is_not_listed() -> None:
    listed = {name for names in ALL for name in names.names} | {"_fsdp_param_groups", "_cdata"}
    for file in ROOM.glob("*.py"):
        assert {name for name in private(ast.parse(file.read_text()))} <= listed, file.name


def private(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes of all but `self` and what is under it, and those that are given as text to `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not ast.unparse(node.value).startswith(("self", "torch", "storage", "call")):
            name: Any = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and "sys.modules" not in ast.unparse(node):
            name = getattr(node.args[1], "value", "")
        else:
            continue
        if name.startswith("_") and not name.startswith("__"):
            yield name


def test_fsdp_without_a_name_is_refused_before_anything_moves(sharded: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "FSDP_PARAMETER", PrivateNames(library="fully_shard", names=("_renamed",)))
    with pytest.raises(UnsupportedError, match="fully_shard of torch .* has no _renamed"):
        ShardedParameters(Pager(mover=None, budget_bytes=None)).note([torch.ones(8)])


@pytest.mark.parametrize("hidden", ["_STATES", "_FSDP"])
def test_fsdp_that_hides_its_states_is_refused_if_it_is_used(group: None, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setattr(private_names, hidden, "torch.renamed")
    GradientBuckets().look()
    module = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UnsupportedError, match="fully_shard of torch .* torch.renamed"):
        GradientBuckets().look()
    del module


def test_zero_without_a_name_is_refused(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = ZeroRedundancyOptimizer(nn.Linear(8, 4).parameters(), torch.optim.AdamW)
    refuse_overlapping(optimizer)
    del optimizer._overlap_with_ddp
    with pytest.raises(UnsupportedError, match="its ZeroRedundancyOptimizer has no _overlap_with_ddp"):
        refuse_overlapping(optimizer)
