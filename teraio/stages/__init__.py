"""From a captured graph to a program of stages."""

from teraio.stages.compile import StageCompiler
from teraio.stages.cut import CutPolicy

__all__ = [
    "CutPolicy",
    "StageCompiler",
]
