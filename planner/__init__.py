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

from planner.errors import BudgetError as BudgetError
from planner.errors import CheckpointError as CheckpointError
from planner.errors import ChecksumError as ChecksumError
from planner.errors import InfeasiblePlanError as InfeasiblePlanError
from planner.errors import OptionsError as OptionsError
from planner.errors import PlanError as PlanError
from planner.errors import RankError as RankError
from planner.errors import SolverError as SolverError
from planner.errors import StorageError as StorageError
from planner.errors import StorageFullError as StorageFullError
from planner.errors import StorageIOError as StorageIOError
from planner.errors import TeraioError as TeraioError
from planner.errors import TraceError as TraceError
from planner.errors import UnsupportedError as UnsupportedError
from planner.policies import plan as plan
from planner.policies import with_shorter as with_shorter
from planner.problem import InactivePeriod as InactivePeriod
from planner.problem import floor as floor
from planner.problem import inactive_periods as inactive_periods
from planner.problem import of_equal_ranks as of_equal_ranks
from planner.problem import recomputed as recomputed
from planner.schema import Block as Block
from planner.schema import Budgets as Budgets
from planner.schema import Hardware as Hardware
from planner.schema import Link as Link
from planner.schema import Move as Move
from planner.schema import NotRecomputed as NotRecomputed
from planner.schema import Offload as Offload
from planner.schema import Plan as Plan
from planner.schema import Prefetch as Prefetch
from planner.schema import Recompute as Recompute
from planner.schema import RecomputeGroup as RecomputeGroup
from planner.schema import SharedRate as SharedRate
from planner.schema import Stage as Stage
from planner.schema import Subgroup as Subgroup
from planner.schema import Trace as Trace
from planner.schema import Work as Work
from planner.simulator import HostUpdate as HostUpdate
from planner.simulator import StageTimes as StageTimes
from planner.simulator import Timeline as Timeline
from planner.simulator import Transfer as Transfer
from planner.simulator import simulate as simulate
from planner.subgroup_size import Station as Station
from planner.subgroup_size import stations_of_step as stations_of_step
from planner.subgroup_size import step_seconds as step_seconds
from planner.subgroup_size import subgroup_bytes as subgroup_bytes
