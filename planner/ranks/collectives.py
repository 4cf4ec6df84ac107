"""What of the time in collectives is waiting for slower ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

__all__ = ["waited_for_ranks"]

Stage = TypeVar("Stage", str, tuple[int, str])


def waited_for_ranks(seconds: Sequence[Mapping[Stage, float]]) -> tuple[float, ...] | None:
    """Return by rank the seconds that it waited in collectives until the last rank had come.

    seconds: by rank, those of each stage with collectives, both work and waiting. The rank that comes last does not wait: the
    shortest time of all ranks is what the collectives of a stage take themselves, and the rest is waiting.
    None if the ranks have no collectives, or not the same ones.
    """
    if len(seconds) < 2 or not seconds[0] or any(each.keys() != seconds[0].keys() for each in seconds):
        return None
    work = sum(min(each[stage] for each in seconds) for stage in seconds[0])
    return tuple(max(sum(each.values()) - work, 0.0) for each in seconds)
