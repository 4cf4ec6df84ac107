"""ZeroRedundancyOptimizer: the optimizer inside it updates the parameters of one rank, and ends the iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ...thoroughness import every_other
from ...training import MIB
from .ranks import Ranks
from .trainings import Found, Made, Stack, differences, train

BUDGET = 28 * MIB


def run(options: dict[str, Any] | None) -> Found:
    def make(prepare: Any) -> Made:
        module = Stack()
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3)
        return prepare(DistributedDataParallel(module, bucket_cap_mb=5)), module, optimizer

    return train(make, options)


@pytest.mark.parametrize("tier", every_other({"storage": None}, {"host_budget": 64 * MIB}))
def test_follows_a_plan_and_trains_as_without_teraio(ranks: Ranks, tmp_path: Path, tier: dict[str, Any]) -> None:
    """In the host tier, ranks may update their own parameters on the host, since others get them by a broadcast."""
    expected, free = (ranks.run(run, options) for options in (None, {}))
    found = ranks.run(run, {"memory_budget": BUDGET, **({"storage": str(tmp_path)} if "storage" in tier else tier)})
    for one, other, unlimited in zip(found, expected, free, strict=True):
        assert not differences(one, unlimited) or "host_budget" in tier
        assert max(differences(one, other).values(), default=0.0) < 1e-4
        assert one.phase == "planned", one.waiting_for
        assert one.peak <= BUDGET
        assert sum(one.moved.values()) > 0
        assert one.states
    assert len(found[0].states) + len(found[1].states) == 8
    assert not [name for name in differences(*found) if name.startswith("parameter")]
