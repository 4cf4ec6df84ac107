"""Turn a captured graph into a program of stages."""

from teraio.stages.compile import StageCompiler
from teraio.stages.cut import CutPolicy
from teraio.stages.floor import Need, largest_of, need_of

__all__ = [
    "CutPolicy",
    "Need",
    "StageCompiler",
    "largest_of",
    "need_of",
]
