"""The replay of a plan on its trace, which does not depend on how the plan was made."""

from planner.simulator.critical_path import STAGES, CriticalPath, PathSegment, critical_path
from planner.simulator.simulate import simulate
from planner.simulator.timeline import HostUpdate, MemoryChange, MemoryKind, StageTimes, Timeline, Transfer
