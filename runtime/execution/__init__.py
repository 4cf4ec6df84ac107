"""Runs the stages of compiled graphs, paged or plain."""

from runtime.execution.executor import run_managed, run_plain
from runtime.execution.observer import InterleavedStages, Observer, StageRun
from runtime.execution.program import Constant, Kind, Phase, Program, Stage, StageFunction
from runtime.execution.workspace import MeasuredMemory, WorkspaceMeter

__all__ = [
    "Constant",
    "InterleavedStages",
    "Kind",
    "MeasuredMemory",
    "Observer",
    "Phase",
    "Program",
    "Stage",
    "StageFunction",
    "StageRun",
    "WorkspaceMeter",
    "run_managed",
    "run_plain",
]
