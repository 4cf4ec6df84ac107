"""What the integer program and the lower bound share: rows, time segments, the model of updates on the host."""

from planner.lp.host_update import PROCESSOR, HostUpdateVariables, HostUpdateWindows, UpdateChain, UpdateCopy, add_host_update
from planner.lp.host_update_windows import chains_of, grouped, host_update_candidates, last_before, next_after, segment_windows
from planner.lp.rows import Terms, add_row, linear
from planner.lp.segments import Segment, segments_of

__all__ = [
    "UpdateChain",
    "UpdateCopy",
    "HostUpdateVariables",
    "HostUpdateWindows",
    "PROCESSOR",
    "Segment",
    "Terms",
    "add_row",
    "host_update_candidates",
    "chains_of",
    "grouped",
    "add_host_update",
    "last_before",
    "linear",
    "next_after",
    "segment_windows",
    "segments_of",
]
