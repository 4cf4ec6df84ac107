"""Where a replay stands between two iterations."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import Any

__all__ = ["Standing", "same"]

_SAME = 1e-9


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
