"""FSDP2: what its calls between graphs do is in the trace; updates on the host, checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

import planner
import teraio
from planner.errors import UnsupportedError
from teraio.profiling import Iteration

from ...thoroughness import every_other
from ...training import MIB, forget
from ..rank_processes import COUNT, Ranks
from ..virtual import for_each_iteration
from .trainings import ROWS, WIDTH, Found, Options, adamw, differences, fsdp, full_parameters, one_pass, sharded

BUDGET = 16 * MIB
HOST_BUDGET = 20 * MIB
"""Half of it has room for all that one group's update needs, 8 MiB, so that this is one subgroup."""


def test_what_fsdp_does_between_graphs_is_in_the_trace(ranks: Ranks, tmp_path: Path) -> None:
    """Twice a step FSDP gathers the shards of a block and once it makes their gradients. A plan sees these uses."""
    trace = tmp_path / "trace{rank}.json"
    found = ranks.run(fsdp, {"memory_budget": BUDGET, "storage": str(tmp_path), "trace_out": str(trace)}, steps=4)
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

    def counting(iteration: Iteration) -> None:
        updates[-1] += sum(stage.on_host for stage in iteration.stages)

    trace, plan = (str(Path(folder) / f"{what}{dist.get_rank()}.json") for what in ("trace", "plan"))
    tiers = {"memory_budget": HOST_BUDGET, "host_budget": 64 * MIB}
    fsdp({**tiers, "trace_out": trace}, steps=4)
    budgets = planner.Budgets(device_bytes=HOST_BUDGET, host_bytes=64 * MIB)
    planner.plan(planner.Trace.load(trace), budgets, policy="host-updates").save(plan)
    with pytest.MonkeyPatch.context() as patch:
        for_each_iteration(patch, counting)
        found = fsdp({**tiers, "plan": plan}, **training)
        updates.append(0)
        return found, continued({**tiers, "plan": plan}, None, str(Path(folder) / "checkpoint")), updates


def test_shards_are_updated_on_the_host_as_on_the_device(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has elements of its own, so that what it rounds differently no other rank has to follow."""
    expected = ranks.run(fsdp, None, clip=True)
    found = ranks.run(updated_on_host, str(tmp_path), clip=True)
    for (one, (saved, loaded), updates), other in zip(found, expected, strict=True):
        assert one.phase == "planned", one.waiting_for
        assert min(updates) > 0, "how many are late, and so run on the device, depends on the machine"
        assert max(differences(loaded, saved).values(), default=0.0) < 1e-4
        assert max(differences(one, other).values(), default=0.0) < 1e-4
        assert one.peak <= HOST_BUDGET


def continued(first: Options, then: Options, folder: str) -> list[Found]:
    """Train, save, and train on; then load into a training with other options, and do the same. Return what both come to."""
    found = []
    for options in (first, then):
        forget()
        torch.manual_seed(0 if options is first else 1)
        module = sharded(options)
        optimizer = adamw(module)
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
            one_pass(module, batch)
            optimizer.step()
            optimizer.zero_grad()
        found.append(Found(values=full_parameters(module)))
        teraio.reset()
    return found


@pytest.mark.parametrize("managed_first", every_other(True, False))
def test_checkpoints_go_both_ways(ranks: Ranks, tmp_path: Path, managed_first: bool) -> None:
    managed = {"memory_budget": BUDGET, "storage": str(tmp_path)}
    pair = (managed, None) if managed_first else (None, managed)
    for saved, loaded in ranks.run(continued, *pair, str(tmp_path / "checkpoint")):
        assert max(differences(loaded, saved).values(), default=0.0) < 1e-4


def offloaded(folder: str) -> str:
    """Return the error that a training with FSDP's own offloading ends with."""
    offloading = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    with pytest.raises(UnsupportedError) as refused:
        fsdp({"memory_budget": BUDGET, "storage": folder}, settings=offloading, steps=1)
    return str(refused.value)


def test_offloading_by_fsdp_itself_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all("leave out its argument offload_policy" in message for message in ranks.run(offloaded, str(tmp_path)))
