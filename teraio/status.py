"""What a runtime is doing, for people and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RunPhase = Literal["profile", "planning", "planned", "fits", "demand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A snapshot.

    phase: "profile" (blocks move on demand, stages are measured), "planning" (on demand while the solver runs),
    "planned", "fits" (nothing has to move, stages run unmanaged) or "demand" (no plan could be made; see the log).
    iterations: finished ones. device_peak_bytes: by teraio's own count, workspaces included.
    moved_bytes: since the start, by link ("device->storage", "storage->device").
    busy_seconds: since the start, for which each link was copying. exposed_seconds: of these, while the training thread waited
    for copies or room; the rest was hidden. Empty on a GPU, where it is not the host that waits.
    measured_iteration_seconds: median of the latest iterations of this phase; the others come from trace and plan.
    floor_bytes: the smallest budget that would do. deviations: regions that ran otherwise than planned.
    drift: the median of the latest planned iterations over the predicted one, less 1; None while not known.
    late_seconds: of the last iteration, spent waiting for copies and for room; on a GPU, between stages.
    replans: how often a plan that was made from measured times has taken the place of the one before.
    """

    phase: RunPhase
    iterations: int
    device_budget_bytes: int | None
    device_peak_bytes: int
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
    replans: int
    trace_path: str | None
    plan_path: str | None
    spill_directories: tuple[str, ...]
    stages: int
    distinct_stages: int
