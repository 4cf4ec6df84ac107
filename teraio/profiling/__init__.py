"""Record what an iteration does and when, and build a trace from it."""

from teraio.profiling.border import IterationBorder
from teraio.profiling.iteration import Iteration, RerunRecord
from teraio.profiling.peaks import LargestSizes, PeakWatch
from teraio.profiling.profiler import Profile, build_profile, states_that_stay
from teraio.profiling.recognition import recognise
from teraio.profiling.recorder import IterationRecorder
from teraio.profiling.reruns_by_stage import RerunsByStage
from teraio.profiling.schedule_by_stage import StageSchedule, lay_out_plan
from teraio.profiling.typical import times_agree

__all__ = [
    "Iteration",
    "LargestSizes",
    "PeakWatch",
    "Profile",
    "RerunRecord",
    "RerunsByStage",
    "StageSchedule",
    "IterationBorder",
    "IterationRecorder",
    "build_profile",
    "lay_out_plan",
    "recognise",
    "states_that_stay",
    "times_agree",
]
