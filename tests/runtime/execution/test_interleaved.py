"""Stages that run between those of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from runtime.execution import WorkspaceMeter, run_managed
from runtime.paging import Block

from ..memory_mover import Bench
from .programs import Recorder, chain, filled


@dataclass
class Taker:
    """Interleaved stages that note what they see, and take `slot` out when stage `after` has ended."""

    after: int
    slot: int
    stage_count: int = 2
    seen: list[tuple[int, list[str], list[bool]]] = field(default_factory=list)
    results: list[Any] | None = None

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        self.seen.append((number, [block.name for block in read], [slot is not None for slot in slots]))
        if number == self.after:
            slots[self.slot] = None

    def region_done(self, results: Sequence[Any]) -> None:
        self.results = list(results)


def test_interleaved_stages_see_each_stage_and_may_keep_results() -> None:
    bench, recorder, interleaved = Bench(None), Recorder(), Taker(after=1, slot=2)
    arguments = [filled(3), filled(4)]
    found = run_managed(chain(), arguments, bench.pager, recorder, WorkspaceMeter(None), interleaved)
    assert recorder.regions == [("p", 3 + 2)]
    assert interleaved.seen == [
        (0, ["slot0", "slot1"], [True, False, True, False, False]),
        (1, ["slot2"], [True, False, True, True, False]),
        (2, ["slot3", "slot0"], [False, False, False, False, True]),
    ]
    assert interleaved.results is not None and all(a is b for a, b in zip(interleaved.results, found, strict=True))
    assert torch.equal(found[0], filled(11)) and found[1] is None and found[2] is None
    bench.pager.forget_dead()
    assert [block.name for block in bench.pager.blocks] == ["slot4"], "what the interleaved stages have taken is gone"


def test_interleaved_stages_that_fail_leave_nothing_held() -> None:
    class Failing(Taker):
        def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
            raise ArithmeticError("no")

    bench, recorder, interleaved = Bench(None), Recorder(), Failing(after=0, slot=0)
    with pytest.raises(ArithmeticError):
        run_managed(chain(), [filled(3), filled(4)], bench.pager, recorder, WorkspaceMeter(None), interleaved)
    assert interleaved.results is None and recorder.ended == 1
    assert all(block.pins == 0 for block in bench.pager.blocks)
