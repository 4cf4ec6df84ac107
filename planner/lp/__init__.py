"""What the integer program and the lower bound share: programs, spans of time, updates on the host, the solver."""

from planner.lp.host_update_rows import PROCESSOR, HostUpdateVariables, TimeRows, add_chains, add_host_update
from planner.lp.host_update_windows import HostUpdateWindows, host_update_classes
from planner.lp.program import Program, Terms, Variable, scaled, steps
from planner.lp.solver import solve_program
