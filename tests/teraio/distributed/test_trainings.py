"""PyTorch's parallel libraries under teraio: as without it, within the budget and by a plan, over ranks of one machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import teraio
from planner import Trace
from runtime.execution import WorkspaceMeter

from ...training import MIB
from ..rank_processes import COUNT, Ranks
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
    exact: the bits are those without a budget. planned: all ranks get to a plan. states: how many can move, of all ranks.
    buckets: hold the gradients, which cannot move then. equal: all ranks end with the same parameters.
    fresh: in processes of its own. check: of the traces.
    """

    run: Callable[..., Found]
    budget: int
    count: int = COUNT
    tier: str = STORED
    tolerance: float = 1e-4
    exact: bool = True
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


replicated = partial(Row, budget=28 * MIB)
"""Parameters, gradients, momenta and buckets are 8 MiB each, and a rank holds 32 MiB of them without a budget."""
shared_out = partial(Row, budget=16 * MIB, states=16)
"""A rank holds 4 MiB of shards, 8 MiB of momenta of Adam and up to 4 MiB of gradients, and gathers 4 or 8 MiB."""
cut = partial(Row, budget=10 * MIB)
"""A rank holds 4 MiB each of parameters, gradients and momenta."""
SEVERAL: dict[str, Any] = {"passes": 2, "clip": True}

ROWS = {
    "DDP, views of buckets": replicated(run=partial(ddp, settings={"gradient_as_bucket_view": True}, born=True), buckets=True),
    # A plan could update there, and replicas would drift apart.
    "DDP over a host tier, several passes and clipping": replicated(run=partial(ddp, no_sync=no_sync, **SEVERAL), tier=ON_HOST),
    "DDP, batches of other sizes on each rank": replicated(run=partial(ddp, rows=(256, 64, 192), steps=14), budget=32 * MIB),
    "FSDP2, several passes and clipping": shared_out(run=partial(fsdp, born=True, **SEVERAL)),
    "tensors by columns and rows": cut(run=partial(tensor_parallel, sequence=False)),
    "tensors gathered in the graph": cut(run=gathered_in_the_graph, budget=18 * MIB),
    "ZeRO": replicated(run=partial(ddp, optimizer=zero_adamw), check=check_broadcasts),
    "uneven inputs, with ZeRO": replicated(run=partial(joined, optimizer=zero_momentum), states=4),
    "pipeline": Row(run=pipeline, budget=16 * MIB, equal=False),
}
LONG = {
    "DDP, around": replicated(run=ddp),
    "DDP, around, not split": replicated(run=partial(ddp, optimize_ddp=False)),
    "DDP, inside": replicated(run=partial(ddp, around=False)),
    "DDP, static graph": replicated(run=partial(ddp, settings={"static_graph": True})),
    # It leaves compiled autograd in its processes, in which other cases fail.
    "DDP, reduced by Python": replicated(run=partial(ddp, optimize_ddp="python_reducer"), fresh=True),
    "DDP, unused parameters": replicated(run=partial(ddp, settings={"find_unused_parameters": True}, unused=True)),
    # Reducing changes nothing then, as in the first steps of a trial; gradients must be there at the step all the same.
    "DDP, overlap_step, the same rows": replicated(run=partial(ddp, same_rows=True), options={"overlap_step": True}),
    "DDP, four ranks": replicated(run=ddp, count=4, states=16),
    "FSDP2, each block": shared_out(run=fsdp),
    "FSDP2, whole": shared_out(run=partial(fsdp, whole=True)),
    "FSDP2, kept gathered": shared_out(run=partial(fsdp, settings={"reshard_after_forward": False}), budget=20 * MIB),
    "FSDP2, mixed precision": shared_out(run=partial(fsdp, settings=HALVES), tolerance=2e-2),
    # As of two ranks, but that up to 16 MiB are gathered.
    "FSDP2, four ranks": shared_out(run=partial(fsdp, wide=2 * WIDE), budget=22 * MIB, count=4, states=32),
    # In the processes of another case, AOTAutograd's partitioner fails: "Node tangents_2 was invalid".
    "tensors with sequences": cut(run=partial(tensor_parallel, sequence=True), fresh=True),
    # Ranks may update their own parameters on the host, since others get them by a broadcast.
    "ZeRO over a host tier": replicated(run=partial(ddp, optimizer=zero_adamw), tier=ON_HOST, exact=False),
    "uneven inputs, inside": replicated(run=joined),
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
    expected, free = (processes.run(trained, name, options) for options in (None, {}))
    options: dict[str, Any] = {"host_budget": 64 * MIB} if row.tier == ON_HOST else {"storage": str(tmp_path)}
    options |= {"trace_out": str(tmp_path / "trace{rank}.json")} if row.check else {}
    found = processes.run(trained, name, {"memory_budget": row.budget, **options})
    processes.close() if row.fresh else None
    for one, other, unlimited in zip(found, expected, free, strict=True):
        assert not row.exact or not differences(one, unlimited)
        assert max(differences(one, other).values(), default=0.0) < row.tolerance
        assert not row.planned or one.phase == "planned", one.waiting_for
        assert one.peak <= row.budget, f"{one.peak:,} of {row.budget:,} bytes"
        assert one.moved[f"{row.tier}->device"] > 0
        assert all(one.movable["parameter"]) and one.movable["parameter"]
        assert all(one.movable["gradient"]) and bool(one.movable["gradient"]) != row.buckets
        assert not row.equal or all(map(torch.equal, parameters(one), parameters(found[0])))
    assert all(one.states for one in found) and sum(len(one.states) for one in found) == row.states
    if row.check:
        row.check([Trace.load(tmp_path / f"trace{rank}.json") for rank in range(row.count)])


# -- ranks that wait for each other in collectives, whose time is in the trace and in the status

BUDGET = 10 * MIB
LATE = 0.25
"""Seconds that rank 1 comes later to each forward pass."""


class OwnClock:
    """The time in collectives, as far as this test makes it pass: however busy the machine is, all else takes none.

    Rank 1 is late when rank 0 has begun to wait, and joins after that.
    """

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._readings, self._step = 0, 0
        self._begins = False

    def perf_counter(self) -> float:
        self._readings += 1
        now = LATE * self._store.add("late", 0) + 1e-6 * self._readings  # a collective takes some time
        if self._begins:
            self._begins = False
            self._store.set(f"waits {self._step}", "")
        return now

    def be_late(self) -> None:
        """Before each forward pass but the first, in which ranks also wait for each other in compiling."""
        self._step += 1
        if dist.get_rank() == 0:
            self._begins = self._step > 1
        elif self._step > 1:
            self._store.wait([f"waits {self._step}"])
            time.sleep(LATE)  # no stage has more time in collectives than it takes
            self._store.add("late", 1)


def waited_for_ranks(seconds: list[dict[str, float]]) -> list[float]:
    """By rank, how long it waited in the collectives whose seconds these are: the shortest time is the collective's own."""
    work = sum(min(each[stage] for each in seconds) for stage in seconds[0])
    return [sum(each.values()) - work for each in seconds]


def waiting(options: dict[str, Any]) -> list[list[float]]:
    """Train while rank 1 is late. Return what the ranks have waited for each other, by rank, in each of the last iterations."""
    seen: list[list[float]] = []
    clock = OwnClock()

    def late(model: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            told: list[dict[str, float]] = [{}] * COUNT
            dist.all_gather_object(told, teraio.status()[0].collective_seconds if teraio.status() else {})
            if all(told):
                seen.append(waited_for_ranks(told))
            clock.be_late()
            return model(x)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[WorkspaceMeter.__module__], "time", clock)
        tensor_parallel(options, sequence=False, around=late, steps=6)
    return seen[-3:]


def test_waiting_for_another_rank_is_told_apart_from_collectives(ranks: Ranks, tmp_path: Path) -> None:
    options = {"memory_budget": BUDGET, "storage": str(tmp_path), "trace_out": str(tmp_path / "trace-{rank}.json")}
    found = ranks.run(waiting, options)
    exactly = pytest.approx([LATE, 0.0], abs=1e-3)
    assert all(waited == exactly for waited in (*found[0], *found[1])), found
    seconds = [Trace.load(tmp_path / f"trace-{rank}.json").stages for rank in range(COUNT)]
    assert all(0.0 < sum(stage.collective_seconds for stage in stages) for stages in seconds)
    waited = waited_for_ranks([{stage.name: stage.collective_seconds for stage in stages} for stages in seconds])
    assert waited == exactly
