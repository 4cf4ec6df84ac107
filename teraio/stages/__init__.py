"""From a captured graph to a program of stages."""

from teraio.stages.compile import StageCompiler

__all__ = [
    "StageCompiler",
]
