"""Train a real model with and without a budget of about half of its peak, and compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import AdamW, Optimizer

from teraio import BudgetError

from ..teraio.parity.harness import (
    Case,
    Result,
    budgeted_options,
    check_budget,
    check_exact,
    check_planned,
    compiled_input_needs_grad,
    moved_bytes,
    train,
)
from ..training import forget

of_libraries = (
    compiled_input_needs_grad,
    pytest.mark.filterwarnings("ignore:.*Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
)
"""Marks for tests of models whose code makes these warnings, which no user can avoid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training that owns its loop. run: trains with these options, in this folder. planned: see `Case`."""

    run: Callable[[Mapping[str, Any], Path], Result]
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """package: that it needs."""

    case: Case | Script
    package: str = "transformers"


def adamw(module: nn.Module) -> Optimizer:
    """Over the parameters that train."""
    return AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)


def half_of_peak(unbudgeted: Result) -> int:
    """Half of the bytes that the run took at its peak; a little more than its floor where that is more."""
    statuses = unbudgeted.progress[-1]
    floor = max(s.floor_bytes or 0 for s in statuses)
    return max(max(s.device_peak_bytes for s in statuses) // 2, floor + floor // 16)


def check_half(case: Case | Script, tmp_path: Path, codegen: str) -> dict[str, Any]:
    """Train without a budget and under half of the peak. Returns the facts for the tables of docs/models.md.

    codegen: how stages are compiled. Raises AssertionError unless all losses, gradients, parameters and buffers are equal bit for
    bit, the budget was kept, blocks moved both ways, and for a planned case a plan took over.
    """
    unbudgeted = _train(case, {"codegen": codegen, "storage": str(tmp_path)}, tmp_path)
    budget, budgeted = _train_under(half_of_peak(unbudgeted), case, tmp_path, codegen)
    check_exact(budgeted, unbudgeted)
    check_budget(budgeted, budget)
    if case.planned:
        check_planned(budgeted)
    return facts(budgeted, unbudgeted)


def _train_under(budget: int, case: Case | Script, folder: Path, codegen: str, *, attempts: int = 3) -> tuple[int, Result]:
    """Train under `budget`, or what errors name if that is too little for one stage. Return the budget that did."""
    try:
        return budget, _train(case, budgeted_options(case, folder, budget=budget, codegen=codegen), folder)
    except BudgetError as error:  # it names a part that may ask once more
        if attempts == 1 or not error.not_counted:
            raise
        return _train_under(error.smallest_bytes, case, folder, codegen, attempts=attempts - 1)


def _train(case: Case | Script, options: Mapping[str, Any], folder: Path) -> Result:
    if isinstance(case, Script):
        forget()
        return case.run(options, folder)
    return train(case, options=options)


def facts(budgeted: Result, unbudgeted: Result) -> dict[str, Any]:
    """What the table of models shows. Bytes; moved: out of the device in the last iteration."""
    before, last = (moved_bytes(statuses)["device->storage"] for statuses in budgeted.progress[-2:])
    return {
        "parameter_bytes": sum(value.nbytes for value in unbudgeted.parameters.values()),
        "peak_bytes": max(s.device_peak_bytes for s in unbudgeted.progress[-1]),
        "budget_bytes": budgeted.progress[-1][0].device_budget_bytes,
        "moved_bytes": last - before,
        "stages": sum(s.stages for s in budgeted.progress[-1]),
        "tensors": len(budgeted.named()),
        "phase": "/".join(sorted({s.phase for s in budgeted.progress[-1]})),
    }
