"""Record what an iteration does and when, find where it ends, and build a trace from several."""

from teraio.profiling.iteration import (
    LONGEST_PERIOD,
    Iteration,
    IterationBorder,
    LateBlocks,
    Region,
    Repetition,
    RerunRecord,
    StageRecord,
)
from teraio.profiling.lengths import first_sized, with_lengths
from teraio.profiling.peaks import LargestSizes, PeakWatch
from teraio.profiling.profiler import FIXED_NAME, Profile, build_profile, times_agree
from teraio.profiling.recorder import IterationRecorder
