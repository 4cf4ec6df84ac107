"""What a training run is doing, for people and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

RunPhase = Literal["profile", "planning", "planned", "fits", "demand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A snapshot of a training run.

    phase: "profile" (blocks move on demand, stages are measured), "planning" (on demand while the solver runs), "planned",
    "fits" (nothing has to move, stages run unmanaged) or "demand" (no plan could be made; the log says why).
    waiting_for: why there is no plan yet, in plain text; None if there is one, or if none is needed.
    iterations: number of finished iterations. device_peak_bytes: as teraio counts them, workspaces included.
    movable_bytes: of all blocks that can leave the device, wherever they are now. immovable_bytes: what stays on the device.
    moved_bytes: since the start, by link ("device->storage", "storage->device").
    busy_seconds: time since the start in which each link was copying. exposed_seconds: the part of it in which the training
    thread waited for copies or room; the rest was hidden. Empty on a GPU, where the host does not wait.
    predicted_iteration_seconds: by the plan in force. measured_iteration_seconds: median of the latest iterations of this phase.
    ideal_iteration_seconds: the sum of all stages of the trace, as if memory had no limit.
    floor_bytes: the smallest budget that would do. deviations: number of regions that ran otherwise than planned.
    drift: median time of the latest planned iterations over the predicted time, less 1; None while it is not known.
    late_seconds: time in the last iteration spent waiting for copies and room; on a GPU, between stages, in the last one that was
    timed.
    recomputed_stages, recomputed_bytes, recompute_seconds: forward stages that ran again in the last iteration, what they made
    anew, and how long they took.
    collective_seconds: seconds of the last iteration in collectives inside of graphs, by stage: their work, and waiting for other
    ranks. Empty on a GPU, where the host does not wait. waited_for_ranks_seconds: what of them was waiting for the slowest rank;
    only in `teraio.node_status()`, and only if all ranks of the machine have the same stages with collectives; else None.
    reserved_bytes: what PyTorch's allocator has taken from the GPU, handed out or not. allocator_retries: how often so far it had
    to wait for the GPU and take free memory away. reserve_bytes: the part of the budget that is left to the gaps between blocks.
    None on CPU.
    replans: how often a plan made from measured times has replaced the plan before it.
    trace_path, plan_path: files that were written. stages, distinct_stages: number of stages, and of those compiled separately.
    """

    phase: RunPhase
    waiting_for: str | None
    iterations: int
    device_budget_bytes: int | None
    device_peak_bytes: int
    movable_bytes: int
    immovable_bytes: int
    moved_bytes: dict[str, int]
    busy_seconds: dict[str, float]
    exposed_seconds: dict[str, float]
    predicted_iteration_seconds: float | None
    measured_iteration_seconds: float | None
    ideal_iteration_seconds: float | None
    floor_bytes: int | None
    deviations: int
    drift: float | None
    late_seconds: float
    recomputed_stages: int
    recomputed_bytes: int
    recompute_seconds: float
    collective_seconds: dict[str, float]
    waited_for_ranks_seconds: float | None
    reserved_bytes: int | None
    allocator_retries: int | None
    reserve_bytes: int | None
    replans: int
    trace_path: str | None
    plan_path: str | None
    spill_directories: tuple[str, ...]
    stages: int
    distinct_stages: int

    def as_text(self) -> str:
        """Return it as text for another process."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def of_text(cls, text: str) -> Status:
        """Return what `as_text` wrote."""
        content = json.loads(text)
        return cls(**{**content, "spill_directories": tuple(content["spill_directories"])})


def with_waiting(statuses: Mapping[int, Status]) -> dict[int, Status]:
    """Return what the ranks of one training have told, by rank, with `waited_for_ranks_seconds`."""
    waited = waited_for_ranks([status.collective_seconds for status in statuses.values()])
    if waited is None:
        return dict(statuses)
    pairs = zip(statuses.items(), waited, strict=True)
    return {rank: replace(status, waited_for_ranks_seconds=seconds) for (rank, status), seconds in pairs}


def waited_for_ranks(seconds: Sequence[Mapping[str, float]]) -> tuple[float, ...] | None:
    """Return by rank the seconds that it waited in collectives until the last rank had come.

    seconds: by rank, those of each stage with collectives, both work and waiting. The rank that comes last does not wait: the
    shortest time of all ranks is what the collectives of a stage take themselves, and the rest is waiting.
    None if the ranks have no collectives, or not the same ones.
    """
    if len(seconds) < 2 or not seconds[0] or any(each.keys() != seconds[0].keys() for each in seconds):
        return None
    work = sum(min(each[stage] for each in seconds) for stage in seconds[0])
    return tuple(max(sum(each.values()) - work, 0.0) for each in seconds)
