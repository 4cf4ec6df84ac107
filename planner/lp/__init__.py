"""What the integer program and the lower bound share: programs, spans of time, updates on the host, the solver."""

from planner.lp.host_update_rows import (
    PROCESSOR,
    HostUpdateVariables,
    HostUpdateWindows,
    TimeRows,
    UpdateCopy,
    add_chains,
    add_host_update,
    host_update_windows,
)
from planner.lp.program import Program, Terms, Variable, scaled, steps
from planner.lp.solver import Solved, solve_program
