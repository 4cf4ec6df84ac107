"""The smallest budget that compiled graphs work with, as far as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.execution import Program

STATES = 2
"""Tensors of a parameter's size that most optimizers keep. Those of small parameters stay on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What graphs need on the device at once.

    largest: up to three stages, by name, with the bytes that each needs next to all that is too small to move, in descending
        order.
    state_bytes: of the states of small parameters, which an optimizer has not made yet.
    """

    largest: tuple[tuple[str, int], ...]
    state_bytes: int

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
    states = STATES * sum(program.small_parameter_bytes for program in programs)
    return Need(largest=largest_of(needs), state_bytes=states)


def largest_of(needs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return the three that need the most, in descending order."""
    return tuple(sorted(needs, key=lambda need: -need[1])[:3])
