"""PyTorch's parallel libraries under teraio: as without it, within the budget and by a plan, over ranks of one machine; FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

import planner
from planner import Trace
from planner.errors import UnsupportedError

from ...thoroughness import every_other
from ...training import MIB
from ..rank_processes import COUNT, Ranks
from ..virtual import for_each_iteration
from .trainings import (
    HALVES,
    WIDE,
    Found,
    Options,
    ddp,
    differences,
    fsdp,
    gathered_in_the_graph,
    joined,
    no_sync,
    pipeline,
    tensor_parallel,
    zero_adamw,
    zero_momentum,
)

STORED, ON_HOST = "storage", "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A training, and what is special about it.

    budget: of a rank. tier: below the device. tolerance: of the difference from the training without teraio.
    exact: bits are those without teraio, or else a budget; free: these too. planned: by a plan. states: that move, of all ranks.
    buckets: hold the gradients, which cannot move then. equal: all ranks end with the same parameters.
    fresh: in processes of its own. check: of the traces.
    """

    run: Callable[..., Found]
    budget: int
    count: int = COUNT
    tier: str = STORED
    tolerance: float = 1e-4
    exact: bool = True
    free: bool = False
    planned: bool = True
    states: int = 8
    buckets: bool = False
    equal: bool = True
    fresh: bool = False
    check: Callable[[list[Trace]], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def check_broadcasts(traces: list[Trace]) -> None:
    """The iteration begins with those of what the one before has updated: a rank writes what others have."""
    received: set[str] = set()
    for trace in traces:
        sent = [stage.id for stage in trace.stages if stage.name.startswith("forward/updated.")]
        assert len(sent) > 4 and max(sent) < min(s.id for s in trace.stages if s.phase == "forward" and s.id not in sent)
        large = [block for block in trace.blocks if block.kind == "parameter" and block.size_bytes >= 2 * MIB]
        assert len(large) == 4 and all(block.reads[0] in sent and block.movable for block in large)
        gradients = [block for block in trace.blocks if block.kind == "gradient" and block.size_bytes >= 2 * MIB]
        assert len(gradients) == 4 and not any(block.persistent for block in gradients), "ended after the broadcasts"
        own = {block.name for block in large if block.writes[0] in sent}
        assert not received & own
        received |= own
    assert len(received) == 4


def check_collectives(traces: list[Trace]) -> None:
    """Their time is in the trace, and tells how long the ranks wait for each other."""
    seconds = [{stage.name: stage.collective_seconds for stage in trace.stages} for trace in traces]
    assert all(sum(each.values()) > 0.0 for each in seconds) and len({frozenset(each) for each in seconds}) == 1


replicated = partial(Row, budget=28 * MIB)
"""Parameters, gradients, momenta and buckets are 8 MiB each, and a rank holds 32 MiB of them without a budget."""
shared_out = partial(Row, budget=16 * MIB, states=16)
"""A rank holds 4 MiB of shards, 8 MiB of momenta of Adam and up to 4 MiB of gradients, and gathers 4 or 8 MiB."""
cut = partial(Row, budget=10 * MIB)
"""A rank holds 4 MiB each of parameters, gradients and momenta."""
SEVERAL: dict[str, Any] = {"passes": 2, "clip": True}

ROWS = {
    # A plan could update there, and replicas would drift apart.
    "DDP over a host tier, several passes and clipping": replicated(
        run=partial(ddp, no_sync=no_sync, **SEVERAL), tier=ON_HOST, free=True
    ),
    "DDP, views of buckets, batches of other sizes on each rank": replicated(
        run=partial(ddp, settings={"gradient_as_bucket_view": True}, born=True, rows=(256, 64, 192), steps=14),
        budget=32 * MIB,
        buckets=True,
    ),
    "FSDP2, several passes and clipping": shared_out(run=partial(fsdp, born=True, **SEVERAL), free=True),
    "tensors by columns and rows": cut(run=partial(tensor_parallel, sequence=False), check=check_collectives),
    "tensors gathered in the graph": cut(run=gathered_in_the_graph, budget=18 * MIB),
    "uneven inputs, with ZeRO": replicated(run=partial(joined, optimizer=zero_adamw), check=check_broadcasts),
    "pipeline": Row(run=pipeline, budget=16 * MIB, equal=False),
}
LONG = {
    "DDP, inside": replicated(run=partial(ddp, around=False)),
    "DDP, around, not split": replicated(run=partial(ddp, optimize_ddp=False)),
    "DDP, static graph": replicated(run=partial(ddp, settings={"static_graph": True})),
    # It leaves compiled autograd in its processes, in which other cases fail.
    "DDP, reduced by Python": replicated(run=partial(ddp, optimize_ddp="python_reducer"), fresh=True),
    "DDP, unused parameters": replicated(run=partial(ddp, settings={"find_unused_parameters": True}, unused=True)),
    # Reducing changes nothing then, as in the first steps of a trial; gradients must be there at the step all the same.
    "DDP, overlap_step, the same rows": replicated(run=partial(ddp, same_rows=True), options={"overlap_step": True}),
    "DDP, four ranks": replicated(run=ddp, count=4, states=16),
    "FSDP2, whole": shared_out(run=partial(fsdp, whole=True)),
    "FSDP2, kept gathered": shared_out(run=partial(fsdp, settings={"reshard_after_forward": False}), budget=20 * MIB),
    "FSDP2, mixed precision": shared_out(run=partial(fsdp, settings=HALVES), tolerance=2e-2),
    # As of two ranks, but that up to 16 MiB are gathered.
    "FSDP2, four ranks": shared_out(run=partial(fsdp, wide=2 * WIDE), budget=22 * MIB, count=4, states=32),
    # In the processes of another case, AOTAutograd's partitioner fails: "Node tangents_2 was invalid".
    "tensors with sequences": cut(run=partial(tensor_parallel, sequence=True), fresh=True),
    "ZeRO": replicated(run=partial(ddp, optimizer=zero_momentum), states=4, check=check_broadcasts),
    # Ranks may update their own parameters on the host, since others get them by a broadcast.
    "ZeRO over a host tier": replicated(run=partial(ddp, optimizer=zero_adamw), tier=ON_HOST, exact=False),
    "uneven inputs, around": replicated(run=partial(joined, around=True)),
    "uneven inputs, one ends while all plan": replicated(run=partial(joined, epochs=((12, 3),)), planned=False),
}


def trained(name: str, options: Options) -> Found:
    row = {**ROWS, **LONG}[name]
    return row.run(None if options is None else {**options, **row.options})


def parameters(found: Found) -> list[Tensor]:
    return [value for name, value in found.values.items() if name.startswith("parameter")]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(tmp_path_factory.mktemp("ranks"), 4)
    yield processes
    processes.close()


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_trains_as_without_teraio_within_the_budget_by_a_plan(ranks: Ranks, four: Ranks, tmp_path: Path, name: str) -> None:
    row = {**ROWS, **LONG}[name]
    processes = four if row.count == 4 else ranks
    processes.close() if row.fresh else None
    expected = processes.run(trained, name, None)
    options: dict[str, Any] = {"host_budget": 64 * MIB} if row.tier == ON_HOST else {"storage": str(tmp_path)}
    options |= {"trace_out": str(tmp_path / "trace{rank}.json")} if row.check else {}
    found = processes.run(trained, name, {"memory_budget": row.budget, **options})
    differing = [differences(one, other) for one, other in zip(found, expected, strict=True)]
    if row.free or (row.exact and any(differing)):
        assert not any(map(differences, found, processes.run(trained, name, {})))
    processes.close() if row.fresh else None
    for one, different in zip(found, differing, strict=True):
        assert max(different.values(), default=0.0) < row.tolerance
        assert not row.planned or one.phase == "planned", one.waiting_for
        assert one.peak <= row.budget, f"{one.peak:,} of {row.budget:,} bytes"
        assert one.moved[f"{row.tier}->device"] > 0
        assert all(one.movable["parameter"]) and one.movable["parameter"]
        assert all(one.movable["gradient"]) and bool(one.movable["gradient"]) != row.buckets
        assert not row.equal or all(map(torch.equal, parameters(one), parameters(found[0])))
    assert all(one.states for one in found) and sum(len(one.states) for one in found) == row.states
    if row.check:
        row.check([Trace.load(tmp_path / f"trace{rank}.json") for rank in range(row.count)])


# -- FSDP2: what its calls between graphs do is in the trace; updates on the host, checkpoints, and what is refused

BUDGET = 16 * MIB
HOST_BUDGET = 20 * MIB
"""Half of it has room for all that one group's update needs, 8 MiB, so that this is one subgroup."""


def updated_on_host(folder: str) -> tuple[list[Found], int]:
    """As `continued`, the first by a plan that updates all that it can on the host. Return also how many updates ran there."""
    updates: list[int] = []
    trace, plan = (str(Path(folder) / f"{what}{dist.get_rank()}.json") for what in ("trace", "plan"))
    tiers = {"memory_budget": HOST_BUDGET, "host_budget": 64 * MIB}
    fsdp({**tiers, "trace_out": trace}, steps=4)
    budgets = planner.Budgets(device_bytes=HOST_BUDGET, host_bytes=64 * MIB)
    planner.plan(planner.Trace.load(trace), budgets, policy="host-updates").save(plan)
    with pytest.MonkeyPatch.context() as patch:
        for_each_iteration(patch, lambda iteration: updates.append(sum(stage.on_host for stage in iteration.stages)))
        return continued({**tiers, "plan": plan}, None, str(Path(folder) / "checkpoint"), clip=True), sum(updates)


def test_shards_are_updated_on_the_host_as_on_the_device(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has elements of its own, so that what it rounds differently no other rank has to follow."""
    expected = ranks.run(fsdp, None, clip=True)
    found = ranks.run(updated_on_host, str(tmp_path))
    for ((saved, loaded), updates), other in zip(found, expected, strict=True):
        assert saved.phase == "planned", saved.waiting_for
        assert updates > 0, "how many are late, and so run on the device, depends on the machine"
        assert since_loaded(saved, loaded) < 1e-4
        assert max(differences(saved, other).values(), default=0.0) < 1e-4
        assert saved.peak <= HOST_BUDGET


def continued(first: Options, then: Options, folder: str, **training: Any) -> list[Found]:
    """Train, save, train on; load into a training with other options, and train on. Return what both find, it since it loaded."""

    def save_or_load(options: Options, step: int, module: nn.Module, optimizer: Optimizer, found: Found) -> None:
        if step != 6:
            return
        state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
        if options is first:
            dcp.save(state, checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            found.values.clear()

    pair = enumerate((first, then))
    return [fsdp(options, seed=number, before=partial(save_or_load, options), **training) for number, options in pair]


def since_loaded(saved: Found, loaded: Found) -> float:
    """The largest difference since the one was saved and loaded as the other."""
    return max(differences(loaded, Found(values={name: saved.values[name] for name in loaded.values})).values(), default=0.0)


@pytest.mark.parametrize("managed_first", every_other(True, False))
def test_checkpoints_go_both_ways(ranks: Ranks, tmp_path: Path, managed_first: bool) -> None:
    managed = {"memory_budget": BUDGET, "storage": str(tmp_path)}
    first, then = (managed, None) if managed_first else (None, managed)
    for saved, loaded in ranks.run(continued, first, then, str(tmp_path / "checkpoint")):
        assert since_loaded(saved, loaded) < 1e-4


def offloaded(folder: str) -> str:
    """Return the error that a training with FSDP's own offloading ends with."""
    offloading = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    with pytest.raises(UnsupportedError) as refused:
        fsdp({"memory_budget": BUDGET, "storage": folder}, settings=offloading, steps=1)
    return str(refused.value)


def test_offloading_by_fsdp_itself_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all("leave out its argument offload_policy" in message for message in ranks.run(offloaded, str(tmp_path)))
