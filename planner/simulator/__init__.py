"""The replay of a plan on its trace, which does not depend on how the plan was made."""

from planner.simulator.simulate import simulate
from planner.simulator.timeline import (
    STAGES,
    HostUpdate,
    PathSegment,
    StageTimes,
    Timeline,
    Transfer,
    critical_path,
    seconds_by_resource,
)
