"""What follows from a trace and budgets, for every policy: inactive periods, routes, capacities and updates on the host."""

from planner.problem.floor import floor
from planner.problem.host_updates import (
    device_iteration,
    gradients,
    host_start,
    host_updatable,
    movable_blocks,
    needed_again,
    parameters,
    states,
    total_bytes,
)
from planner.problem.lifetimes import (
    BlockActivity,
    InactivePeriod,
    block_activities,
    inactive_periods,
    live_bytes,
    live_bytes_by_kind,
    mean_active_fraction,
    stage_floors,
)
from planner.problem.problem import Decision, Decisions, Problem, Route, build_plan, copies_out, in_units, solver_unit
from planner.problem.recompute import folded, made_bytes, recompute_seconds, recomputed, reruns_of, spelled_out
from planner.problem.rerun_places import RerunPlaces
from planner.problem.rerun_sets import by_kind, layer_of, over_half, rounded, simple_sets, whole_layers
from planner.problem.shared_limits import SharedLimit, max_min_rates, of_equal_ranks
from planner.problem.solver_settings import (
    DEFAULT_GAP,
    DEFAULT_THREADS,
    DEFAULT_WRITE_WEIGHT,
    TIE_WEIGHT,
    SolverSettings,
    outward_weight,
)
from planner.problem.tier_capacity import TierCapacity
from planner.problem.user_code import next_user_stage, user_stages

__all__ = [
    "BlockActivity",
    "DEFAULT_GAP",
    "DEFAULT_THREADS",
    "DEFAULT_WRITE_WEIGHT",
    "Decision",
    "Decisions",
    "InactivePeriod",
    "Problem",
    "RerunPlaces",
    "Route",
    "SharedLimit",
    "SolverSettings",
    "TIE_WEIGHT",
    "TierCapacity",
    "block_activities",
    "build_plan",
    "by_kind",
    "copies_out",
    "device_iteration",
    "floor",
    "folded",
    "gradients",
    "host_start",
    "host_updatable",
    "in_units",
    "inactive_periods",
    "layer_of",
    "live_bytes",
    "live_bytes_by_kind",
    "max_min_rates",
    "mean_active_fraction",
    "movable_blocks",
    "needed_again",
    "next_user_stage",
    "outward_weight",
    "over_half",
    "parameters",
    "made_bytes",
    "of_equal_ranks",
    "recompute_seconds",
    "solver_unit",
    "recomputed",
    "reruns_of",
    "rounded",
    "simple_sets",
    "spelled_out",
    "stage_floors",
    "states",
    "total_bytes",
    "user_stages",
    "whole_layers",
]
