"""What a forward and a backward graph need of a budget."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from teraio.graph_needs import need_of
from teraio.stages import CutPolicy, StageCompiler

from .graphs import capture, features, transformer

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


def test_what_waits_during_a_stage_counts() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third, self.last = (nn.Linear(32, 32, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            kept = self.first(x)
            return kept + self.last(torch.tanh(self.third(torch.tanh(self.second(kept)))))

    with torch.no_grad():
        (captured,) = capture(Residual(), features(8), loss=False)
    program = StageCompiler(codegen="eager", policy=FINE).compile(captured.fresh(), phase="forward", options={})
    waiting = {stage.name: stage.waiting_bytes for stage in program.stages}
    assert waiting == {"forward/first": 0, "forward/second": 0, "forward/third": 8 * 32 * 4, "forward/last": 0}
