"""ZeroRedundancyOptimizer: the optimizer inside it updates the parameters of one rank, and ends the iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import planner
from planner.errors import UnsupportedError
from teraio.distributed import GradientBuckets, optimizer_inside

from ...thoroughness import every_other
from ...training import MIB
from ..rank_processes import COUNT, Ranks
from .trainings import Found, Made, Stack, differences, train

BUDGET = 28 * MIB


def run(options: dict[str, Any] | None, **training: Any) -> Found:
    def make(prepare: Any) -> Made:
        module = Stack()
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3)
        return prepare(DistributedDataParallel(module, bucket_cap_mb=5)), module, optimizer

    return train(make, options, **training)


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


def test_parameters_are_on_the_device_when_they_are_sent_and_received(ranks: Ranks, tmp_path: Path) -> None:
    """The iteration begins with the broadcasts of what the one before has updated: a rank writes what others have."""
    options = {"memory_budget": BUDGET, "storage": str(tmp_path), "trace_out": str(tmp_path / "trace{rank}.json")}
    ranks.run(run, options, steps=4)
    received: set[str] = set()
    for rank in range(COUNT):
        trace = planner.Trace.load(tmp_path / f"trace{rank}.json")
        sent = [stage.id for stage in trace.stages if stage.name.startswith("forward/updated.")]
        assert len(sent) > 4 and max(sent) < min(s.id for s in trace.stages if s.phase == "forward" and s.id not in sent)
        large = [block for block in trace.blocks if block.kind == "parameter" and block.size_bytes >= 2 * MIB]
        assert len(large) == 4 and all(block.reads[0] in sent and block.movable for block in large)
        gradients = [block for block in trace.blocks if block.kind == "gradient" and block.size_bytes >= 2 * MIB]
        assert len(gradients) == 4 and not any(block.persistent for block in gradients), (
            "user code ends them after the broadcasts"
        )
        own = {block.name for block in large if block.writes[0] in sent}
        assert not received & own
        received |= own
    assert len(received) == 4


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
