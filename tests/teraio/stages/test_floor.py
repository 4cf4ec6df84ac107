"""What a forward and a backward graph need of a budget."""

from __future__ import annotations

from torch import Tensor

from teraio.stages import CutPolicy, StageCompiler, need_of

from .graphs import transformer

FINE = CutPolicy(shortest_seconds=1e-9)


def test_what_the_forward_graph_saves_counts_once() -> None:
    """All is too small to move here. The backward graph adds the gradients of its results and of the parameters."""
    forward, backward = transformer(3)
    compiler = StageCompiler(codegen="eager", policy=FINE)
    programs = [compiler.compile(each.fresh(), phase=each.phase, options={}) for each in (forward, backward)]
    gradients = sum(value.nbytes for value in backward.results[0] if isinstance(value, Tensor))
    assert programs[1].small_bytes == gradients + forward.results[0][0].nbytes
    need = need_of(programs)
    largest = max(stage.need_bytes for program in programs for stage in program.stages)
    assert need is not None and need.size_bytes == largest + sum(program.small_bytes for program in programs)
