"""Where this process stands among the ranks of a training, as torchrun says it in environment variables."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from planner.errors import OptionsError
from planner.schema import short_repr

__all__ = ["RankPlace", "rank_place"]

_RANK = "{rank}"
_LOCAL_RANK = "{local_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """`rank` of `world_size` processes, and `local_rank` of the `local_world_size` among them that run on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def neighbours(self) -> range:
        """The ranks of this machine. torchrun gives those of one machine consecutive numbers."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def fill(self, text: str) -> str:
        """Return the text with the numbers of this rank in place of {rank} and {local_rank}."""
        return text.replace(_RANK, str(self.rank)).replace(_LOCAL_RANK, str(self.local_rank))

    def names(self, text: str) -> bool:
        """Whether `fill` gives each rank of this machine another text."""
        return _RANK in text or _LOCAL_RANK in text


def rank_place() -> RankPlace:
    """Return the place that torchrun has given this process; the only rank where it did not start it.

    Raises OptionsError where the variables contradict each other.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return RankPlace()
    found = {}
    for field in ("rank", "world_size", "local_rank", "local_world_size"):
        text = os.environ.get(field.upper(), "")
        if re.fullmatch("[0-9]{1,9}", text) is None:
            raise OptionsError(
                f"environment variable {field.upper()}: found {short_repr(text)}, wanted a number; start with torchrun"
            )
        found[field] = int(text)
    place = RankPlace(**found)
    if not (place.local_rank < place.local_world_size <= place.world_size and place.local_rank <= place.rank < place.world_size):
        raise OptionsError(f"environment variables RANK and others contradict each other: {place}; start with torchrun")
    return place
