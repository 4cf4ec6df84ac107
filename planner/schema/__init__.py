"""The two files, traces and plans: what they hold, and how they are read and written."""

from planner.schema.json_file import read_format, read_model, write_atomic
from planner.schema.limits import MAX_NUMBER, MAX_TEXT_CHARACTERS
from planner.schema.messages import printable, short_repr
from planner.schema.models import FrozenModel
from planner.schema.plan import (
    Budgets,
    Move,
    Offload,
    Placement,
    Plan,
    Predicted,
    Prefetch,
    Recompute,
    SolverReport,
    Update,
    WaitingTier,
)
from planner.schema.trace import (
    Block,
    BlockKind,
    Hardware,
    Link,
    NotRecomputed,
    Phase,
    Rate,
    RecomputeGroup,
    SharedRate,
    Stage,
    Subgroup,
    Tier,
    Trace,
)

__all__ = [
    "Block",
    "BlockKind",
    "Budgets",
    "FrozenModel",
    "Hardware",
    "Link",
    "MAX_NUMBER",
    "MAX_TEXT_CHARACTERS",
    "Move",
    "NotRecomputed",
    "Offload",
    "Phase",
    "Placement",
    "Plan",
    "Predicted",
    "Prefetch",
    "Rate",
    "Recompute",
    "RecomputeGroup",
    "SharedRate",
    "SolverReport",
    "Stage",
    "Subgroup",
    "Tier",
    "Trace",
    "Update",
    "WaitingTier",
    "printable",
    "short_repr",
    "read_format",
    "read_model",
    "write_atomic",
]
