"""Ranks that wait for each other in collectives, whose time is in the trace and in the status."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import teraio
from planner import Trace
from runtime.execution import WorkspaceMeter
from teraio.watching import waited_for_ranks

from ...training import MIB
from ..rank_processes import COUNT, Ranks
from .trainings import tensor_parallel

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


def waiting(options: dict[str, Any]) -> list[dict[int, float | None]]:
    """Train while rank 1 is late. Return what the ranks have waited for each other, by rank, in each of the last iterations."""
    seen: list[dict[int, float | None]] = []
    clock = OwnClock()

    def late(model: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            dist.barrier()  # both have told of the iteration before, and begin another one only together
            seen.append({rank: each[0].waited_for_ranks_seconds for rank, each in teraio.node_status().items() if each})
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
    exactly = pytest.approx({0: LATE, 1: 0.0}, abs=1e-3)
    assert all(waited == exactly for waited in (*found[0], *found[1])), found
    seconds = [Trace.load(tmp_path / f"trace-{rank}.json").stages for rank in range(COUNT)]
    assert all(0.0 < sum(stage.collective_seconds for stage in stages) for stages in seconds)
    waited = waited_for_ranks([{stage.name: stage.collective_seconds for stage in stages} for stages in seconds])
    assert waited is not None and dict(enumerate(waited)) == exactly
