"""Inputs of varying length: the sizes and times of a trace as functions of the length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Self

from pydantic import FailFast, Field, model_validator

from planner.schema.json_file import MAX_NUMBER
from planner.schema.models import Bytes, FrozenModel, Id

Length = Annotated[int, Field(gt=0, lt=2**31)]
Sizes = Annotated[tuple[Length, ...], FailFast(), Field(min_length=1, max_length=2)]
"""The length of inputs and, where that varies too, their number."""
_STEP = 0.85  # of a length, to the next shorter one that has a plan
_MOST_STEPS = 12
_FEWER = (1.0, 0.5, 0.25)  # of the number of inputs, where that varies too


def terms(sizes: Sequence[int]) -> tuple[float, ...]:
    """Return what polynomials are sums of: powers of the length up to its square and, where it varies, these times the number."""
    length, *others = map(float, sizes)
    powers = (1.0, length, length**2)
    return powers + tuple(power * number for number in others for power in powers)


class Polynomial(FrozenModel):
    """What depends on the sizes of inputs: of the stage or block `id`. coefficients: of `terms`, in their order."""

    id: Id
    coefficients: Annotated[tuple[float, ...], FailFast()] = Field(min_length=1, max_length=6)

    def at(self, sizes: Sequence[int]) -> float:
        """Return the value at these sizes, never below 0."""
        return max(sum(factor * term for factor, term in zip(self.coefficients, terms(sizes), strict=False)), 0.0)

    def bytes_at(self, sizes: Sequence[int]) -> int:
        """Return the value at these sizes as whole bytes."""
        return min(round(self.at(sizes)), MAX_NUMBER)


Polynomials = Annotated[tuple[Polynomial, ...], FailFast()]


class Lengths(FrozenModel):
    """How sizes and times of a trace depend on the length of inputs, and on their number. What is not named is always the same.

    lowest, highest: the sizes from and up to which that is known. The trace itself is of `highest`. places: where they are among
    the sizes that the iteration's first graph takes as symbols. movable_bytes: smaller blocks do not move.
    block_bytes, workspace_bytes: size of blocks, workspace of stages. stage_seconds: in
    proportion to each other: at `highest`, a stage lasts as long as the trace says.
    """

    lowest: Sizes
    highest: Sizes
    places: tuple[Id, ...] = (0,)
    movable_bytes: Bytes = 0
    block_bytes: Polynomials = ()
    workspace_bytes: Polynomials = ()
    stage_seconds: Polynomials = ()

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if not len(self.lowest) == len(self.highest) == len(self.places):
            raise ValueError(
                f"lengths: lowest, highest and places must be as many, found {self.lowest}, {self.highest}, {self.places}"
            )
        if not dominates(self.highest, self.lowest):
            raise ValueError(
                f"lengths go from {told(self.lowest)} to {told(self.highest)}; the highest must not be below the lowest"
            )
        return self

    def stage_shares(self, sizes: Sequence[int]) -> dict[int, float]:
        """Return by stage what share of its time at `highest` it takes at these sizes. Those that are missing take all of it."""
        return {each.id: each.at(sizes) / whole for each in self.stage_seconds if (whole := each.at(self.highest))}

    def descending(self) -> Iterator[list[tuple[int, ...]]]:
        """Yield rows of sizes that cover the range, without the highest. In a row each is clearly shorter than the last."""
        (most, *numbers), (least, *fewest) = self.highest, self.lowest
        lengths = [most]
        while lengths[-1] > least and len(lengths) <= _MOST_STEPS:
            lengths.append(max(int(_STEP * lengths[-1]), least))
        if not numbers:
            yield [(length,) for length in lengths[1:]]
            return
        for number in dict.fromkeys(max(int(share * numbers[0]), fewest[0]) for share in _FEWER):
            row = [(length, number) for length in lengths[::2]]
            yield [sizes for sizes in row if sizes != self.highest]


def dominates(sizes: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether none of the sizes is below that of the others."""
    return all(size >= other for size, other in zip(sizes, others, strict=True))


def told(sizes: Sequence[int]) -> str:
    """Return sizes in words: `512`, and `512 x 8` for 8 inputs of length 512."""
    return " x ".join(f"{size:,}" for size in sizes)
