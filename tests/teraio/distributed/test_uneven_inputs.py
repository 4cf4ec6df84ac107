"""Uneven inputs (`Join`): a rank whose batches have ended shadows the collectives of the others, and all go on afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import teraio

from ...training import MIB, PLAN_SECONDS, compiled, require
from ..rank_processes import Ranks
from .trainings import ROWS, WIDTH, Found, Stack, differences, note_status

BUDGET = 28 * MIB
"""Parameters, gradients, momenta and buckets are 8 MiB each, and a rank holds 32 MiB of them without a budget."""


def run(
    options: dict[str, Any] | None,
    *,
    batches: tuple[int, ...] = (9, 6),
    epochs: int = 2,
    around: bool = False,
    zero: bool = False,
) -> Found:
    """Train for epochs of `batches`, by rank. around: DistributedDataParallel is what is compiled, not what is inside.

    zero: ZeroRedundancyOptimizer joins as well, and updates what this rank owns also while only others train.
    """
    given = {"profile_iterations": 1, **(options or {})}
    module = Stack()
    inside = compiled(module, given) if options is not None and not around else module
    wrapped = DistributedDataParallel(inside, bucket_cap_mb=5)
    model = compiled(wrapped, given) if options is not None and around else wrapped
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    if zero:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    found = Found()
    for epoch in range(epochs):
        with Join([wrapped, optimizer] if zero else [wrapped]):
            for number in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                loss = model(torch.randn(ROWS, WIDTH, generator=random)).square().mean()
                loss.backward()
                optimizer.step()
                found.values[f"loss {epoch}.{number}"] = loss.detach().clone()
                if options is not None:
                    require(teraio.wait_for_plan(PLAN_SECONDS), "no plan")
        found.values |= {f"gradient {epoch} {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    if options is not None:
        note_status(found)
    found.values |= {f"parameter {name}": value.detach().clone() for name, value in module.named_parameters()}
    teraio.reset()
    return found


CASES: dict[str, dict[str, Any]] = {
    "inside": {},
    "around": {"around": True},
    "one ends while all plan": {"batches": (12, 3), "epochs": 1},
    "with ZeroRedundancyOptimizer": {"zero": True},
}


LONG = CASES.keys() - {"with ZeroRedundancyOptimizer"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES])
def test_trains_as_without_teraio_within_the_budget(ranks: Ranks, tmp_path: Path, case: str) -> None:
    expected, free = (ranks.run(run, options, **CASES[case]) for options in (None, {}))
    found = ranks.run(run, {"memory_budget": BUDGET, "storage": str(tmp_path)}, **CASES[case])
    for one, other, unlimited in zip(found, expected, free, strict=True):
        assert not differences(one, unlimited)
        assert max(differences(one, other).values(), default=0.0) < 1e-4
        assert one.phase == "planned" or case == "one ends while all plan", one.waiting_for
        assert one.peak <= BUDGET
        assert one.moved["storage->device"] > 0
    parameters = [{name: value for name, value in each.values.items() if name.startswith("parameter")} for each in found]
    assert not differences(Found(values=parameters[0]), Found(values=parameters[1]))
