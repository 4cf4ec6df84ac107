"""The two files, traces and plans: what is in them, and how they are read and written."""

from planner.schema.json_file import MAX_NUMBER, FrozenModel, printable, read_format
from planner.schema.plan import Budgets, Move, Offload, Placement, Plan, Predicted, Prefetch, SolverReport, Update, WaitingTier
from planner.schema.trace import Block, BlockKind, Hardware, Link, Phase, SharedRate, Stage, Subgroup, Tier, Trace

__all__ = [
    "Block",
    "BlockKind",
    "Budgets",
    "FrozenModel",
    "Hardware",
    "MAX_NUMBER",
    "Link",
    "Move",
    "Offload",
    "Phase",
    "Placement",
    "Plan",
    "Predicted",
    "Prefetch",
    "SharedRate",
    "SolverReport",
    "Stage",
    "Subgroup",
    "Tier",
    "Trace",
    "Update",
    "WaitingTier",
    "printable",
    "read_format",
]
