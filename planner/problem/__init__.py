"""What follows from a trace and budgets, for every policy: inactive periods, routes, capacities and updates on the host."""

from planner.problem.decisions import TierCapacity, build_plan, copies_out, decisions_of
from planner.problem.host_updates import (
    device_iteration,
    gradients,
    host_bytes,
    host_start,
    host_updatable,
    movable_blocks,
    needed_again,
    next_user_stage,
    parameters,
    states,
    total_bytes,
    user_stages,
)
from planner.problem.lifetimes import (
    SLICES_SHARE,
    InactivePeriod,
    block_activities,
    bytes_by_stage,
    floor,
    inactive_periods,
    live_bytes,
    mean_active_fraction,
    periods_between_uses,
    stage_floors,
    worst_of,
)
from planner.problem.problem import (
    DEFAULT_GAP,
    DEFAULT_THREADS,
    DEFAULT_TIME_LIMIT_SECONDS,
    DEFAULT_WRITE_WEIGHT,
    TIE_WEIGHT,
    Decision,
    Decisions,
    Problem,
    Route,
    SolverSettings,
    in_units,
    outward_weight,
)
from planner.problem.recompute import (
    RerunPlaces,
    by_kind,
    folded,
    kinds_of_places,
    layer_of,
    made_by,
    made_bytes,
    over_half,
    recompute_seconds,
    recomputed,
    rounded,
    simple_sets,
    source_blocks,
    spelled_out,
    whole_layers,
)
from planner.problem.repeats import LaidOut, Repeats, repeats_of
from planner.problem.shared_limits import SharedLimit, max_min_rates, of_equal_ranks
from planner.problem.time_limit import out_of_time, seconds_left, time_limit, without_collections
