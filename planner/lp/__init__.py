"""What the integer program and the lower bound share: rows, time segments, the model of updates on the host."""

from planner.lp.host_update import PROCESSOR, Chain, Flow, HostUpdate, HostWindows, host_update
from planner.lp.host_update_windows import candidates, chains_of, grouped, last_before, next_after, segment_windows
from planner.lp.rows import Terms, add_row, linear
from planner.lp.segments import Segment, segments_of

__all__ = [
    "Chain",
    "Flow",
    "HostUpdate",
    "HostWindows",
    "PROCESSOR",
    "Segment",
    "Terms",
    "add_row",
    "candidates",
    "chains_of",
    "grouped",
    "host_update",
    "last_before",
    "linear",
    "next_after",
    "segment_windows",
    "segments_of",
]
