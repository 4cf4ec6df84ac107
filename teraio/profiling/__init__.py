"""Record what an iteration does and when, find where it ends, and build a trace from several."""

from teraio.profiling.iteration import Iteration, LateBlocks, Region, RerunRecord, StageRecord
from teraio.profiling.iteration_end import LONGEST_PERIOD, IterationBorder, Repetition
from teraio.profiling.lengths import first_sized, with_lengths
from teraio.profiling.peaks import LargestSizes, PeakWatch
from teraio.profiling.profiler import FIXED_NAME, Profile, build_profile, times_agree
from teraio.profiling.recorder import IterationRecorder
