"""More than a pair: four ranks train by DDP and by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ...training import MIB
from ..rank_processes import Ranks
from .trainings import WIDE, Found, Made, Stack, check_planned, differences, train

COUNT = 4

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), COUNT)
    yield ranks
    ranks.close()


def replicated(options: dict[str, Any] | None) -> Found:
    """Parameters, gradients, momenta and buckets are 8 MiB each."""

    def make(prepare: Any) -> Made:
        module = Stack()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        return prepare(DistributedDataParallel(module, bucket_cap_mb=5)), module, optimizer

    return train(make, options)


def sharded(options: dict[str, Any] | None) -> Found:
    """A rank holds 4 MiB of shards, 8 MiB of momenta of Adam and up to 4 MiB of gradients, and gathers 8 or 16 MiB."""

    def make(prepare: Any) -> Made:
        mesh = init_device_mesh("cpu", (COUNT,))
        module = Stack(wide=2 * WIDE)
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)
        return prepare(module), module, optimizer

    return train(make, options)


@pytest.mark.parametrize(("run", "budget"), [(replicated, 28 * MIB), (sharded, 22 * MIB)])
def test_trains_as_without_teraio_within_the_budget_by_a_plan(
    four: Ranks, tmp_path: Path, run: Callable[..., Found], budget: int
) -> None:
    expected, free = (four.run(run, options) for options in (None, {}))
    found = four.run(run, {"memory_budget": budget, "storage": str(tmp_path)})
    for one, other, unlimited in zip(found, expected, free, strict=True):
        check_planned(one, other, unlimited, budget=budget)
        assert not [name for name in differences(one, found[0]) if name.startswith("parameter")]
