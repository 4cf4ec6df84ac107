"""DistributedDataParallel: the model compiled inside or around it, its ways to reduce gradients, and what its buckets forbid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ...training import MIB
from ..rank_processes import Ranks
from .trainings import Found, Made, Stack, check_planned, differences, train

BUDGET = 28 * MIB
"""Parameters, gradients, momenta and buckets are 8 MiB each, and a rank holds 32 MiB of them without a budget."""


def run(
    options: dict[str, Any] | None,
    *,
    around: bool = True,
    optimize_ddp: Any = True,
    unused: bool = False,
    settings: dict[str, Any] | None = None,
    **training: Any,
) -> Found:
    """Train with DistributedDataParallel. around: it is what is compiled, not what is inside."""
    hooks: list[Any] = []

    def make(prepare: Any) -> Made:
        module = Stack(unused=unused)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        model = DistributedDataParallel(module if around else prepare(module), bucket_cap_mb=5, **(settings or {}))
        hooks.extend(model._accum_grad_hooks)
        return prepare(model) if around else model, module, optimizer

    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        found = train(make, options, **training)
    for hook in hooks:  # of "python_reducer": they would keep the module, and its buckets, for ever
        hook.remove()
    return found


def no_sync(model: Any) -> Any:
    return getattr(model, "_orig_mod", model).no_sync()


CASES = {
    "around": {},
    "around, not split": {"optimize_ddp": False},
    "inside": {"around": False},
    "views of buckets": {"settings": {"gradient_as_bucket_view": True}},
    "static graph": {"settings": {"static_graph": True}},
    "reduced by Python": {"optimize_ddp": "python_reducer"},
    "unused parameters": {"settings": {"find_unused_parameters": True}, "unused": True},
    "several passes and clipping": {"passes": 2, "clip": True, "no_sync": no_sync},
}


LONG = CASES.keys() - {"views of buckets", "several passes and clipping"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES])
def test_trains_as_without_teraio_within_the_budget_by_a_plan(ranks: Ranks, tmp_path: Path, case: str) -> None:
    expected, free = (ranks.run(run, options, **CASES[case]) for options in (None, {}))
    found = ranks.run(run, {"memory_budget": BUDGET, "storage": str(tmp_path)}, **CASES[case])
    if case == "reduced by Python":
        ranks.close()  # it leaves compiled autograd in its processes, in which other cases fail
    for one, other, unlimited in zip(found, expected, free, strict=True):
        check_planned(one, other, unlimited, budget=BUDGET)
        assert all(one.movable["parameter"])
        assert all(one.movable["gradient"]) and bool(one.movable["gradient"]) == (case != "views of buckets")
    assert not [name for name in differences(*found) if name.startswith("parameter")]


def overlapped(options: dict[str, Any]) -> Found:
    return run({**options, "overlap_step": True}, same_rows=True)


@pytest.mark.long
def test_no_update_runs_before_gradients_were_reduced(ranks: Ranks, tmp_path: Path) -> None:
    """Rows are the same in all ranks, so that reducing gradients changes nothing, as in the first steps of a trial."""
    expected = ranks.run(run, None, same_rows=True)
    found = ranks.run(overlapped, {"memory_budget": BUDGET, "storage": str(tmp_path)})
    for one, other in zip(found, expected, strict=True):
        assert max(differences(one, other).values(), default=0.0) < 1e-4
        assert one.movable["gradient"], "gradients were not there at the step"


def test_replicas_stay_the_same_where_a_plan_could_update_on_the_host(ranks: Ranks, tmp_path: Path) -> None:
    tiers = {"memory_budget": BUDGET, "host_budget": 64 * MIB}
    found, free = ranks.run(run, tiers), ranks.run(run, {})
    assert [one.phase for one in found] == ["planned"] * 2
    assert [differences(one, unlimited) for one, unlimited in zip(found, free, strict=True)] == [{}, {}]
    assert not [name for name in differences(*found) if name.startswith("parameter")]
