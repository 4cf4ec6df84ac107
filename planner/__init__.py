"""The planner, which needs no torch: `plan(trace, budgets)` makes a plan, and `simulate(trace, plan)` replays it.

Rooms, each of which imports only those below it:

* `ranks`: plans for all ranks of a machine together
* `policies`: the ways to make a plan, and `plan` itself
* `schedule`: from decisions to exact moves
* `bound`: a lower bound on the iteration time
* `simulator`: the replay of a plan
* `ilp`, `lp`: the integer program, and what it shares with the bound
* `problem`: what follows from a trace and budgets
* `schema`: the files: traces, plans and nodes
"""

from planner.errors import (
    BudgetError,
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
from planner.policies import plan
from planner.problem import InactivePeriod, floor, inactive_periods, recomputed
from planner.ranks import NodePlans, divided_budgets, node_of, plan_node, waited_for_ranks
from planner.schema import (
    Block,
    Budgets,
    Hardware,
    Link,
    Move,
    Node,
    NodeRate,
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
)
from planner.simulator import HostUpdate, NodeTimeline, StageTimes, Timeline, Transfer, simulate, simulate_node
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
    "Node",
    "NodePlans",
    "NodeRate",
    "NodeTimeline",
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
    "divided_budgets",
    "floor",
    "inactive_periods",
    "node_of",
    "plan",
    "plan_node",
    "recomputed",
    "simulate",
    "simulate_node",
    "stations_of_step",
    "step_seconds",
    "subgroup_bytes",
    "waited_for_ranks",
]
