"""Runs the stages of compiled graphs, paged or plain."""

from runtime.execution.executor import InterleavedStages, run_managed, run_plain
from runtime.execution.program import Constant, Kind, Phase, Program, Stage, StageFunction
from runtime.execution.workspace import MeasuredMemory, WorkspaceMeter

__all__ = [
    "Constant",
    "InterleavedStages",
    "Kind",
    "MeasuredMemory",
    "Phase",
    "Program",
    "Stage",
    "StageFunction",
    "WorkspaceMeter",
    "run_managed",
    "run_plain",
]
