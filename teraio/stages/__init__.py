"""Turn a captured graph into a program of stages."""

from teraio.stages.compile import StageCompiler
from teraio.stages.cut import CutPolicy
from teraio.stages.floor import Need, need_of

__all__ = [
    "CutPolicy",
    "Need",
    "StageCompiler",
    "need_of",
]
