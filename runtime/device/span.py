"""Memory that blocks can leave."""

from __future__ import annotations

from dataclasses import dataclass

MIN_MOVED_BYTES = 1 << 20
"""Smaller blocks stay on the device: moving them would cost more in system calls than it frees."""


@dataclass(frozen=True, slots=True)
class Span:
    """Whole pages in memory: page-aligned address and length in bytes. `serial`: of the allocation, never used twice."""

    address: int
    length_bytes: int
    serial: int = 0
