"""Resident bytes of single mappings of this process, from Linux. For all mappings together see `examples.memory`."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.device import Span


def anonymous_bytes(span: Span) -> int:
    """Return the anonymous resident bytes of the mappings that lie in a span. Exact."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(bounds[1], 16), int(bounds[2], 16)
            inside = span.address <= begin and end <= span.address + span.length_bytes
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) << 10
    return total
