"""Pipeline parallelism: each rank compiles a stage of its own, and needs what the rank before has computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import teraio

from ...training import MIB, PLAN_SECONDS, compiled, require
from ..rank_processes import COUNT, Ranks
from .trainings import ROWS, WIDTH, Found, Stack, check_planned, note_status

BUDGET = 16 * MIB
"""Parameters, gradients and momenta are 8 MiB each."""
PARTS = 2


def run(options: dict[str, Any] | None) -> Found:
    rank = dist.get_rank()
    module = Stack()
    model = compiled(module, {"profile_iterations": 1, "local_ranks": 1, **options}) if options is not None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    stage = PipelineStage(model, rank, COUNT, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=lambda found, wanted: (found - wanted).square().mean())
    random = torch.Generator().manual_seed(1)
    found = Found()
    for step in range(6):
        rows, losses = torch.randn(PARTS * ROWS, WIDTH, generator=random), list[Tensor]()
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=torch.zeros_like(rows), losses=losses)
        found.values |= {f"loss {step}.{number}": loss.detach().clone() for number, loss in enumerate(losses)}
        optimizer.step()
        optimizer.zero_grad()
        if options is not None:
            require(teraio.wait_for_plan(PLAN_SECONDS), "no plan")
    if options is not None:
        note_status(found)
    found.values |= {f"parameter {name}": value.detach().clone() for name, value in module.named_parameters()}
    teraio.reset()
    return found


def test_trains_as_without_teraio_within_the_budget_by_a_plan(ranks: Ranks, tmp_path: Path) -> None:
    expected, free = (ranks.run(run, options) for options in (None, {}))
    found = ranks.run(run, {"memory_budget": BUDGET, "storage": str(tmp_path)})
    for one, other, unlimited in zip(found, expected, free, strict=True):
        check_planned(one, other, unlimited, budget=BUDGET)
