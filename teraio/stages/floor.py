"""The smallest budget that compiled graphs work with, as far as it is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.execution import Program

STATES = 2
"""Tensors of a parameter's size that most optimizers keep. Those of small parameters stay on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What graphs need on the device at once.

    size_bytes: for their largest stage and all that is too small to move. stage: the name of that stage.
    state_bytes: of the states of small parameters, which an optimizer has not made yet.
    """

    size_bytes: int
    stage: str
    state_bytes: int


def need_of(programs: Sequence[Program]) -> Need | None:
    """Return what a forward graph and its backward graph need; None if they have no stages."""
    stages = [stage for program in programs for stage in program.stages]
    if not stages:
        return None
    needed = [stage.input_bytes + stage.output_bytes + stage.workspace_bytes for stage in stages]
    largest = max(range(len(stages)), key=needed.__getitem__)
    small_bytes = sum(program.small_bytes for program in programs)
    states = STATES * sum(program.small_parameter_bytes for program in programs)
    return Need(size_bytes=needed[largest] + small_bytes, stage=stages[largest].name, state_bytes=states)
