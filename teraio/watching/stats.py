"""What one iteration took, and the latest ones of a run, as data."""

from __future__ import annotations

from dataclasses import dataclass

from teraio.status import RunPhase, Status

LINKS = ("device->host", "host->device", "device->storage", "storage->device")
"""All links that there can be, by the name that traces give them."""
TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStats:
    """What one iteration took.

    run: number of the run in this process, from 0: models compiled with equal options share one. iteration: its number, from 0.
    phase: of the run while it ran, see `teraio.Status`.
    seconds: from the end of the iteration before to its own end. The first one includes compilation.
    waited_seconds: the part of them in which training waited for copies, for room and for updates on the host; on a GPU, also
    for the host. recompute_seconds: of stages that ran again. On a GPU under a plan, both are those of the latest iteration whose
    stages were timed: every eighth at least. predicted_seconds: by the plan in force; None without one.
    tier_bytes: what is in each tier at its end: blocks and what stays on the device; in lower tiers, their slots.
    moved_bytes, busy_seconds: by link ("device->storage"): what it carried, and for how long it was copying.
    """

    run: int
    iteration: int
    phase: RunPhase
    seconds: float
    waited_seconds: float
    recompute_seconds: float
    predicted_seconds: float | None
    tier_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    busy_seconds: dict[str, float]

    def bytes_per_second(self, link: str) -> float | None:
        """Return the rate at which the link carried bytes while it was busy; None if it carried nothing."""
        seconds = self.busy_seconds.get(link, 0.0)
        return self.moved_bytes.get(link, 0) / seconds if seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A run: its present state, and its latest iterations, the oldest first, up to 1,000."""

    status: Status
    iterations: tuple[IterationStats, ...]
