"""The planner, which needs no torch: `plan(trace, budgets)` makes a plan, and `simulate(trace, plan)` replays it.

Rooms, each of which imports only those below it:

* `policies`: the ways to make a plan, and `plan` itself
* `schedule`: from decisions to exact moves
* `bound`: a lower bound on the iteration time
* `simulator`: the replay of a plan
* `ilp`, `lp`: the integer program, and what it shares with the bound
* `problem`: what follows from a trace and budgets
* `schema`: the files: traces and plans
"""

from planner.errors import (
    BudgetError,
    CheckpointError,
    ChecksumError,
    InfeasiblePlanError,
    OptionsError,
    PlanError,
    RankError,
    SolverError,
    StorageError,
    StorageFullError,
    StorageIOError,
    TeraioError,
    TraceError,
    UnsupportedError,
)
from planner.policies import plan, with_shorter
from planner.problem import InactivePeriod, floor, inactive_periods, of_equal_ranks, recomputed
from planner.schema import (
    Block,
    Budgets,
    Hardware,
    Link,
    Move,
    NotRecomputed,
    Offload,
    Plan,
    Prefetch,
    Recompute,
    RecomputeGroup,
    SharedRate,
    Stage,
    Subgroup,
    Trace,
    Work,
)
from planner.simulator import HostUpdate, StageTimes, Timeline, Transfer, simulate
from planner.subgroup_size import Station, stations_of_step, step_seconds, subgroup_bytes

__all__ = [
    "Block",
    "BudgetError",
    "CheckpointError",
    "Budgets",
    "ChecksumError",
    "Hardware",
    "HostUpdate",
    "InactivePeriod",
    "InfeasiblePlanError",
    "Link",
    "Move",
    "NotRecomputed",
    "Offload",
    "OptionsError",
    "Plan",
    "PlanError",
    "Prefetch",
    "RankError",
    "Recompute",
    "RecomputeGroup",
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
    "Work",
    "floor",
    "inactive_periods",
    "of_equal_ranks",
    "plan",
    "recomputed",
    "simulate",
    "stations_of_step",
    "step_seconds",
    "subgroup_bytes",
    "with_shorter",
]
