"""Record what an iteration does and when, find where it ends, and build a trace from several."""

from teraio.profiling.iteration import LONGEST_PERIOD, Iteration, IterationBorder, Region, Repetition
from teraio.profiling.profiler import FIXED_NAME, Profile, build_profile, first_sized, times_agree, with_lengths
from teraio.profiling.recorder import IterationRecorder
