"""Inputs of varying length: the sizes and times of a trace as functions of the length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import FailFast, Field, model_validator

from planner.schema.json_file import MAX_NUMBER
from planner.schema.models import Bytes, FrozenModel, Id

Length = Annotated[int, Field(gt=0, lt=2**31)]
_STEP = 0.85  # of a length, to the next shorter one that has a plan
_MOST_STEPS = 12


class Polynomial(FrozenModel):
    """What depends on the length: of the stage, block or group `id`. coefficients: of the powers of the length, from 0 on."""

    id: Id
    coefficients: Annotated[tuple[float, ...], FailFast()] = Field(min_length=1, max_length=3)

    def at(self, length: int) -> float:
        """Return the value at a length, never below 0."""
        return max(sum((factor * float(length) ** power for power, factor in enumerate(self.coefficients)), start=0.0), 0.0)

    def bytes_at(self, length: int) -> int:
        """Return the value at a length as whole bytes."""
        return min(round(self.at(length)), MAX_NUMBER)


Polynomials = Annotated[tuple[Polynomial, ...], FailFast()]


class Lengths(FrozenModel):
    """How sizes and times of a trace depend on the length of inputs. What is not named is the same at all lengths.

    lowest, highest: the lengths from and up to which that is known. The trace itself is of `highest`. place: of the sizes that
    the iteration's first graph takes as symbols, the one that is the length. movable_bytes: smaller blocks do not move.
    block_bytes, workspace_bytes: size of blocks, workspace of stages. stage_seconds: in
    proportion to each other: at `highest`, a stage lasts as long as the trace says.
    """

    lowest: Length
    highest: Length
    place: Id = 0
    movable_bytes: Bytes = 0
    block_bytes: Polynomials = ()
    workspace_bytes: Polynomials = ()
    stage_seconds: Polynomials = ()

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lengths go from {self.lowest} to {self.highest}; the highest must not be below the lowest")
        return self

    def descending(self) -> Iterator[int]:
        """Yield lengths that cover the range, each clearly shorter than the one before, without the highest."""
        length = self.highest
        for _ in range(_MOST_STEPS):
            if length <= self.lowest:
                return
            length = max(int(_STEP * length), self.lowest)
            yield length
