"""Plans without torch: `plan(trace, budgets)` decides, `simulate(trace, plan)` replays.

The function `plan` and the module `planner.schema.plan` (the schema) share a name: `from planner import plan` is the
function, `from planner.schema.plan import Plan` reaches the module.
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
from planner.policies import plan
from planner.problem import InactivePeriod, floor, inactive_periods
from planner.schema import Block, Budgets, Hardware, Link, Move, Offload, Plan, Prefetch, SharedRate, Stage, Subgroup, Trace
from planner.simulator import HostUpdate, StageTimes, Timeline, Transfer, simulate
from planner.subgroup_size import Station, stations_of_step, step_seconds, subgroup_bytes

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
