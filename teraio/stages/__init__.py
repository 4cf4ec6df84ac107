"""Turn a captured graph into a program of stages."""

from teraio.stages.compile import StageCompiler

__all__ = [
    "StageCompiler",
]
