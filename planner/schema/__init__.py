"""The two files, traces and plans: what they hold, and how they are read and written."""

from planner.schema.json_file import MAX_NUMBER, MAX_TEXT_CHARACTERS, read_format, read_model, write_atomic
from planner.schema.lengths import Lengths, Polynomial, dominates, terms, told
from planner.schema.models import FrozenModel, printable, short_repr
from planner.schema.plan import (
    Budgets,
    Move,
    Offload,
    Placement,
    Plan,
    Predicted,
    Prefetch,
    Recompute,
    Shorter,
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
    Tiled,
    Trace,
    Work,
    short_fingerprint,
)
