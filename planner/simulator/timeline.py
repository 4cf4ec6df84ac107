"""The result of a replay, and when two iterations of it are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any, Literal, NamedTuple

from planner.schema import BlockKind

_SAME = 1e-9  # share of the iteration by which times may differ: sums in another order round differently

# What takes room on the device: blocks of a kind, or the workspace of the stage that runs.
MemoryKind = BlockKind | Literal["workspace"]


class StageTimes(NamedTuple):
    """One stage in the steady state, in seconds from the end of the iteration before."""

    reached_seconds: float
    start_seconds: float
    end_seconds: float

    @property
    def stall_seconds(self) -> float:
        """How long the stage waited for its inputs and for room."""
        return self.start_seconds - self.reached_seconds


class Transfer(NamedTuple):
    """One transfer of a block over a link in the steady state. `move` is the index in the plan's moves."""

    move: int
    block: int
    link: str
    queued_seconds: float
    start_seconds: float
    end_seconds: float


class HostUpdate(NamedTuple):
    """The update of one subgroup on the host's processor in the steady state.

    It is queued as soon as only its gradients may be missing.
    """

    subgroup: int
    queued_seconds: float
    start_seconds: float
    end_seconds: float


# When the device's memory takes or loses bytes, in seconds from the end of the iteration before; for what; and how many.
MemoryChange = tuple[float, MemoryKind, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a plan does in one iteration of the steady state.

    Keys of `peak_bytes` are tiers; keys of `moved_bytes` are links (`"device->storage"` and the like). `memory`: the changes of
    the device's memory in order. They begin with what is there when the iteration begins, so that the sum up to any change is
    what is on the device then.
    """

    iteration_seconds: float
    stages: tuple[StageTimes, ...]
    transfers: tuple[Transfer, ...]
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    storage_written_bytes: int
    updates: tuple[HostUpdate, ...] = ()
    memory: tuple[MemoryChange, ...] = ()

    @property
    def stall_seconds(self) -> float:
        """Sum of the stalls of all stages."""
        return sum(stage.stall_seconds for stage in self.stages)


def agree(one: Timeline, other: Timeline) -> bool:
    """Whether two iterations agree in the time of every stage, transfer and update.

    The times of stages alone do not suffice: a link may lag behind more and more before any stage has to wait for it.
    """
    if len(one.transfers) != len(other.transfers) or len(one.updates) != len(other.updates):
        return False
    tolerance = _SAME * max(other.iteration_seconds, 1e-12)
    pairs = zip(_times(one), _times(other), strict=True)
    return all(abs(a - b) <= tolerance for a, b in pairs)


def _times(timeline: Timeline) -> Iterator[float]:
    yield timeline.iteration_seconds
    for stage in timeline.stages:
        yield from (stage.start_seconds, stage.end_seconds)
    for transfer in timeline.transfers:
        yield from (transfer.start_seconds, transfer.end_seconds)
    for update in timeline.updates:
        yield from (update.start_seconds, update.end_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All that the next iteration depends on: `what` is where and under way, and the times of that, in `seconds` from now."""

    what: tuple[Any, ...]
    seconds: tuple[float, ...]


def same(one: Standing, other: Standing, iteration_seconds: float) -> bool:
    """Whether the iterations after these are the same. Times may differ by a tiny share of the iteration's."""
    if one.what != other.what or len(one.seconds) != len(other.seconds):
        return False
    tolerance = _SAME * max(iteration_seconds, 1e-12)
    return all(isclose(a, b, rel_tol=0.0, abs_tol=tolerance) for a, b in zip(one.seconds, other.seconds, strict=True))
