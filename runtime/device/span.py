"""Memory that can leave the device."""

from __future__ import annotations

from dataclasses import dataclass

MIN_MOVED_BYTES = 1 << 20
"""Smaller blocks stay on the device: system calls would cost more than the memory is worth."""


@dataclass(frozen=True, slots=True)
class Span:
    """Whole pages of memory. address, length_bytes: multiples of the page size. serial: of the allocation; never used twice."""

    address: int
    length_bytes: int
    serial: int = 0
