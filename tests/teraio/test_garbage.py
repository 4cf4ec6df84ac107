"""While a plan is followed, Python's collector passes over what training holds for long; afterwards it does not."""

from __future__ import annotations

import gc
from pathlib import Path

from torch import Tensor

import teraio

from ..training import MIB, mean_square_step, random_rows, weights_of_1_mib


def test_objects_are_frozen_as_long_as_a_plan_is_followed(tmp_path: Path) -> None:
    training = weights_of_1_mib({"memory_budget": 10 * MIB, "storage": str(tmp_path)}, count=12)
    frozen: dict[str, list[int]] = {}

    def step(batch: Tensor, index: int) -> None:
        mean_square_step(training, batch)
        frozen.setdefault(teraio.status()[-1].phase, []).append(gc.get_freeze_count())

    training.run(random_rows(10), step, planned=True)
    assert not any(frozen["profile"]) and frozen["planned"] and all(frozen["planned"])
    training.finish()
    assert not gc.get_freeze_count()
