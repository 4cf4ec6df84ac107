"""Plans without torch: `plan(trace, budgets)` decides, `simulate(trace, plan)` replays.

The function `plan` and the module `planner.plan` (the schema) share a name: `from planner import plan` is the
function, `from planner.plan import Plan` reaches the module.
"""

from planner.errors import (
    BudgetError,
    ChecksumError,
    InfeasiblePlanError,
    OptionsError,
    PlanError,
    SolverError,
    StorageError,
    StorageFullError,
    StorageIOError,
    TeraioError,
    TraceError,
    UnsupportedError,
)
from planner.lifetimes import InactivePeriod, floor, inactive_periods
from planner.plan import Budgets, Move, Offload, Plan, Prefetch
from planner.policies import plan
from planner.simulate import simulate
from planner.subgroup_size import Station, stations_of_step, step_seconds, subgroup_bytes
from planner.timeline import HostUpdate, StageTimes, Timeline, Transfer
from planner.trace import Block, Hardware, Link, SharedRate, Stage, Subgroup, Trace

__all__ = [
    "Block",
    "BudgetError",
    "Budgets",
    "ChecksumError",
    "Hardware",
    "HostUpdate",
    "InactivePeriod",
    "InfeasiblePlanError",
    "Link",
    "Move",
    "Offload",
    "OptionsError",
    "Plan",
    "PlanError",
    "Prefetch",
    "SharedRate",
    "SolverError",
    "Stage",
    "StageTimes",
    "Station",
    "StorageError",
    "StorageFullError",
    "StorageIOError",
    "Subgroup",
    "TeraioError",
    "Timeline",
    "Trace",
    "TraceError",
    "Transfer",
    "UnsupportedError",
    "floor",
    "inactive_periods",
    "plan",
    "simulate",
    "stations_of_step",
    "step_seconds",
    "subgroup_bytes",
]
