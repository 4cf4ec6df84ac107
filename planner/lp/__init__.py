"""What the integer program and the lower bound share: rows, spans of time, updates on the host, the solver."""

from planner.lp.host_update import PROCESSOR, HostUpdateVariables, HostUpdateWindows, UpdateChain, UpdateCopy, add_host_update
from planner.lp.host_update_windows import host_update_candidates, host_update_windows
from planner.lp.rows import Terms, add_row, byte_scale, linear
from planner.lp.segments import Segment, SegmentGrid, segments_of
from planner.lp.solver import pick_solver, proved_bound, run_solver

__all__ = [
    "HostUpdateVariables",
    "HostUpdateWindows",
    "PROCESSOR",
    "Segment",
    "SegmentGrid",
    "Terms",
    "UpdateChain",
    "UpdateCopy",
    "add_host_update",
    "add_row",
    "byte_scale",
    "host_update_candidates",
    "host_update_windows",
    "linear",
    "pick_solver",
    "proved_bound",
    "run_solver",
    "segments_of",
]
