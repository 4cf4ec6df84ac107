"""Stages that need far more memory than the others are cut anywhere, if that lowers what the graph needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.execution import Program, Stage, run_plain
from teraio.stages import CutPolicy, StageCompiler
from teraio.stages.codegen import Codegen, eager_codegen

from .graphs import Captured, capture, clones, features, transformer, with_loss

HEAVY = CutPolicy(shortest_seconds=1e-9, far_above=math.inf)
FINE = CutPolicy(shortest_seconds=1e-9)
LOGITS_BYTES = 4 * 16 * 512 * 4


def programs(graphs: Sequence[Captured], policy: CutPolicy, codegen: str | Codegen = "eager") -> list[Program]:
    compiler = StageCompiler(codegen=codegen, policy=policy)
    return [compiler.compile(g.fresh(), phase=g.phase, options={}) for g in graphs]


def floors(graphs: Sequence[Captured], policy: CutPolicy = FINE) -> list[int]:
    """What the largest stage of each graph needs by itself: in graphs as small as these, all that crosses a cut is too small to
    move."""
    return [max(s.need_bytes - s.waiting_bytes for s in program.stages) for program in programs(graphs, policy)]


def test_a_loss_over_a_vocabulary_needs_what_its_largest_operators_need() -> None:
    """Which read two tensors of the size of the logits at the most, and write one."""
    forward, backward = floors(with_loss(), HEAVY)
    assert forward >= 3 * LOGITS_BYTES and backward >= 5 * LOGITS_BYTES
    forward, backward = floors(with_loss())
    assert forward <= 2.4 * LOGITS_BYTES and backward <= 3.3 * LOGITS_BYTES


def test_a_graph_of_a_loss_alone_is_cut() -> None:
    """As after a graph break."""

    class Loss(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))

    graphs = capture(Loss(), torch.randn(64, 512, requires_grad=True))
    assert len(graphs) == 2
    for before, after in zip(floors(graphs, HEAVY), floors(graphs), strict=True):
        assert after <= 0.75 * before


def test_a_long_chain_of_elementwise_operators_is_cut() -> None:
    """As in a scan over time, of which backward computes all steps anew before it goes through them in the other order."""

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            state = total = torch.zeros_like(x)
            for _ in range(16):
                state = torch.tanh(state * 0.9 + x)
                total = total + state
            return self.last(total)

    graphs = capture(Scan(), features(256))
    assert floors(graphs)[1] <= 0.7 * floors(graphs, HEAVY)[1]
    for captured, program in zip(graphs, programs(graphs, FINE), strict=True):
        results = run_plain(program, clones(captured.arguments[0]))
        assert all(torch.equal(a, b) for a, b in zip(results, captured.results[0], strict=True) if isinstance(a, Tensor))


def test_what_a_compiler_fuses_stays_whole() -> None:
    """Inside a kernel nothing is materialised: a cut there would cost memory, time and one more compilation."""

    class Activation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
            self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(nn.functional.gelu(self.up(self.layers(x))))

    forward, _ = capture(Activation(), features(256))

    def stages(policy: CutPolicy, codegen: str | Codegen) -> list[Stage]:
        return list(programs([forward], policy, codegen)[0].stages)

    fused, whole = stages(FINE, eager_codegen), stages(HEAVY, "eager")
    assert len(fused) == len(whole) < len(stages(FINE, "eager"))
    (up,) = (number for number, stage in enumerate(whole) if stage.workspace_bytes > 256 * 512 * 4)
    assert fused[up].workspace_bytes < 64 << 10, "what is estimated follows"


def test_backward_is_not_cut_below_what_its_forward_graph_needs() -> None:
    large_forward, _ = capture(nn.Linear(512, 2048), torch.randn(8, 512))
    _, backward = with_loss()
    assert floors([large_forward, backward])[1] == floors([backward], HEAVY)[0]


def test_stages_like_the_others_stay_whole() -> None:
    def names(policy: CutPolicy) -> list[list[str]]:
        return [[stage.name for stage in program.stages] for program in programs(transformer(3), policy)]

    assert names(FINE) == names(HEAVY)


def test_small_stages_stay_whole() -> None:
    """Less than is read and written within the least duration of a stage."""
    wide = CutPolicy(shortest_seconds=1e-9)
    assert len(programs(with_loss(), CutPolicy())[1].stages) == 1 < len(programs(with_loss(), wide)[1].stages)
