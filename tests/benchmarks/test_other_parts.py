"""The parts beside Llamas at their smallest: the host's cost, ranks, slow drives, the emulated GPU, the layer-by-layer step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import emulated
from benchmarks.emulated import Emulation
from benchmarks.idle_stages import IdleStages
from benchmarks.idle_training import IdleTraining
from benchmarks.layer_by_layer import layer_by_layer
from benchmarks.rank_optimizer import BYTES_EACH, POLICIES
from benchmarks.ranks import RANKS, Ranks
from examples.gpt import GPTConfig
from examples.training import Setting
from planner import Budgets, Trace, plan, simulate
from planner.errors import TeraioError
from planner.policies import POLICIES as KNOWN
from tools.made_up_cuda.build import BuildError
from tools.made_up_cuda.emulated import build

from ..planner.traces import hardware, staged, subgroup, trace, trained

# -- host_cost


@pytest.fixture(params=[IdleStages, IdleTraining])
def moving(request: pytest.FixtureRequest) -> Iterator[IdleStages | IdleTraining]:
    made = request.param(500)
    yield made
    made.close()


def test_an_iteration_without_arithmetic_moves_what_is_planned(moving: IdleStages | IdleTraining) -> None:
    pager = moving.pager
    moving.iterate()
    before, pager.account.peak_bytes = pager.account.evictions, 0
    moving.iterate()
    assert pager.account.evictions - before == len(moving.moves) >= 1900
    assert pager.account.budget_bytes is not None and 0 < pager.account.peak_bytes <= pager.account.budget_bytes
    assert pager.account.waited_seconds == 0


# -- several ranks, drives that are held to a rate, an emulated GPU


def test_ranks_take_their_steps_together(tmp_path: Path) -> None:
    assert set(POLICIES) <= set(KNOWN) and BYTES_EACH.keys() <= Setting.model_fields.keys()
    small = GPTConfig(layers=1, width=16, heads=1, context=8)
    with Ranks(Setting(model=small, batch=1, backend="eager", zero=True, text_bytes=1 << 12), tmp_path / "{rank}.log") as ranks:
        losses = [ranks.step().loss for _ in range(2)]
        reports = ranks.finish()
    assert len(reports) == RANKS and all(0 < loss < 10 for loss in losses)
    assert len(list(tmp_path.glob("*.log"))) == RANKS


def test_what_the_emulated_gpu_lacks_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed_torch() -> None:
        raise BuildError("this torch is built without CUDA")

    monkeypatch.setattr(build, "installed_torch", installed_torch)
    with pytest.raises(TeraioError, match="^no emulated GPU: this torch is built without CUDA$"):
        emulated.measure(Emulation(output=tmp_path))


# -- the optimizer's step, layer by layer

LAYERS = 4
"""Each with a forward, a backward and an update; one weight, one gradient and one state of a byte, a byte a second."""


def layers_trace() -> Trace:
    blocks = [
        each for i in range(LAYERS) for each in trained((1, 1, 1), [i, 2 * LAYERS - 1 - i], 2 * LAYERS - 1 - i, 2 * LAYERS + i)
    ]
    subgroups = [subgroup(2 * LAYERS + i, range(3 * i, 3 * i + 3), 4.0, None) for i in range(LAYERS)]
    phases = "f" * LAYERS + "b" * LAYERS + "o" * LAYERS
    return trace(staged(phases, 4.0), blocks, hardware(rate=1.0), subgroups=subgroups)


@pytest.mark.parametrize("device_bytes", [4, 9])
def test_layer_by_layer_no_copy_in_for_a_subgroup_starts_before_its_turn(device_bytes: int) -> None:
    given = layers_trace()
    made = layer_by_layer(given, Budgets(device_bytes=device_bytes))
    assert made.policy == "layer-by-layer" and made.trace_fingerprint == given.fingerprint
    count, updates = len(given.stages), range(2 * LAYERS, 3 * LAYERS)
    for move in made.moves:
        assert move.prefetch is not None
        if move.before % count in updates:
            assert move.prefetch.start == move.before, "nothing comes before the update begins"
        assert move.prefetch.start % count not in updates or move.prefetch.start == move.before, "nor for others meanwhile"
    replayed = simulate(given, made)
    assert replayed.peak_bytes["device"] <= device_bytes
    best = plan(given, Budgets(device_bytes=device_bytes)).predicted
    assert best is not None and replayed.iteration_seconds > best.iteration_seconds
