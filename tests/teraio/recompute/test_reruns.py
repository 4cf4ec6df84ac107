"""Plans that nobody would choose, and forward stages that run again, also on demand: the bits of training without a budget."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import planner
from runtime.transfer import Engine

from ...thoroughness import every_other
from ..parity.harness import train
from ..virtual import link_rates
from .programs import PLAIN, PROGRAMS, ROWS, Model, check, follow, lower, one_pass, profiled, program

pytestmark = pytest.mark.usefixtures("same_program_at_every_budget", "deterministic")


@pytest.mark.parametrize(
    ("name", "tier", "seed", "share"),
    [("plain", "storage", 1, 0.6), ("plain", "host", 2, 1.0), ("plain", "both", 3, 0.0), ("accumulating", "storage", 0, 0.0)],
)
def test_random_plans(tmp_path: Path, name: str, tier: str, seed: int, share: float) -> None:
    trained = {"plain": PLAIN, **PROGRAMS}[name]
    known = profiled(trained, tmp_path, tier=tier)
    assert len(known.trace.recompute) >= 3
    follow(trained, known, tmp_path, seed, tier=tier, share=share, debug=seed % 2 == 1)


@pytest.mark.parametrize("name", every_other(*PROGRAMS))
def test_programs_by_random_plans(tmp_path: Path, name: str) -> None:
    known = profiled(PROGRAMS[name], tmp_path)
    follow(PROGRAMS[name], known, tmp_path, seed=3)


def test_dropout_of_eager_stages_is_not_run_again(tmp_path: Path) -> None:
    trace = profiled(program(lambda: Model(drop=0.2)), tmp_path).trace
    reasons = {entry.reason for entry in trace.not_recomputed}
    assert reasons == {"it draws random numbers (native_dropout)"}


def test_dropout_of_inductor(tmp_path: Path) -> None:
    """Its seeds are kept, so that the stages that drop run again too."""
    trained = program(lambda: Model(layers=2, drop=0.2), options={"codegen": "inductor"})
    known = profiled(trained, tmp_path)
    assert len(known.trace.recompute) >= 2
    follow(trained, known, tmp_path, seed=4)


# -- by a planner, where the drive is slow

SLOW = 1e7
"""Bytes per second: an activation takes half a second, and a stage takes milliseconds."""


LARGE = program(passes=partial(one_pass, rows=3 * ROWS), options={"solver_time_limit": 3})


@pytest.mark.parametrize("recompute", ["auto", "off"])
def test_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recompute: str) -> None:
    reference = train(LARGE)
    monkeypatch.setattr(Engine, "measure", lambda *_, **__: link_rates(SLOW, SLOW))
    # The policy that recomputes wherever it can: what "ilp" finds depends on how long the machine takes.
    monkeypatch.setattr(planner, "plan", partial(planner.plan, policy="checkpoint"))
    budget = int(0.8 * reference.status.device_peak_bytes)
    options = {"memory_budget": budget, "recompute": recompute, **lower("storage", tmp_path)}
    with caplog.at_level("INFO", logger="teraio"):
        result = train(LARGE, options=options)
    check(result, reference, budget)
    last = result.status
    assert last.phase == "planned"
    assert (last.recomputed_stages > 0) == (recompute == "auto")
    assert (last.recompute_seconds > 0) == (recompute == "auto")
    assert ("stages that run again an iteration" in caplog.text) == (recompute == "auto")
