"""The benchmark of updates over several ranks: its ranks step together, and its losses are compared."""

from pathlib import Path

import pytest

from benchmarks.optimizer import LossesDiffer
from benchmarks.rank_optimizer import BYTES_EACH, POLICIES, same_losses
from benchmarks.ranks import RANKS, Ranks
from examples.gpt import GPTConfig
from examples.training import Setting, Step
from examples.worker import WorkerFailed
from planner.policies import POLICIES as KNOWN

SMALL = GPTConfig(layers=1, width=16, heads=1, context=8)


def step(loss: float) -> Step:
    return Step(loss=loss, seconds=1.0, tokens=8, phase="planned", resident_bytes={})


def test_policies_and_ways_are_known() -> None:
    assert set(POLICIES) <= set(KNOWN)
    assert BYTES_EACH.keys() <= Setting.model_fields.keys()


def test_ranks_take_their_steps_together(tmp_path: Path) -> None:
    setting = Setting(model=SMALL, batch=1, backend="eager", zero=True, text_bytes=1 << 12)
    with Ranks(setting, tmp_path / "{rank}.log") as ranks:
        losses = [ranks.step().loss for _ in range(2)]
        reports = ranks.finish()
    assert len(reports) == RANKS and all(0 < loss < 10 for loss in losses)
    assert len(list(tmp_path.glob("*.log"))) == RANKS


@pytest.mark.long
def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    setting = Setting(model=SMALL, batch=1, options={"memory_budget": 1}, zero=True, text_bytes=1 << 12)
    with pytest.raises(WorkerFailed), Ranks(setting, tmp_path / "{rank}.log") as ranks:
        ranks.step()


def test_losses_that_differ_are_an_error() -> None:
    same_losses({"ilp": [step(2.0)], "stride-2": [step(2.0001)]})
    with pytest.raises(LossesDiffer, match="ilp has loss 2.0, stride-2 2.1"):
        same_losses({"ilp": [step(2.0)], "stride-2": [step(2.1)]})
