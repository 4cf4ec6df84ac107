"""The planner's settings, and the cost of copies out in its objective."""

from __future__ import annotations

from dataclasses import dataclass

from planner.schema import WaitingTier

__all__ = ["DEFAULT_GAP", "DEFAULT_THREADS", "DEFAULT_WRITE_WEIGHT", "TIE_WEIGHT", "SolverSettings", "outward_weight"]

DEFAULT_GAP = 0.005
DEFAULT_THREADS = 2
DEFAULT_WRITE_WEIGHT = 0.005
TIE_WEIGHT = 0.005
"""Seconds of iteration time that one second of copying is worth where nothing wears out: of equal plans, the one that moves less
wins.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverSettings:
    """Settings of one planning run, see `planner.plan`. `time_limit_seconds`: of processor time."""

    time_limit_seconds: float = 30.0
    gap: float = DEFAULT_GAP
    threads: int = DEFAULT_THREADS
    write_weight: float = DEFAULT_WRITE_WEIGHT


def outward_weight(tier: WaitingTier, write_weight: float) -> float:
    """Return the seconds of iteration time that one second of copying out to `tier` is worth.

    Drives wear out, host memory does not.
    """
    return write_weight if tier == "storage" else TIE_WEIGHT
