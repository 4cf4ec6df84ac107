"""Runs the stages of compiled graphs, paged or plain."""

from runtime.execution.executor import Reruns, run_managed, run_plain
from runtime.execution.one_stage import MeasuredMemory, OperatorRunner, WorkspaceMeter
from runtime.execution.program import (
    Constant,
    InterleavedStages,
    Kind,
    LateBlocks,
    Phase,
    Program,
    SizedGraph,
    Stage,
    StageFunction,
    StageRerun,
    StageRun,
    graph_of,
)
