"""FSDP2: shards, their gradients and states are blocks; what FSDP gathers is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import planner
import teraio
from planner.errors import UnsupportedError
from teraio.optimizer.host import HostUpdate

from ...thoroughness import every_other
from ...training import MIB, forget
from ..rank_processes import COUNT, Ranks
from .trainings import ROWS, WIDTH, Found, Made, Stack, check_planned, differences, full, train

BUDGET = 16 * MIB
"""A rank holds 4 MiB of shards, 8 MiB of momenta of Adam and up to 4 MiB of gradients, and gathers 4 or 8 MiB."""
HOST_BUDGET = 20 * MIB
"""Half of it has room for all that one group's update needs, 8 MiB, so that this is one subgroup."""


def run(
    options: dict[str, Any] | None,
    *,
    whole: bool = False,
    settings: dict[str, Any] | None = None,
    halves: bool = False,
    **training: Any,
) -> Found:
    """Train with `fully_shard` for each block and the root. whole: the model is compiled, not each block."""
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if halves else {}

    def make(prepare: Any) -> Made:
        module = sharded(None if whole else options, **policy, **(settings or {}))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)
        return prepare(module) if whole else module, module, optimizer

    return train(make, options, **training)


def sharded(options: dict[str, Any] | None, **settings: Any) -> nn.Module:
    """Blocks that are sharded one by one, and compiled one by one with these options."""
    mesh = init_device_mesh("cpu", (COUNT,))
    module = Stack()
    for block in module.blocks:
        if options is not None:
            block.compile(backend="teraio", options={"codegen": "eager", "profile_iterations": 1, **options})
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(module, mesh=mesh, **settings)
    return module


def offloaded(folder: str) -> str:
    """Return the error that a training with FSDP's own offloading ends with."""
    try:
        run(
            {"memory_budget": BUDGET, "storage": folder}, settings={"offload_policy": CPUOffloadPolicy(pin_memory=False)}, steps=1
        )
    except UnsupportedError as error:
        return str(error)
    return ""


CASES: dict[str, dict[str, Any]] = {
    "each block": {},
    "whole": {"whole": True},
    "kept gathered": {"settings": {"reshard_after_forward": False}},
    "mixed precision": {"halves": True},
    "several passes and clipping": {"passes": 2, "clip": True},
}


LONG = CASES.keys() - {"several passes and clipping"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES])
def test_trains_as_without_teraio_within_the_budget_by_a_plan(ranks: Ranks, tmp_path: Path, case: str) -> None:
    budget = BUDGET + 4 * MIB if case == "kept gathered" else BUDGET
    expected, free = (ranks.run(run, options, **CASES[case]) for options in (None, {}))
    found = ranks.run(run, {"memory_budget": budget, "storage": str(tmp_path)}, **CASES[case])
    for one, other, unlimited in zip(found, expected, free, strict=True):
        check_planned(one, other, unlimited, budget=budget, tolerance=2e-2 if case == "mixed precision" else 1e-4)
        assert all(one.movable["parameter"]) and one.movable["parameter"]
        assert all(one.movable["gradient"]) and one.movable["gradient"]
        assert len(one.states) == 8
    assert not [name for name in differences(*found) if name.startswith("parameter")]


def test_what_fsdp_does_between_graphs_is_in_the_trace(ranks: Ranks, tmp_path: Path) -> None:
    """Twice a step FSDP gathers the shards of a block and once it makes their gradients. A plan sees these uses."""
    trace = tmp_path / "trace{rank}.json"
    found = ranks.run(run, {"memory_budget": BUDGET, "storage": str(tmp_path), "trace_out": str(trace)}, steps=4)
    assert all(one.peak <= BUDGET for one in found)
    for rank in range(COUNT):
        made = planner.Trace.load(tmp_path / f"trace{rank}.json")
        stages = {stage.name: stage for stage in made.stages}
        for block in ("blocks.0", "blocks.1"):
            forward, backward = stages[f"forward/{block}.gather"], stages[f"backward/{block}.gather"]
            reduced = stages[f"backward/{block}.reduce"]
            (shard,) = [each for each in made.blocks if each.name == f"{block}.up.weight"]
            assert shard.size_bytes == MIB and shard.persistent and shard.movable
            assert shard.reads[:2] == (forward.id, backward.id) and min(shard.writes) > reduced.id
            (gradient, *_) = [each for each in made.blocks if each.kind == "gradient" and each.writes == (reduced.id,)]
            assert gradient.movable and gradient.size_bytes >= 2 * MIB and made.stages[gradient.reads[0]].phase == "optimizer"
            gathered = [each for each in made.blocks if not each.movable and reduced.id in each.reads]
            assert sum(each.size_bytes for each in gathered) >= 4 * MIB, "FSDP frees it in this call"
            assert not any(each.uses[-1] > reduced.id for each in gathered)


def updated_on_host(folder: str, **training: Any) -> tuple[Found, list[Found], list[int]]:
    """Train by a plan that updates all that it can on the host; then train again, save, and load into a plain training.

    Return what was found, what both of the second part come to, and how many updates ran there in each part.
    """
    updates = [0]
    run_update = HostUpdate.run

    def counting(self: HostUpdate, *arguments: Any) -> float | None:
        seconds = run_update(self, *arguments)
        updates[-1] += seconds is not None
        return seconds

    trace, plan = (str(Path(folder) / f"{what}{dist.get_rank()}.json") for what in ("trace", "plan"))
    tiers = {"memory_budget": HOST_BUDGET, "host_budget": 64 * MIB}
    run({**tiers, "trace_out": trace}, steps=4)
    budgets = planner.Budgets(device_bytes=HOST_BUDGET, host_bytes=64 * MIB)
    planner.plan(planner.Trace.load(trace), budgets, policy="host-updates").save(plan)
    HostUpdate.run = counting  # type: ignore[method-assign]
    try:
        found = run({**tiers, "plan": plan}, **training)
        updates.append(0)
        return found, continued({**tiers, "plan": plan}, None, str(Path(folder) / "checkpoint")), updates
    finally:
        HostUpdate.run = run_update  # type: ignore[method-assign]


def test_shards_are_updated_on_the_host_as_on_the_device(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has elements of its own, so that what it rounds differently no other rank has to follow."""
    expected = ranks.run(run, None, clip=True)
    found = ranks.run(updated_on_host, str(tmp_path), clip=True)
    for (one, (saved, loaded), updates), other in zip(found, expected, strict=True):
        assert one.phase == "planned", one.waiting_for
        assert min(updates) > 0, "how many are late, and so run on the device, depends on the machine"
        assert max(differences(loaded, saved).values(), default=0.0) < 1e-4
        assert max(differences(one, other).values(), default=0.0) < 1e-4
        assert one.peak <= HOST_BUDGET


def test_offloading_by_fsdp_itself_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all("leave out its argument offload_policy" in message for message in ranks.run(offloaded, str(tmp_path)))


def continued(first: dict[str, Any] | None, then: dict[str, Any] | None, folder: str) -> list[Found]:
    """Train, save, and train on; then load into a training with other options, and do the same. Return what both come to."""
    found = []
    for options in (first, then):
        forget()
        torch.manual_seed(0 if options is first else 1)
        module = sharded(options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)
        batches = torch.randn(8, ROWS, WIDTH, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
        for number, batch in enumerate(batches):
            if number == 6:
                model_state, optimizer_state = get_state_dict(module, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                if options is first:
                    dcp.save(state, checkpoint_id=folder)
                else:
                    dcp.load(state, checkpoint_id=folder)
                    set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
            module(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(Found(values={name: full(value).detach().clone() for name, value in module.named_parameters()}))
        teraio.reset()
    return found


@pytest.mark.parametrize("managed_first", every_other(True, False))
def test_checkpoints_go_both_ways(ranks: Ranks, tmp_path: Path, managed_first: bool) -> None:
    managed = {"memory_budget": BUDGET, "storage": str(tmp_path)}
    pair = (managed, None) if managed_first else (None, managed)
    for saved, loaded in ranks.run(continued, *pair, str(tmp_path / "checkpoint")):
        assert max(differences(loaded, saved).values(), default=0.0) < 1e-4
