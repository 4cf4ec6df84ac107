"""The smallest budget that compiled graphs work with, as far as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.execution import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What graphs need on the device at once.

    largest: up to three stages, by name, with the bytes that each needs next to all that is too small to move, in descending
        order.
    small_parameter_bytes: of the parameters that are too small to move; their states will be, too.
    names: of the blocks that the graphs take and make.
    """

    largest: tuple[tuple[str, int], ...]
    small_parameter_bytes: int
    names: frozenset[str]

    @property
    def size_bytes(self) -> int:
        """Bytes that the largest stage needs."""
        return self.largest[0][1]


def need_of(programs: Sequence[Program]) -> Need | None:
    """Return what a forward graph and its backward graph need; None if they have no stages."""
    stages = [stage for program in programs for stage in program.stages]
    if not stages:
        return None
    small_bytes = sum(program.small_bytes for program in programs)
    needs = [(stage.name, stage.need_bytes + small_bytes) for stage in stages]
    small_parameter_bytes = sum(program.small_parameter_bytes for program in programs)
    names = frozenset(name for program in programs for name in program.slot_names)
    return Need(largest=largest_of(needs), small_parameter_bytes=small_parameter_bytes, names=names)


def largest_of(needs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return the three that need the most, in descending order."""
    return tuple(sorted(needs, key=lambda need: -need[1])[:3])
