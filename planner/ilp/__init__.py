"""The integer program over coarse time. It decides which blocks move, to which tier, and which updates run on the host."""

from planner.ilp.coarse import (
    MANY_STAGES,
    MAX_INTEGER_STAGES,
    CoarseSolution,
    coarse_solutions,
    in_order_of_need,
    large_periods,
    rerun_shares,
    room_bytes,
)
