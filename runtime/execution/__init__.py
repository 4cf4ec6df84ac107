"""Runs the stages of compiled graphs, paged or plain."""

from runtime.execution.executor import run_managed, run_plain
from runtime.execution.observer import InterleavedStages, Observer, StageRerun, StageRun
from runtime.execution.program import Constant, Kind, Phase, Program, Stage, StageFunction
from runtime.execution.rerun import Reruns
from runtime.execution.workspace import MeasuredMemory, WorkspaceMeter

__all__ = [
    "Constant",
    "InterleavedStages",
    "Kind",
    "MeasuredMemory",
    "Observer",
    "Phase",
    "Program",
    "Reruns",
    "Stage",
    "StageFunction",
    "StageRerun",
    "StageRun",
    "WorkspaceMeter",
    "run_managed",
    "run_plain",
]
